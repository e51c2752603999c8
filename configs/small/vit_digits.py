"""A small Vision Transformer on scikit-learn's 8x8 handwritten digits: `lineage train`."""

from lineage.configs import base
from lineage.configs.sweeps import axis


def get_config() -> base.ConfigDict:
    config = base.get_config("vit", "image_classification", "digits")
    config.model.update(variant="mu", patch_size=2, pooling="gap", stochastic_depth=0.1, unroll=4)
    config.task.update(augment="shift(1)", label_smoothing=0.1, mixup=0.2)
    config.loader.batch_size = 128
    config.schedule.update(learning_rate=3e-3, warmup_percent=10.0)
    config.optimizer.weight_decay = 0.2
    config.update(ema_decay=0.99, total_epochs=240.0, log_every_steps=10, evaluate_every_epochs=24.0)
    config.save_every_epochs = 24.0
    return config


def sweep() -> list[dict]:
    """Sweep over the position embeddings of the ViT paper (arXiv 2010.11929, appendix D.4)."""
    return axis("model.position", ("none", "1d", "2d", "relative"))
