"""Swin-T on ImageNet-1k in 300 epochs (arXiv 2103.14030, section 4.1 and the authors' code).

The paper reports 81.3% top-1 on the validation split. The data are TFDS's imagenet2012, prepared under data.data_dir;
unlike the paper's, a hundredth of the training images is held out, to choose a checkpoint by.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config("swin")
    config.model.variant = "T"
    config.model.num_classes = 1000
    config.model.image_size = 224
    config.model.channels = 3
    config.model.stochastic_depth = 0.2

    config.data.source = "tfds:imagenet2012"
    config.data.train_split = "train[:99%]"
    config.data.validation_split = "train[99%:]"
    config.data.test_split = "validation"
    config.data.image_size = 224
    config.data.evaluation_crop = 0.875
    config.data.resample = "bicubic"
    config.data.augment = "crop(0.08) | flip | randaugment(2, 9, 0.5, 0.5, True) | erase(0.25)"
    config.data.mean = (0.485, 0.456, 0.406)
    config.data.std = (0.229, 0.224, 0.225)
    config.data.batch_size = 1024
    config.data.workers = 8
    config.objective.label_smoothing = 0.1
    config.objective.mixup = 0.8
    config.objective.cutmix = 1.0

    config.optimizer.learning_rate = 1e-3
    config.optimizer.end_factor = 0.01
    config.optimizer.warmup_percent = 100 * 20 / 300
    config.optimizer.weight_decay = 0.05
    config.optimizer.no_decay = ("bias$", "scale$", "relative/table$")
    config.optimizer.clip_norm = 5.0
    config.precision = "bfloat16"

    config.total_epochs = 300.0
    config.log_every_steps = 50
    config.evaluate_every_epochs = 5.0
    config.save_every_epochs = 1.0
    config.checkpoint.best = "validation/accuracy"
    config.checkpoint.best_is_highest = True
    return config
