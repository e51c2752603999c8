"""Fashion-MNIST with a small ViT, Swin Transformer, ResNet or masked autoencoder.

    lineage train --config=fashion_mnist:MODEL,PATH --workdir=outputs/MODEL
    lineage train --config=fashion_mnist:finetune,PATH --workdir=outputs/finetune --config.init.path=outputs/mae

MODEL is vit, swin, resnet or mae; `finetune` is a ViT initialized with the encoder of the masked autoencoder. PATH is a
folder with the four idx files; the TFDS data set prepared in DIR gives the same batches, with
--config.source=tfds:fashion_mnist --config.source.data_dir=DIR --config.task.in_memory=true.
"""

from lineage.configs import base

VIT = {"variant": "mu", "unroll": 4, "patch_size": 4, "pooling": "gap"}
MODELS = {
    "vit": VIT,
    "mae": VIT,
    "finetune": VIT | {"position": "mae"},
    "swin": {"variant": "mu", "patch_size": 2, "window": 7},
    "resnet": {"variant": "18", "stem": "small", "stem_width": 16, "depths": (1, 1, 1), "widths": (16, 32, 64)},
}


def get_config(argument: str = "vit,fashion_mnist") -> base.ConfigDict:
    name, _, path = argument.partition(",")
    if name not in MODELS:
        raise ValueError(f"MODEL is {name!r}: it must be one of {', '.join(MODELS)}.")
    config = base.get_config("vit" if name == "finetune" else name, "image_classification", f"idx:{path}")
    config.model.update(MODELS[name])
    config.task.update(augment="flip | shift(2)", mean=(0.286,), std=(0.353,))
    config.loader.update(batch_size=128, evaluation_batch_size=1000)
    config.schedule.update(learning_rate=2e-3, warmup_percent=5.0)
    config.optimizer.weight_decay = 0.1
    config.update(total_epochs=10.0, log_every_steps=50, evaluate_every_epochs=2.0, save_every_epochs=2.0)
    if name == "mae":
        base.choose(config, "task", "masked_autoencoding")
        config.task.mask_rate = 0.75
        config.optimizer.update(b2=0.95, weight_decay=0.05)
        base.choose(config, "evaluators.linear", "linear_probe")
    else:
        config.task.label_smoothing = 0.1
    return config
