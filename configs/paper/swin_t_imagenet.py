"""Swin-T on ImageNet-1k in 300 epochs (arXiv 2103.14030, section 4.1). Not run yet.

    pip install -e '.[prepare]'
    tfds build imagenet2012 --manual_dir=DOWNLOADS --file_format=array_record
    lineage train --config=swin_t_imagenet

The recipe is that of the paper and its code. The paper reports 81.3% top-1 accuracy on the validation split. Unlike in
the paper, 1% of the training images is held out to select a checkpoint.
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("swin", "image_classification", "tfds:imagenet2012")
    config.model.update(variant="T", num_classes=1000, image_size=224, channels=3, stochastic_depth=0.2, unroll=6)
    config.source.update(train_split="train[:99%]", validation_split="train[99%:]", test_split="validation")
    config.task.update(image_size=224, evaluation_crop=0.875, resample="bicubic")
    config.task.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    config.task.augment = "crop(0.08) | flip | randaugment(2, 9, 0.5, 0.5, True) | erase(0.25)"
    config.task.update(label_smoothing=0.1, mixup=0.8, cutmix=1.0)
    config.loader.update(batch_size=1024, workers=8)
    config.schedule.update(learning_rate=1e-3, end_factor=0.01, warmup_percent=100 * 20 / 300)
    config.optimizer.update(weight_decay=0.05, no_decay=("bias$", "scale$", "relative/table$"), clip_norm=5.0)
    config.update(precision="bfloat16", total_epochs=300.0, log_every_steps=50, evaluate_every_epochs=5.0)
    config.save_every_epochs = 1.0
    config.checkpoint.best = "validation/accuracy"
    return config
