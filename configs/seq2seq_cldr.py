"""Recurrent networks with attention that read dates as twelve locales write them, and write them as ISO 8601 has them.

    python launch.py --config=configs/seq2seq_cldr.py
    python launch.py --config=configs/seq2seq_cldr.py --sweep

On 2 busy CPU cores: 99.97% of the 3,630 test dates exactly right.

The sweep trains a model without attention that is too small for the task, in 600 steps, with more and more scheduled
sampling. On 2 busy CPU cores: with 0, 0.5 and 0.9 of its own tokens at the end of the training, its accuracy on the
test dates is 91.6%, 89.6% and 88.9% when it is given the right tokens, and 2.0, 1.8 and 1.1 points less when it goes
on from its own.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("seq2seq")
    config.model.cell = "gru"
    config.model.width = 64
    config.model.embed_width = 32
    config.model.attention = "additive"

    config.data.source = "cldr"
    config.data.tokenizer = "characters"
    config.data.sequence_length = 40
    config.data.batch_size = 64
    config.data.evaluation_batch_size = 256
    config.objective.name = "sequence_to_sequence"

    config.optimizer.learning_rate = 5e-3
    config.optimizer.warmup_percent = 5.0

    config.total_steps = 1000
    config.log_every_steps = 10
    config.evaluate_every_steps = 500
    config.save_every_steps = 500
    config.checkpoint.best = "validation/exact_match"
    config.checkpoint.best_is_highest = True
    config.sampling.prompt = "21 novembre 2026"
    config.sampling.num_samples = 1
    config.sampling.max_new_tokens = 11
    config.sampling.temperature = 0.0
    return config


def sweep() -> Iterator[dict]:
    """How far a model's accuracy falls when it reads its own predictions, with more and more of them in training."""
    for rate in (0.0, 0.5, 0.9):
        yield {
            "model.attention": "fixed",
            "model.width": 32,
            "total_steps": 600,
            "objective.scheduled_sampling": rate,
        }
