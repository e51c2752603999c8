"""DeiT-S on ImageNet-1k (arXiv 2012.12877), with or without distillation. Not run yet.

    pip install -e '.[prepare]'
    tfds build imagenet2012 --manual_dir=DOWNLOADS --file_format=array_record
    lineage train --config=deit_s_imagenet
    lineage train --config=deit_s_imagenet:distilled --config.teacher=FOLDER

Training takes 300 epochs. The paper reports (table 9) 79.9% top-1 accuracy on the validation split, and 81.2% with hard
distillation from a RegNetY-16GF. FOLDER is the workdir of a run, or a folder in the layout of
transformers.
"""

from lineage.configs import base


def get_config(kind: str = "alone") -> base.ConfigDict:
    parts = {"alone": ("vit", "image_classification"), "distilled": ("deit", "distilled_image_classification")}
    if kind not in parts:
        raise ValueError(f"The DeiT variant is {kind!r}: it must be 'alone' or 'distilled'.")
    config = base.get_config(*parts[kind], "tfds:imagenet2012")
    config.model.update(variant="S", num_classes=1000, image_size=224, channels=3, stochastic_depth=0.1, unroll=12)
    config.source.update(train_split="train[:99%]", validation_split="train[99%:]", test_split="validation")
    config.task.update(image_size=224, evaluation_crop=0.875, resample="bicubic")
    config.task.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    config.task.augment = "crop(0.08) | flip | randaugment(2, 9, 0.5, 0.5, True) | erase(0.25)"
    config.task.update(label_smoothing=0.1, mixup=0.8, cutmix=1.0)
    config.loader.update(repeats=3, batch_size=1024, workers=8)
    config.schedule.update(learning_rate=1e-3, end_factor=0.01, warmup_percent=100 * 5 / 300)  # 5e-4 per 512 examples
    config.optimizer.update(weight_decay=0.05, no_decay=("bias$", "scale$", "token$", "^table/"), clip_norm=0.0)
    config.update(precision="bfloat16", total_epochs=300.0, log_every_steps=50, evaluate_every_epochs=5.0)
    config.save_every_epochs = 1.0
    config.checkpoint.best = "validation/accuracy"
    return config
