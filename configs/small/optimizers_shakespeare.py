"""Six optimizers of a GPT on tiny Shakespeare, tuned equally and compared with three seeds.

    lineage sweep --config=optimizers_shakespeare:muon --optuna --config.source=text:PATH/input.txt
    lineage sweep --config=optimizers_shakespeare --config.source=text:PATH/input.txt

The first command, repeated for each optimizer, searches its learning rate and weight decay with 20 trials. `TUNED`
holds the best values; the second command compares the optimizers with these values. The model and the data are those of
`gpt_shakespeare_char`, without its moving average of the parameters. All optimizers have a cosine schedule except the
schedule-free one, whose learning rate is constant. RESULTS.md has the results.
"""

from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from lineage.configs.schema import section
from lineage.configs.small import gpt_shakespeare_char
from lineage.configs.sweeps import Floats, Search
from lineage.train.optimizer import OPTIMIZERS, SCHEDULES

# Centers of the searched learning rates; Prodigy multiplies its own estimate by them.
RATES = {
    "adamw": 3e-3,
    "muon": 3e-3,
    "ademamix": 3e-3,
    "sophia": 1e-3,
    "prodigy": 1.0,
    "schedule_free_adamw": 1e-2,
}
# The learning rate and the weight decay of each optimizer's best trial, to two digits.
TUNED = {
    "adamw": (7.0e-3, 0.42),
    "muon": (2.7e-2, 0.22),
    "ademamix": (8.3e-3, 0.20),
    "sophia": (7.9e-4, 0.016),
    "prodigy": (3.8, 0.059),
    "schedule_free_adamw": (7.9e-3, 0.016),
}


def get_config(optimizer: str = "adamw") -> ConfigDict:
    """Return the config of an optimizer."""
    config = gpt_shakespeare_char.get_config()
    config.update(total_steps=500, evaluate_every_steps=100, save_every_steps=500, ema_decay=0.0)
    config.checkpoint.best = ""
    config.sampling.num_samples = 0
    config.optimizer = section(OPTIMIZERS, optimizer, no_decay=config.optimizer.no_decay)
    config.schedule = section(SCHEDULES, schedule_of(optimizer), learning_rate=RATES[optimizer], warmup_steps=50)
    return config


def search(optimizer: str = "adamw") -> Search:
    """Return the search of an optimizer: the learning rate within a factor of 10, and the weight decay."""
    center = RATES[optimizer]
    return Search(
        {
            "schedule.learning_rate": Floats(center / 10, center * 10, log=True),
            "optimizer.weight_decay": Floats(0.01, 1.0, log=True),
        }
    )


def sweep() -> Iterator[dict[str, Any]]:
    """Yield the tuned runs."""
    for optimizer, (rate, decay) in TUNED.items():
        for seed in (1, 2, 3):
            tuned = {"schedule.learning_rate": rate, "optimizer.weight_decay": decay, "seed": seed}
            yield {"optimizer.name": optimizer, "schedule.name": schedule_of(optimizer), **tuned}


def schedule_of(optimizer: str) -> str:
    """Return the schedule of an optimizer."""
    return "constant" if optimizer == "schedule_free_adamw" else "cosine"
