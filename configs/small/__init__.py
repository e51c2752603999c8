"""Experiments that run on a laptop. The results of most are in RESULTS.md."""
