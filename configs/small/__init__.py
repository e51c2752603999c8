"""Experiments that run on a laptop."""
