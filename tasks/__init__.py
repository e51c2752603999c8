"""Tasks: training objectives and their data, one file per task.

A task turns the content of a source into examples, and defines the arrays of a batch, the loss, the evaluators and the
artifacts of the report. Its fields are the keys of `config.task`.
"""

from lineage.configs.registry import load_all
from lineage.tasks.base import TASKS, Batch, Result, Task

load_all(__name__, __path__)
