"""Ablations of the ViT paper (arXiv 2010.11929) at small scale, on Fashion-MNIST.

    lineage sweep --config=vit_ablations:STUDY,PATH --workdir=outputs/vit_STUDY

PATH is that of `fashion_mnist`, and STUDY is one of
position    position embedding: none, learned 1-D, learned 2-D or relative (appendix D.4)
pooling     class token or global average pooling (appendix D.3)
size        ViT and a residual network by the number of training images (section 4.3)
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from lineage.configs.small import fashion_mnist
from lineage.configs.sweeps import axis, product, repeat


def get_config(argument: str = "position,fashion_mnist") -> ConfigDict:
    config = fashion_mnist.get_config(f"vit,{argument.partition(',')[2]}")
    config.update(total_steps=800, evaluate_every_steps=800, save_every_steps=800)
    return config


def sweep(argument: str = "position,fashion_mnist") -> Iterator[dict]:
    study = argument.partition(",")[0]
    if study == "position":
        return repeat(axis("model.position", ("none", "1d", "2d", "relative")), seeds=2)
    if study == "pooling":
        return repeat(axis("model.pooling", ("token", "gap")), seeds=2)
    if study == "size":
        models = [
            {"model.name": name} | {f"model.{key}": value for key, value in fashion_mnist.MODELS[name].items()}
            for name in ("vit", "resnet")
        ]
        return product(axis("task.max_examples", (500, 5000, 60_000)), models)
    raise ValueError(f"STUDY is {study!r}: it must be one of position, pooling, size.")
