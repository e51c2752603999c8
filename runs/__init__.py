"""Sweeps, searches, cluster jobs and the folders of runs; nothing here imports JAX."""
