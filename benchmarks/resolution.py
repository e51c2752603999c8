"""FLOPs and time of a forward pass by image size: Swin against ViT.

python -m benchmarks.resolution --out=outputs/resolution

Swin-T and ViT-S/16 cost the same at 224 pixels. Swin's cost is linear in the image area, that of ViT's attention is
quadratic (arXiv 2103.14030, equations 1 and 2). FLOPs are those of the compiled program. Each round times both models;
the medians are printed and drawn in `resolution.png`.
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import medians
from lineage import models
from lineage.report import figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 448, 896], help="image sides in pixels")
    parser.add_argument("--swin", default="T", help="variant of Swin")
    parser.add_argument("--vit", default="S", help="variant of ViT")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the plot")
    options = parser.parse_args()
    variants = {"swin": options.swin, "vit": options.vit}
    names = [f"{models.MODELS[name].__name__}-{variant}" for name, variant in variants.items()]
    print(f"forward pass, batch {options.batch}, {jax.devices()[0].device_kind}")
    print(f"{'':6} {'GFLOP':^27}   {'ms':^27}")
    print(f"{'pixels':6}" + 2 * " {:>10} {:>9} {:>6}  ".format(*names, "ratio"))
    costs = []
    for size in options.sizes:
        passes = [compiled(name, variant, options.batch, size) for name, variant in variants.items()]
        times = medians([run for run, _ in passes], options.rounds)
        costs.append([[flops / 1e9 for _, flops in passes], [1e3 * seconds for seconds in times]])
        print(f"{size:6}" + "".join(f" {a:10,.1f} {b:9,.1f} {b / a:6.2f}  " for a, b in costs[-1]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    panels = {
        label: {name: (options.sizes, line) for name, line in zip(names, values.T)}
        for label, values in zip(("GFLOP", "ms"), np.array(costs).swapaxes(0, 1))
    }
    xlabel = "side of the image in pixels"
    figures.save(partial(figures.lines, logarithmic=True), panels, xlabel, name="resolution", folder=options.out)
    print(f"\n{options.out / 'resolution.png'}")


def compiled(name, variant, batch, size):
    """Return a function that runs a forward pass, and its FLOPs."""
    # The layers are unrolled because XLA counts the body of a loop only once.
    model, image = models.build(name, variant, image_size=size, unroll=12), jnp.ones((batch, size, size, 3))
    variables = jax.jit(model.init)(jax.random.key(0), image[:1])
    run = jax.jit(model.apply).lower(variables, image).compile()
    return lambda: run(variables, image), run.cost_analysis()["flops"]


if __name__ == "__main__":
    main()
