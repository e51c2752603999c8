"""nanoGPT's character-level Shakespeare.

    curl -O https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    lineage train --config=gpt_shakespeare_char --config.source=text:input.txt
    lineage train --config=gpt_shakespeare_char:gpu --config.source=text:input.txt    # the larger recipe, for a GPU

The file is the text that nanoGPT uses (1,115,394 characters). For this short run, nanoGPT's CPU recipe is changed: no
gradient clipping, b2 = 0.999, evaluation with the moving average of the parameters, 50 warm-up steps, and no weight
decay on embeddings. RESULTS.md has results of both.
"""

from lineage.configs import base


def get_config(recipe: str = "cpu") -> base.ConfigDict:
    """Return the config of nanoGPT's recipe for a "cpu", or of the larger one for a "gpu"."""
    if recipe not in ("cpu", "gpu"):
        raise ValueError(f"The recipe is {recipe!r}: it must be cpu or gpu.")
    config = base.get_config("gpt", "causal_lm", "text:data/tinyshakespeare.txt", tokenizer="characters")
    config.model.update(depth=4, num_heads=4, width=128, use_bias=False, dropout=0.0, unroll=4)
    config.source.validation_fraction = 0.1
    config.task.update(sequence_length=64, stride=1)  # windows at every offset
    config.loader.update(batch_size=12, evaluation_batch_size=128)
    config.schedule.update(learning_rate=1e-3, end_factor=0.1, warmup_steps=50)
    config.optimizer.update(weight_decay=0.1, no_decay=("bias$", "scale$", "table$"), clip_norm=0.0)
    config.update(ema_decay=0.99, total_steps=2000, log_every_steps=10, evaluate_every_steps=250, save_every_steps=250)
    config.checkpoint.best = "validation/loss"
    config.sampling.update(num_samples=1, max_new_tokens=63, temperature=0.8)
    if recipe == "gpu":
        config.model.update(depth=6, num_heads=6, width=384, dropout=0.2, unroll=6)
        config.task.sequence_length = 256
        config.loader.update(batch_size=64, evaluation_batch_size=64)
        config.schedule.warmup_steps = 100
        config.optimizer.update(b2=0.99, no_decay=("bias$", "scale$"), clip_norm=1.0)
        config.update(ema_decay=0.0, total_steps=5000, precision="bfloat16")
        config.sampling.max_new_tokens = 255
    return config
