"""Sweeps, searches and cluster jobs."""
