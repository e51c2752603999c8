"""Runs that take seconds: `--config=tests/tiny.py:gpt`, `:transformer`, `:transformer_xl` and `:vit`."""

from ml_collections import ConfigDict

from lineage.configs import base
from lineage.configs.sweeps import Floats, Search

TASKS = {
    "gpt": ("causal_lm", "stdlib"),
    "transformer_xl": ("causal_lm", "stdlib"),
    "transformer": ("sequence_to_sequence", "cldr"),
}


def get_config(model: str = "gpt") -> ConfigDict:
    task, source = TASKS.get(model, ("image_classification", "digits"))
    config = base.get_config(model, task, source)
    config.model.depth = 2
    config.model.width = 16
    config.model.num_heads = 2
    config.loader.batch_size = 8
    config.loader.evaluation_batch_size = 64
    if model in ("gpt", "transformer_xl"):
        config.source.max_bytes = 20_000
        config.task.sequence_length = 16
        config.sampling.max_new_tokens = 8
        if model == "transformer_xl":
            config.model.memory_length = 24
            config.loader.order = "stream"
    elif model == "transformer":
        config.task.sequence_length = 48
        config.sampling.max_new_tokens = 12
        config.sampling.temperature = 0.0
        config.model.max_length = 64
    elif model == "vit":
        config.model.patch_size = 4
        config.model.pooling = "gap"
    config.schedule.learning_rate = 1e-2
    config.total_steps = 40
    config.log_every_steps = 1
    config.evaluate_every_steps = 20
    config.save_every_steps = 5
    return config


def sweep():
    yield {"seed": 1}
    yield {"seed": 2, "model.num_heads": 3}  # does not divide the width, so this run fails
    yield {"seed": 3}


def search():
    return Search({"schedule.learning_rate": Floats(1e-4, 1e-2, log=True)}, metric="test/loss", trials=2)
