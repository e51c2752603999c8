"""A small residual network on scikit-learn's 8x8 handwritten digits.

    python launch.py --config=configs/resnet_digits.py --workdir=runs/resnet_digits

On 2 CPU cores, busy with other work: 99.4% (357 of 359) on the held-out fifth.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("resnet")
    config.model.variant = "18"
    config.model.stem = "small"
    config.model.stem_width = 16
    config.model.depths = (1, 1, 1)
    config.model.widths = (16, 32, 64)

    config.data.source = "digits"
    config.data.augment = "shift(1)"
    config.data.batch_size = 64
    config.objective.label_smoothing = 0.1

    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_percent = 10.0
    config.optimizer.weight_decay = 0.1

    config.total_epochs = 40.0
    config.log_every_steps = 10
    config.evaluate_every_epochs = 10.0
    config.save_every_epochs = 10.0
    return config
