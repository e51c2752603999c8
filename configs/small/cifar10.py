"""CIFAR-10 with a small Vision Transformer or a residual network. Not run yet.

    lineage train --config=cifar10:MODEL,PATH --workdir=outputs/cifar10_MODEL

MODEL is vit or resnet; PATH is a folder with the binary or the Python version of the data set. The residual network is
ResNet-18 with a stem that keeps the resolution and a standard CIFAR training recipe; the Vision Transformer is DeiT-Ti
with 4x4 patches and the DeiT recipe (arXiv 2012.12877, table 9).
"""

from lineage.configs import base

MODELS = {
    "vit": {"variant": "Ti", "patch_size": 4, "pooling": "gap", "stochastic_depth": 0.1},
    "resnet": {"variant": "18", "stem": "small"},
}


def get_config(argument: str = "vit,cifar10") -> base.ConfigDict:
    name, _, path = argument.partition(",")
    if name not in MODELS:
        raise ValueError(f"MODEL is {name!r}: it must be one of {', '.join(MODELS)}.")
    config = base.get_config(name, "image_classification", f"cifar:{path}")
    config.model.update(MODELS[name])
    config.loader.update(batch_size=128, evaluation_batch_size=500)
    config.task.update(augment="shift(4) | flip", mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616))
    config.optimizer.clip_norm = 0.0
    if name == "resnet":
        base.choose(config, "optimizer", "sgd")
        config.schedule.learning_rate = 0.1
        config.optimizer.weight_decay = 5e-3  # usually 5e-4, which momentum 0.9 multiplies by 10; decoupled here
    else:
        config.task.augment += " | randaugment(2, 9, 0.5, 0.5, True) | erase(0.25)"
        config.task.update(label_smoothing=0.1, mixup=0.8, cutmix=1.0)
        config.schedule.update(learning_rate=5e-4, warmup_percent=5.0, end_factor=0.01)
        config.optimizer.weight_decay = 0.05
    config.update(total_epochs=200.0, log_every_steps=50, evaluate_every_epochs=5.0, save_every_epochs=5.0)
    return config
