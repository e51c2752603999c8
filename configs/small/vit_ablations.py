"""Ablations of the ViT paper (arXiv 2010.11929) at small scale, on Fashion-MNIST.

    python launch.py sweep --config=vit_ablations:WHAT,PATH --workdir=outputs/vit_WHAT

PATH is that of `fashion_mnist.py`, and WHAT is
position    what patches know of their place: nothing, or learned 1-D, 2-D or relative positions (appendix D.4)
pooling     what the class is read from: a class token, or the mean of all patches (appendix D.3)
size        ViT and a residual network, by the number of training images (section 4.3)
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from lineage.configs.small import fashion_mnist
from lineage.configs.sweeps import axis, product, repeat


def get_config(argument: str = "position,fashion_mnist") -> ConfigDict:
    config = fashion_mnist.get_config(f"vit,{argument.partition(',')[2]}")
    config.update(total_epochs=None, total_steps=800)
    config.evaluate_every_epochs = config.save_every_epochs = None
    config.evaluate_every_steps = config.save_every_steps = 800
    return config


def sweep(argument: str = "position,fashion_mnist") -> Iterator[dict]:
    what = argument.partition(",")[0]
    if what == "position":
        return repeat(axis("model.position", ("none", "1d", "2d", "relative")), seeds=2)
    if what == "pooling":
        return repeat(axis("model.pooling", ("token", "gap")), seeds=2)
    if what == "size":
        models = [
            {"model.name": name} | {f"model.{key}": value for key, value in fashion_mnist.MODELS[name].items()}
            for name in ("vit", "resnet")
        ]
        return product(axis("task.max_examples", (500, 5000, 60_000)), models)
    raise ValueError(f"{what!r} is not an ablation of ViT: it is one of position, pooling, size.")
