"""ViT on ImageNet-21k in 90 epochs, as the paper pre-trains it (arXiv 2010.11929, table 3). It has not been run.

    python launch.py --config=configs/vit_imagenet21k.py:B --config.data.source=folder:DIR

The argument is a variant of models/vit.py: B, L or H. DIR has the images in train/<class>/ and validation/<class>/.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = "B") -> ConfigDict:
    config = base.get_config("vit")
    config.model.variant = variant
    config.model.patch_size = 14 if variant == "H" else 16
    config.model.num_classes = 21_843
    config.model.image_size = 224
    config.model.channels = 3
    config.model.head = "mlp"
    config.model.dropout = 0.1
    config.model.remat = "dots"

    config.data.source = "folder:imagenet21k"
    config.data.image_size = 224
    config.data.augment = "crop | flip"
    config.data.batch_size = 4096
    config.data.workers = 8

    config.optimizer.learning_rate = 1e-3
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 10_000
    config.optimizer.weight_decay = 0.03
    config.optimizer.clip_norm = 1.0
    config.precision = "bfloat16"

    config.total_epochs = 90.0
    config.log_every_steps = 50
    config.evaluate_every_steps = 10_000
    config.save_every_steps = 1000
    return config
