"""The registry of architectures; each file of this package, and any file outside the project, adds its own."""

from lineage.configs.registry import Registry

MODELS = Registry("model")
