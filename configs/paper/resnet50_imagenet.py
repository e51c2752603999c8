"""ResNet-50 on ImageNet-1k in 90 epochs, batches of 256 (arXiv 1706.02677). Not run yet.

The paper, "Accurate, Large Minibatch SGD", reports a top-1 error of 23.6% on the validation split. The learning rate is
divided by 10 after 30, 60 and 80 epochs.

    pip install -e '.[prepare]'
    tfds build imagenet2012 --manual_dir=DOWNLOADS --file_format=array_record
    lineage train --config=resnet50_imagenet
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("resnet", "image_classification", "tfds:imagenet2012", optimizer="sgd", schedule="step")
    config.model.update(variant="50", num_classes=1000, image_size=224, channels=3)
    config.source.update(train_split="train[:99%]", validation_split="train[99%:]", test_split="validation")
    config.task.update(image_size=224, evaluation_crop=0.875, augment="crop | flip")
    config.task.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    config.loader.update(batch_size=256, workers=8)
    config.schedule.update(learning_rate=0.1, warmup_percent=100 * 5 / 90)
    config.schedule.milestones_percent = (100 * 30 / 90, 100 * 60 / 90, 100 * 80 / 90)
    config.optimizer.clip_norm = 0.0
    config.optimizer.weight_decay = 1e-3  # 1e-4 in the paper, where momentum 0.9 multiplies it by 10; decoupled here
    config.update(precision="bfloat16", total_epochs=90.0, log_every_steps=50, evaluate_every_epochs=1.0)
    config.save_every_epochs = 1.0
    config.checkpoint.best = "validation/accuracy"
    return config
