"""Experiments at the scale of the papers."""
