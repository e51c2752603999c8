"""Padding and speed of training with packed rows, compared with rows of one document each.

python -m benchmarks.packing --length=512

The documents are the top-level definitions of Python's standard library, encoded by a BPE tokenizer of 4,096 tokens.
Both kinds of rows have the same documents; documents with more than `length` + 1 tokens are split. Steps of the loss
and its gradient for a GPT alternate between them; the speed counts the tokens without padding, at the median time.
"""

import argparse
import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import medians
from lineage.data import Documents
from lineage.data.examples.packing import Packed
from lineage.data.sources.text import StandardLibrary
from lineage.data.tokenizers import BPE
from lineage.data.tokens import tokenize
from lineage.models import MODELS
from lineage.tasks.causal_lm import CausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    modules = StandardLibrary(validation_fraction=0.0, max_bytes=4_000_000).documents()["train"]
    documents = Documents([text for module in modules for text in module.split("\n\n\n")])
    tokenizer = BPE(4096).train(documents)
    packed = Packed(tokenize(documents, tokenizer), options.length)
    alone = copy.copy(packed)
    alone.rows = np.arange(len(packed.starts) + 1)  # one part per row
    task = CausalLM(sequence_length=options.length, packing=True)
    sizes = {"vocab_size": tokenizer.vocab_size, "max_length": options.length, "num_heads": 4, "dropout": 0.0}
    model = MODELS["gpt"](**sizes, depth=options.depth, width=options.width)
    params = model.init(jax.random.key(0), jnp.zeros((1, options.length), int))["params"]

    @jax.jit
    def step(params, batch):
        return jax.grad(lambda params: task.loss(model.bind({"params": params}), batch)[0])(params)

    rows = {"packed": packed, "one document per row": alone}
    random = np.random.default_rng(0)
    batches = [source.take(random.integers(0, len(source), options.batch_size)) for source in rows.values()]
    times = medians([partial(step, params, batch) for batch in batches], options.rounds)
    print(f"{len(packed.starts):,} parts of documents with {packed.lengths.sum():,} tokens, rows of {options.length}")
    for (name, source), seconds in zip(rows.items(), times):
        filled = packed.lengths.sum() / (len(source) * options.length)
        speed = filled * options.batch_size * options.length / seconds
        print(f"{name:20} {len(source):7,} rows, {1 - filled:6.1%} padding, {speed:8,.0f} tokens/s")


if __name__ == "__main__":
    main()
