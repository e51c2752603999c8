"""Cost of a masked autoencoder with and without mask tokens in the encoder (arXiv 2111.06377, table 1c).

python -m benchmarks.masked_encoder --sizes S B

Both models have the same parameters and the decoder of the paper. With mask tokens, the encoder processes all patches.
FLOPs count the matrix products of the encoder, and of a forward and backward pass of the whole model. Each round
times both models; the medians are printed. `--flops-only` does not measure times.
"""

import argparse
import os
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.timing import medians
from lineage import models
from lineage.models.jaxpr_costs import flops
from lineage.models.vit import ViT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S", "B"], choices=ViT.VARIANTS)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--patch-size", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flops-only", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{options.image_size} pixels, batch {options.batch}, {jax.devices()[0].device_kind}, load {load:.1f}")
    print(f"{'size':>4} {'part':>8} {'with':>14} {'without':>14} {'ratio':>6}")
    for size in options.sizes:
        sizes = {"image_size": options.image_size, "patch_size": options.patch_size, **ViT.VARIANTS[size]}
        without = models.build("mae", **sizes)
        pair = without.clone(mask_rate=0.0), without
        batch = example(options, without)
        init = jax.eval_shape if options.flops_only else lambda function, *args: jax.jit(function)(*args)
        variables = init(without.init, jax.random.key(0), *batch)
        for part in ("encoder", "step"):
            functions = [encoder(model) if part == "encoder" else gradient(model) for model in pair]
            show(size, part, [flops(function, variables, *batch)["model"] / 1e9 for function in functions], "GFLOP")
        if not options.flops_only:
            steps = [jax.jit(gradient(model)).lower(variables, *batch).compile() for model in pair]
            times = medians([partial(step, variables, *batch) for step in steps], options.rounds)
            show(size, "step", [1e3 * seconds for seconds in times], "ms")


def example(options, model):
    """Return random images and masking noise."""
    side = options.image_size // options.patch_size
    keys = jax.random.split(jax.random.key(1))
    noise = jax.random.uniform(keys[0], (options.batch, side**2))
    image = jax.random.normal(keys[1], (options.batch, options.image_size, options.image_size, model.channels))
    return image, noise


def encoder(model):
    """Return the forward pass of the encoder."""
    alone = model.clone(decoder_depth=0)
    return lambda variables, image, noise: alone.apply(variables, image, noise)


def gradient(model):
    """Return the gradient of the squared error of all patches."""

    def loss(variables, image, noise):
        predicted, _ = model.apply(variables, image, noise)
        return jnp.square(predicted - model.target(image)).mean()

    return jax.grad(loss)


def show(size, part, pair, unit):
    cells = " ".join(f"{value:8.1f} {unit:5}" for value in pair)
    print(f"{size:>4} {part:>8} {cells} {pair[0] / pair[1]:6.2f}", flush=True)


if __name__ == "__main__":
    main()
