"""nanoGPT's character-level Shakespeare.

    curl -O https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    lineage train --config=gpt_shakespeare_char --config.source=text:input.txt

The file is the text that nanoGPT uses (1,115,394 characters). For this short run, nanoGPT's CPU recipe is changed: no
gradient clipping, b2 = 0.999, evaluation with the moving average of the parameters, 50 warm-up steps, and no weight
decay on embeddings. RESULTS.md has results of both.
"""

from lineage.configs import base


def get_config(recipe: str = "cpu") -> base.ConfigDict:
    """Return the config of nanoGPT's recipe for a "cpu", or of the larger one for a "gpu"."""
    if recipe not in ("cpu", "gpu"):
        raise ValueError(f"The recipe is {recipe!r}: it must be cpu or gpu.")
    gpu = recipe == "gpu"
    config = base.get_config("gpt", "causal_lm", "text:data/tinyshakespeare.txt", tokenizer="characters")
    config.model.update(depth=6 if gpu else 4, num_heads=6 if gpu else 4, width=384 if gpu else 128)
    config.model.update(dropout=0.2 if gpu else 0.0, use_bias=False)
    config.model.unroll = config.model.depth
    config.source.validation_fraction = 0.1
    config.task.sequence_length = 256 if gpu else 64
    config.task.stride = 1  # windows at every offset
    config.loader.update(batch_size=64 if gpu else 12, evaluation_batch_size=64 if gpu else 128)
    config.schedule.update(learning_rate=1e-3, end_factor=0.1, warmup_steps=100 if gpu else 50)
    config.optimizer.update(b2=0.99 if gpu else 0.999, weight_decay=0.1)
    config.optimizer.no_decay = ("bias$", "scale$") if gpu else ("bias$", "scale$", "table$")
    config.optimizer.clip_norm = 1.0 if gpu else 0.0
    config.update(ema_decay=0.0 if gpu else 0.99, total_steps=5000 if gpu else 2000, log_every_steps=10)
    config.update(evaluate_every_steps=250, save_every_steps=250, precision="bfloat16" if gpu else "float32")
    config.checkpoint.best = "validation/loss"
    config.sampling.update(num_samples=1, max_new_tokens=config.task.sequence_length - 1, temperature=0.8)
    return config
