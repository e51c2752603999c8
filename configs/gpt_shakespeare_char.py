"""nanoGPT's character-level Shakespeare. Give the text: --config.data.source=text:PATH/input.txt."""

from ml_collections import ConfigDict

from configs import base


def get_config(recipe: str = "cpu") -> ConfigDict:
    """nanoGPT's recipe for a "cpu", or the larger one for a "gpu"."""
    if recipe not in ("cpu", "gpu"):
        raise ValueError(f"gpt_shakespeare_char has the recipes cpu and gpu, not {recipe!r}.")
    gpu = recipe == "gpu"
    config = base.get_config("gpt")
    config.model.depth = 6 if gpu else 4
    config.model.num_heads = 6 if gpu else 4
    config.model.width = 384 if gpu else 128
    config.model.dropout = 0.2 if gpu else 0.0
    config.model.unroll = config.model.depth

    config.data.source = "text:data/tinyshakespeare.txt"
    config.data.tokenizer = "characters"
    config.data.validation_fraction = 0.1
    config.data.sequence_length = 256 if gpu else 64
    config.data.stride = 1  # windows at every offset
    config.data.batch_size = 64 if gpu else 12
    config.data.evaluation_batch_size = 64 if gpu else 128
    config.objective.name = "causal_lm"

    config.optimizer.learning_rate = 1e-3
    config.optimizer.end_factor = 0.1
    config.optimizer.warmup_steps = 100
    config.optimizer.b2 = 0.99
    config.optimizer.weight_decay = 0.1
    config.optimizer.no_decay = ("bias$", "scale$")
    config.optimizer.clip_norm = 1.0

    config.total_steps = 5000 if gpu else 2000
    config.log_every_steps = 10
    config.evaluate_every_steps = 250
    config.save_every_steps = 250
    config.checkpoint.best = "validation/loss"
    config.precision = "bfloat16" if gpu else "float32"
    config.sampling.num_samples = 1
    config.sampling.max_new_tokens = config.data.sequence_length - 1
    config.sampling.temperature = 0.8
    return config
