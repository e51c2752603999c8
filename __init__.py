"""Lineage: the Transformer and its family in JAX and Flax."""

__version__ = "0.1.0"
