"""Conversion of checkpoints in the layout of `transformers`, with one module for each family of models."""

from lineage.configs.registry import load_all
from lineage.models.convert.family import FAMILIES
from lineage.models.convert.folder import config_of, describe, load, save

load_all(__name__, __path__)
