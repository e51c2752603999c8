"""Time and memory of a training step by sequence length: BigBird against dense BERT.

python -m benchmarks.long_text

Both models have the same sizes and inputs; the step is the gradient of the sum of all outputs. Memory is the temporary
memory of the compiled step. Each round times both models; the medians are printed.
"""

import argparse

import jax
import jax.numpy as jnp

from benchmarks.timing import medians
from lineage import models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sizes = {"depth": options.depth, "width": options.width, "num_heads": options.heads, "vocab_size": 1000}
    print(f"{sizes}, batch {options.batch}, {jax.devices()[0].device_kind}")
    print(f"{'tokens':>8} {'BigBird':>10} {'dense':>10} {'ratio':>6}   {'BigBird':>11} {'dense':>11} {'ratio':>6}")
    for length in options.lengths:
        settings = sizes | {"max_length": length, "head": "none"}
        steps = [compiled(models.build(name, **settings), options.batch, length) for name in ("bigbird", "bert")]
        sparse, dense = (1e3 * seconds for seconds in medians([step for step, _ in steps], options.rounds))
        small, large = (memory / 2**20 for _, memory in steps)
        print(
            f"{length:8,d} {sparse:7.0f} ms {dense:7.0f} ms {dense / sparse:6.2f}   "
            f"{small:7.1f} MiB {large:7.1f} MiB {large / small:6.2f}",
            flush=True,
        )


def compiled(model, batch, length):
    """Return a function that runs a step, and its temporary memory in bytes."""
    tokens = jnp.arange(batch * length, dtype=jnp.int32).reshape(batch, length) % model.vocab_size
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :1])["params"]
    gradient = jax.jit(jax.grad(lambda params: model.apply({"params": params}, tokens).sum())).lower(params).compile()
    return lambda: gradient(params), gradient.memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    main()
