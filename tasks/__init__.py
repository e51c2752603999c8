"""Tasks: what is learned from a batch."""
