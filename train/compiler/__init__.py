"""Ahead-of-time compilation for TPUs and GPUs that are not present, and the cost of the compiled programs."""
