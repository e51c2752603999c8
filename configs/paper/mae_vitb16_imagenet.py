"""MAE with ViT-B/16 on ImageNet-1k (arXiv 2111.06377, appendix A.1). Not run yet.

    pip install -e '.[prepare]'
    tfds build imagenet2012 --manual_dir=DOWNLOADS --file_format=array_record
    lineage train --config=mae_vitb16_imagenet --workdir=outputs/mae
    lineage train --config=mae_vitb16_imagenet:finetune --config.init.path=outputs/mae
    lineage train --config=mae_vitb16_imagenet:probe --config.init.path=outputs/mae

After 1,600 epochs of pre-training (--config.total_epochs=1600), the paper reports 83.6% top-1 accuracy on the
validation split with fine-tuning, and 68.0% with a linear probe. --config.optimizer.frozen_layers=8 fine-tunes only the
last four layers. In the authors' code, fine-tuning also trains the position embeddings.
"""

from lineage.configs import base

STAGES = ("pretrain", "finetune", "probe")


def get_config(stage: str = "pretrain") -> base.ConfigDict:
    if stage not in STAGES:
        raise ValueError(f"The stage is {stage!r}: it must be one of {', '.join(STAGES)}.")
    config = base.get_config("mae" if stage == "pretrain" else "vit", "image_classification", "tfds:imagenet2012")
    config.model.update(variant="B", image_size=224, channels=3, unroll=12)
    config.source.update(train_split="train[:99%]", validation_split="train[99%:]", test_split="validation")
    config.task.update(image_size=224, evaluation_crop=0.875, resample="bicubic")
    config.task.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    config.loader.workers = 8
    config.optimizer.clip_norm = 0.0
    config.update(precision="bfloat16", log_every_steps=50, evaluate_every_epochs=10.0, save_every_epochs=1.0)
    if stage == "pretrain":
        base.choose(config, "task", "masked_autoencoding")
        config.task.update(mask_rate=0.75, augment="crop(0.2) | flip")
        config.loader.batch_size = 4096
        config.schedule.update(learning_rate=2.4e-3, warmup_percent=5.0)  # 1.5e-4 per 256 examples
        config.optimizer.update(b2=0.95, weight_decay=0.05)
        config.total_epochs = 800.0
        return config

    config.model.update(num_classes=1000, position="mae")
    config.checkpoint.best = "validation/accuracy"
    if stage == "finetune":
        config.model.stochastic_depth = 0.1
        config.task.augment = "crop(0.08) | flip | randaugment(2, 9, 0.5, 0.5, True)"
        config.task.update(label_smoothing=0.1, mixup=0.8, cutmix=1.0)
        config.loader.batch_size = 1024
        config.schedule.update(learning_rate=4e-3, warmup_percent=5.0)  # 1e-3 per 256 examples
        config.optimizer.update(layer_decay=0.75, weight_decay=0.05, no_decay=("bias$", "scale$", "token$"))
        config.total_epochs = 100.0
    else:
        config.model.head = "probe"
        config.task.augment = "crop(0.08) | flip"
        config.loader.batch_size = 16_384
        base.choose(config, "optimizer", "lars")
        config.schedule.update(learning_rate=6.4, warmup_percent=100 * 10 / 90)  # 0.1 per 256 examples
        config.optimizer.frozen = ("^(?!classifier)",)
        config.total_epochs = 90.0
    return config
