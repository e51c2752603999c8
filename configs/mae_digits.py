"""A masked autoencoder on scikit-learn's handwritten digits, then a ViT that goes on from it.

python launch.py --config=configs/mae_digits.py --workdir=runs/mae
python launch.py --config=configs/vit_digits.py --config.model.position=mae --config.init.path=runs/mae

"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("mae")
    config.model.variant = "mu"
    config.model.patch_size = 2
    config.model.unroll = 4

    config.data.source = "digits"
    config.data.task = "masked_images"
    config.data.mask_rate = 0.75
    config.data.augment = "shift(1)"
    config.data.batch_size = 128
    config.objective.name = "masked_reconstruction"

    config.optimizer.learning_rate = 3e-3
    config.optimizer.b2 = 0.95
    config.optimizer.warmup_percent = 10.0
    config.optimizer.weight_decay = 0.05

    config.total_epochs = 240.0
    config.log_every_steps = 10
    config.evaluate_every_epochs = 24.0
    config.save_every_epochs = 24.0
    return config
