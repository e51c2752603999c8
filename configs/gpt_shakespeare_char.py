"""nanoGPT's character-level Shakespeare, on the text that nanoGPT calls input.txt (1,115,394 characters).

    python launch.py --config=configs/gpt_shakespeare_char.py --config.data.source=text:PATH/input.txt

On 2 CPU cores (x86-64 with AVX-512): loss 1.878 (2.709 bits per character) over the whole last tenth of the text, 1 min
45 s in all. It differs from nanoGPT's CPU recipe where that helps so short a run: gradients are not clipped, b2 is
0.999, the parameters' average is evaluated, the warm-up is 50 steps, tables do not decay. RESULTS.md has nanoGPT's own
values.
"""

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
    config.model.use_bias = False
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
    config.optimizer.warmup_steps = 100 if gpu else 50
    config.optimizer.b2 = 0.99 if gpu else 0.999
    config.optimizer.weight_decay = 0.1
    config.optimizer.no_decay = ("bias$", "scale$") if gpu else ("bias$", "scale$", "table$")
    config.optimizer.clip_norm = 1.0 if gpu else 0.0
    config.ema_decay = 0.0 if gpu else 0.99

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
