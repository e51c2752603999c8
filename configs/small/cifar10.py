"""CIFAR-10, by a small Vision Transformer or a residual network. Not run yet.

    python launch.py --config=cifar10:MODEL,PATH --workdir=outputs/cifar10_MODEL

MODEL is vit or resnet, PATH a folder of the binary version or of the one for Python. The residual network is ResNet-18
with a stem that keeps the resolution, and learns as such are usually trained on CIFAR; the Vision Transformer is
DeiT-Ti with patches of 4x4 pixels, and learns as DeiT does (arXiv 2012.12877, table 9).
"""

from ml_collections import ConfigDict

from lineage.configs import base

MODELS = {
    "vit": {"variant": "Ti", "patch_size": 4, "pooling": "gap", "stochastic_depth": 0.1},
    "resnet": {"variant": "18", "stem": "small"},
}


def get_config(argument: str = "vit,cifar10") -> ConfigDict:
    name, _, path = argument.partition(",")
    if name not in MODELS:
        raise ValueError(f"{name!r} is not a model for CIFAR-10: it is one of {', '.join(MODELS)}.")
    config = base.get_config(name, "image_classification", f"cifar:{path}")
    config.model.update(MODELS[name])
    config.loader.batch_size = 128
    config.task.augment = "shift(4) | flip"
    config.task.update(mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616))
    config.loader.evaluation_batch_size = 500
    config.optimizer.clip_norm = 0.0
    if name == "resnet":
        base.choose(config, "optimizer", "sgd")
        config.schedule.learning_rate = 0.1
        config.optimizer.weight_decay = 5e-3  # the usual 5e-4 goes through the momentum of 0.9, ours does not
    else:
        config.task.augment += " | randaugment(2, 9, 0.5, 0.5, True) | erase(0.25)"
        config.task.update(label_smoothing=0.1, mixup=0.8, cutmix=1.0)
        config.schedule.learning_rate = 5e-4
        config.optimizer.weight_decay = 0.05
        config.schedule.update(warmup_percent=5.0, end_factor=0.01)
    config.update(total_epochs=200.0, log_every_steps=50, evaluate_every_epochs=5.0, save_every_epochs=5.0)
    return config
