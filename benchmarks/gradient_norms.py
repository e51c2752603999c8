"""Gradient norms per layer at initialization, for Transformers with post- and pre-layer normalization.

python -m benchmarks.gradient_norms --folder=outputs/gradient_norms

The benchmark reproduces figure 3 of arXiv 2002.04745: the norms of the two matrices of each MLP in the base Transformer
with 6 + 6 layers, averaged over several initializations, each with its own batch of the dates of transformer_cldr.py.
"""

import argparse
from pathlib import Path

import jax
import numpy as np

from lineage.configs import cli
from lineage.report import figures
from lineage.train.experiment import Experiment

PLACEMENTS, SIDES, MATRICES = ("post", "pre"), ("encoder", "decoder"), ("up", "down")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="outputs/gradient_norms", help="folder of the plot")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="batch size")
    options = parser.parse_args()
    config, _ = cli.load("transformer_cldr")
    base = {"depth": 6, "width": 512, "num_heads": 8, "mlp_dim": 2048, "unroll": 1}
    cli.override(config, {f"model.{key}": value for key, value in base.items()} | {"loader.batch_size": options.batch})
    means = {placement: gradient_norms(config, placement, options.seeds) for placement in PLACEMENTS}
    columns = [(placement, matrix) for placement in PLACEMENTS for matrix in MATRICES]
    print(f"{'layer':12s}" + "".join(f"{placement}-norm {matrix:8s}" for placement, matrix in columns))
    for side in SIDES:
        for layer in range(config.model.depth):
            values = [means[placement][side, matrix][layer] for placement, matrix in columns]
            print(f"{side} {layer + 1:<4d}" + "".join(f"{value:<18.4f}" for value in values))
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    panels = {
        side: {
            f"{placement}-norm, {matrix}": (range(1, config.model.depth + 1), means[placement][side, matrix])
            for placement, matrix in columns
        }
        for side in SIDES
    }
    figures.save(figures.lines, panels, "layer", name="gradient_norms", folder=folder)
    print(folder / "gradient_norms.png")


def gradient_norms(config, placement: str, seeds: int) -> dict[tuple[str, str], np.ndarray]:
    """Return the mean gradient norm [L] by side and matrix."""
    cli.override(config, {"model.norm_placement": placement})
    experiment = Experiment(config)
    model, batches = experiment.model, experiment.data.train.iterate(0)

    @jax.jit
    def norms(seed, batch):
        def loss(params):
            total, weight, _ = experiment.task.loss(model.bind({"params": params}), batch)
            return total / weight

        params = model.init(jax.random.key(seed), batch["inputs"], batch["tokens"])["params"]
        grads = jax.grad(loss)(params)
        kernels = {
            (side, name): grads[f"{side}_stack"]["layers"]["mlp"][name]["kernel"] for side in SIDES for name in MATRICES
        }
        return {key: (kernel**2).sum(axis=(1, 2)) ** 0.5 for key, kernel in kernels.items()}

    samples = [jax.device_get(norms(seed, next(batches))) for seed in range(seeds)]
    return {key: np.mean([sample[key] for sample in samples], axis=0) for key in samples[0]}


if __name__ == "__main__":
    main()
