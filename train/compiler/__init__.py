"""Ahead-of-time compilation for TPUs and GPUs that are not present, and the cost of the compiled programs."""

from lineage.train.compiler.plan import Plan
from lineage.train.compiler.targets import Chip, Target, parse, prepare

__all__ = ["Chip", "Plan", "Target", "parse", "prepare"]
