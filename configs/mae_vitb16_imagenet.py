"""MAE with ViT-B/16 on ImageNet-1k (arXiv 2111.06377, appendix A.1). It has not been run.

    python launch.py --config=configs/mae_vitb16_imagenet.py --workdir=runs/mae
    python launch.py --config=configs/mae_vitb16_imagenet.py:finetune --config.init.path=runs/mae
    python launch.py --config=configs/mae_vitb16_imagenet.py:probe --config.init.path=runs/mae

The paper reports 83.6% top-1 on the validation split after fine-tuning, and 68.0% of the linear probe, after 1,600
epochs of pre-training: --config.total_epochs=1600. --config.optimizer.frozen_layers=8 fine-tunes the last four layers
alone. The data are TFDS's imagenet2012, prepared under data.data_dir. The authors' code trains the positions too in
fine-tuning.
"""

from ml_collections import ConfigDict

from configs import base

TASKS = ("pretrain", "finetune", "probe")


def get_config(task: str = "pretrain") -> ConfigDict:
    if task not in TASKS:
        raise ValueError(f"{task!r} is nothing to do with MAE: it is one of {', '.join(TASKS)}.")
    config = base.get_config("mae" if task == "pretrain" else "vit")
    config.model.variant = "B"
    config.model.image_size = 224
    config.model.channels = 3

    config.data.source = "tfds:imagenet2012"
    config.data.train_split = "train[:99%]"
    config.data.validation_split = "train[99%:]"
    config.data.test_split = "validation"
    config.data.image_size = 224
    config.data.evaluation_crop = 0.875
    config.data.resample = "bicubic"
    config.data.mean = (0.485, 0.456, 0.406)
    config.data.std = (0.229, 0.224, 0.225)
    config.data.workers = 8

    config.optimizer.clip_norm = 0.0
    config.precision = "bfloat16"
    config.log_every_steps = 50
    config.evaluate_every_epochs = 10.0
    config.save_every_epochs = 1.0
    if task == "pretrain":
        config.data.task = "masked_images"
        config.data.mask_rate = 0.75
        config.data.augment = "crop(0.2) | flip"
        config.data.batch_size = 4096
        config.objective.name = "masked_reconstruction"
        config.optimizer.learning_rate = 2.4e-3  # 1.5e-4 for every 256 examples
        config.optimizer.warmup_percent = 5.0
        config.optimizer.b2 = 0.95
        config.optimizer.weight_decay = 0.05
        config.total_epochs = 800.0
        return config

    config.model.num_classes = 1000
    config.model.position = "mae"
    config.checkpoint.best = "validation/accuracy"
    config.checkpoint.best_is_highest = True
    if task == "finetune":
        config.model.stochastic_depth = 0.1
        config.data.augment = "crop(0.08) | flip | randaugment(2, 9, 0.5, 0.5, True)"
        config.data.batch_size = 1024
        config.objective.label_smoothing = 0.1
        config.objective.mixup = 0.8
        config.objective.cutmix = 1.0
        config.optimizer.learning_rate = 4e-3  # 1e-3 for every 256 examples
        config.optimizer.layer_decay = 0.75
        config.optimizer.warmup_percent = 5.0
        config.optimizer.weight_decay = 0.05
        config.total_epochs = 100.0
    else:
        config.model.head = "probe"
        config.data.augment = "crop(0.08) | flip"
        config.data.batch_size = 16_384
        config.optimizer.name = "lars"
        config.optimizer.learning_rate = 6.4  # 0.1 for every 256 examples
        config.optimizer.frozen = ("^(?!classifier)",)
        config.optimizer.warmup_percent = 100 * 10 / 90
        config.total_epochs = 90.0
    return config
