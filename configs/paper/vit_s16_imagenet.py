"""ViT-S/16 on ImageNet-1k in 90 epochs (arXiv 2205.01580). Not run yet.

The paper, "Better plain ViT baselines for ImageNet-1k", reports 76.5% top-1 accuracy on the validation split.

    pip install -e '.[prepare]'
    tfds build imagenet2012 --manual_dir=DOWNLOADS --file_format=array_record
    lineage train --config=vit_s16_imagenet
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("vit", "image_classification", "tfds:imagenet2012")
    config.model.update(variant="S", num_classes=1000, image_size=224, channels=3, position="sincos2d", pooling="gap")
    config.model.update(head="mlp", unroll=12)
    config.source.update(train_split="train[:99%]", validation_split="train[99%:]", test_split="validation")
    config.task.update(image_size=224, evaluation_crop=0.875, augment="crop | flip | randaugment(2, 10)", mixup=0.2)
    config.loader.update(batch_size=1024, workers=8)
    config.schedule.update(learning_rate=1e-3, warmup_steps=10_000)
    config.optimizer.weight_decay = 0.1  # 1e-4 in the paper, which does not multiply it by the learning rate of 1e-3
    config.optimizer.update(no_decay=("bias$", "scale$"), clip_norm=1.0)
    config.update(precision="bfloat16", total_epochs=90.0, log_every_steps=50, evaluate_every_steps=2500)
    config.save_every_steps = 1000
    config.checkpoint.best = "validation/accuracy"
    return config
