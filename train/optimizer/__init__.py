"""Optimizers and learning-rate schedules, from optax; their fields are the keys of the config's sections."""

from lineage.train.optimizer.base import OPTIMIZERS, Optimizer, check_layers, map_paths, merged, paths_of
from lineage.train.optimizer.modern import averaged
from lineage.train.optimizer.rules import SGD, AdamW
from lineage.train.optimizer.schedules import SCHEDULES, LearningRate
