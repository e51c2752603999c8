"""nanoGPT's character-level Shakespeare.

    python launch.py --config=gpt_shakespeare_char --config.source=text:PATH/input.txt

PATH/input.txt is the text that nanoGPT uses (1,115,394 characters).

On 2 CPU cores (x86-64 with AVX-512): loss 1.878 (2.709 bits per character) over the whole last tenth of the text, 1 min
45 s in all. It differs from nanoGPT's CPU recipe where that helps so short a run: gradients are not clipped, b2 is
0.999, the parameters' average is evaluated, the warm-up is 50 steps, tables do not decay. RESULTS.md has nanoGPT's own
values.
"""

from ml_collections import ConfigDict

from lineage.configs import base


def get_config(recipe: str = "cpu") -> ConfigDict:
    """nanoGPT's recipe for a "cpu", or the larger one for a "gpu"."""
    if recipe not in ("cpu", "gpu"):
        raise ValueError(f"gpt_shakespeare_char has the recipes cpu and gpu, not {recipe!r}.")
    gpu = recipe == "gpu"
    config = base.get_config("gpt", "causal_lm", "text:data/tinyshakespeare.txt", tokenizer="characters")
    config.model.update(depth=6 if gpu else 4, num_heads=6 if gpu else 4, width=384 if gpu else 128)
    config.model.update(dropout=0.2 if gpu else 0.0, use_bias=False)
    config.model.unroll = config.model.depth
    config.source.validation_fraction = 0.1
    config.task.sequence_length = 256 if gpu else 64
    config.task.stride = 1  # windows at every offset
    config.loader.update(batch_size=64 if gpu else 12, evaluation_batch_size=64 if gpu else 128)
    config.schedule.learning_rate = 1e-3
    config.schedule.update(end_factor=0.1, warmup_steps=100 if gpu else 50)
    config.optimizer.update(b2=0.99 if gpu else 0.999, weight_decay=0.1)
    config.optimizer.no_decay = ("bias$", "scale$") if gpu else ("bias$", "scale$", "table$")
    config.optimizer.clip_norm = 1.0 if gpu else 0.0
    config.update(ema_decay=0.0 if gpu else 0.99, total_steps=5000 if gpu else 2000, log_every_steps=10)
    config.update(evaluate_every_steps=250, save_every_steps=250)
    config.checkpoint.best = "validation/loss"
    config.precision = "bfloat16" if gpu else "float32"
    config.sampling.update(num_samples=1, max_new_tokens=config.task.sequence_length - 1, temperature=0.8)
    return config
