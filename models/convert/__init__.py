"""Conversion of checkpoints in the layout of `transformers`, with one module for each family of models."""

from lineage.configs.registry import load_all
from lineage.models.convert.family import FAMILIES
from lineage.models.convert.folder import describe, load, model_type, save

load_all(__name__, __path__)
