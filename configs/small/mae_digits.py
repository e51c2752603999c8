"""A masked autoencoder on scikit-learn's handwritten digits, then a fine-tuned ViT.

lineage train --config=mae_digits --workdir=outputs/mae
lineage train --config=vit_digits --workdir=outputs/mae_vit --config.model.position=mae --config.init.path=outputs/mae
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("mae", "masked_autoencoding", "digits")
    config.model.update(variant="mu", patch_size=2, unroll=4)
    config.task.update(mask_rate=0.75, augment="shift(1)")
    config.loader.batch_size = 128
    config.schedule.update(learning_rate=3e-3, warmup_percent=10.0)
    config.optimizer.update(b2=0.95, weight_decay=0.05)
    config.update(total_epochs=240.0, log_every_steps=10, evaluate_every_epochs=24.0, save_every_epochs=24.0)
    return config
