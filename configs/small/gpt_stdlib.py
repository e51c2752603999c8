"""A small GPT on the source text of Python's standard library.

lineage train --config=gpt_stdlib
lineage sweep --config=gpt_stdlib --optuna --workdir=outputs/gpt_search
"""

from lineage.configs import base
from lineage.configs.sweeps import Floats, Search


def get_config() -> base.ConfigDict:
    config = base.get_config("gpt", "causal_lm", "stdlib", tokenizer="bpe")
    config.model.update(depth=4, num_heads=4, width=192, unroll=4)
    config.tokenizer.vocab_size = 2048
    config.task.sequence_length = 128
    config.loader.update(batch_size=16, evaluation_batch_size=64)
    config.source.max_bytes = 8_000_000
    config.schedule.update(learning_rate=2e-3, end_factor=0.1, warmup_percent=5.0)
    config.optimizer.update(b2=0.99, weight_decay=0.1)
    config.update(total_steps=1500, log_every_steps=10, evaluate_every_steps=500, save_every_steps=500)
    config.checkpoint.best = "validation/loss"
    config.sampling.update(prompt="def ", num_samples=2, max_new_tokens=96, temperature=0.8)
    return config


def search() -> Search:
    """Search over learning rate, weight decay and dropout, with pruning."""
    space = {
        "schedule.learning_rate": Floats(3e-4, 1e-2, log=True),
        "optimizer.weight_decay": Floats(0.01, 0.3, log=True),
        "model.dropout": Floats(0.0, 0.2),
    }
    return Search(space, metric="validation/loss", trials=20)
