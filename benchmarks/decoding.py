"""Decoding speed of grouped-query attention, of GPT-2 compared with `transformers`, and of speculative decoding.

The benchmark also measures continuous batching and the quality of quantized weights and caches.

python -m benchmarks.decoding
python -m benchmarks.decoding --peer --depth=12 --width=768 --heads=12 --context=64 --new=64 --batch=8
python -m benchmarks.decoding --target=outputs/large --draft=outputs/small
python -m benchmarks.decoding --target=outputs/large --weights
python -m benchmarks.decoding --target=outputs/large --cache
python -m benchmarks.decoding --target=outputs/large --slots=8

Without arguments, it measures tokens per second after a prompt and the size of the cache for random Llama models with
multi-head, grouped-query and multi-query attention. With `--peer`, it measures greedy `generate` of GPT-2 and that of
`transformers` in eager mode, with the same random weights. With two runs that share a tokenizer, it measures tokens per
second of ordinary and of speculative decoding, the acceptance rate of draft tokens, the time of a target call for all
drafted tokens relative to a call for one token, and the ideal speed-up if only model calls took time. With
`--weights`, it measures the run's metrics and most probable tokens with float32, int8 and fp8 weights; with `--cache`,
the validation loss and most probable tokens with an int8 cache. With `--slots`, it counts and times the decoding steps
of continuous batching and of static batches, for prompts and limits of new tokens of different lengths.
Each round times all variants; medians over the rounds are printed.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import medians
from lineage.configs import cli
from lineage.models import convert
from lineage.models.decoding.continuous import Prompt, Slots
from lineage.models.decoding.generate import empty, generate, separate_layers
from lineage.models.decoding.speculative import speculate
from lineage.models.llama import Llama
from lineage.runs.process import keep_freed
from lineage.train.experiment import Experiment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="workdir of the target model")
    parser.add_argument("--draft", help="workdir of the draft model")
    parser.add_argument("--weights", action="store_true", help="measure the quality of quantized weights")
    parser.add_argument("--cache", action="store_true", help="measure the quality of an int8 cache")
    parser.add_argument("--slots", type=int, help="measure continuous batching with this many slots")
    parser.add_argument("--prompts", type=int, default=96, help="prompts of `--slots`")
    parser.add_argument("--peer", action="store_true", help="compare GPT-2 with `transformers`")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--batch", type=int, help="batch size (default 16; 1 for speculative decoding)")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature of speculative decoding")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processor-time", action="store_true", help="time of the processor, for a busy machine")
    options = parser.parse_args()
    options.clock = time.process_time if options.processor_time else time.perf_counter
    keep_freed()
    modes = {"peer": against_transformers, "draft": speculation, "slots": continuous}
    modes |= {"weights": weight_quality, "cache": cache_quality}
    measure = next((mode for name, mode in modes.items() if getattr(options, name)), grouped_queries)
    measure(options)


def against_transformers(options) -> None:
    """Time greedy decoding of GPT-2, here and in `transformers`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    rows, sizes = options.batch or 1, {"n_layer": options.depth, "n_embd": options.width, "n_head": options.heads}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    peer = GPT2LMHeadModel(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        model, variables = convert.load(folder)
    variables = jax.tree.map(jnp.asarray, variables)
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (rows, options.context))

    def theirs():
        with torch.inference_mode():
            kept = torch.ones(prompts.shape, dtype=torch.long)
            settings = {"attention_mask": kept, "max_new_tokens": options.new, "do_sample": False, "pad_token_id": 0}
            return peer.generate(torch.tensor(prompts), **settings).numpy()

    def ours():
        return generate(model, variables, prompts, max_new_tokens=options.new, temperature=0.0).tokens

    same = (np.asarray(ours()) == theirs()).mean()
    our, their = (1e3 * seconds / options.new for seconds in medians([ours, theirs], options.rounds, options.clock))
    print(f"depth {options.depth}, width {options.width}, {rows} rows, {options.new} tokens after {options.context}")
    print(f"{our:.2f} ms per token, in transformers {their:.2f}: {their / our:.2f} times its speed; equal {same:.1%}")


def grouped_queries(options) -> None:
    """Time attention with H, H / 4 and 1 key/value heads after a context."""
    rows, sizes = options.batch or 16, [options.heads, max(options.heads // 4, 1), 1]
    length, ways, caches = options.context + options.new, [], []
    for kv_heads in sizes:
        shape = {"depth": options.depth, "width": options.width, "num_heads": options.heads}
        model = Llama(vocab_size=256, max_length=length, num_kv_heads=kv_heads, **shape)
        variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
        ways.append(jax.jit(partial(write, model, variables, rows, options.context, options.new)))
        caches.append(cache_bytes(model, variables, rows, length))
    print(f"width {options.width}, depth {options.depth}, {options.heads} heads, {rows} rows after {options.context}")
    print("key/value heads   cache, MiB   of the first   tokens/s")
    for kv_heads, size, seconds in zip(sizes, caches, medians(ways, options.rounds)):
        speed = rows * options.new / seconds
        print(f"{kv_heads:<15d}   {size / 2**20:10.1f}   {size / caches[0]:12.4f}   {speed:8.0f}")


def write(model, variables, rows: int, context: int, new: int):
    """Decode `new` tokens greedily after a context of zeros; the content does not affect the time."""

    def step(carry, _):
        tokens, cache = carry
        logits, cache = model.apply(variables, tokens, cache, None, method="decode")
        return (logits.argmax(axis=-1), cache), None

    cache = model.apply(variables, rows, context + new, method="init_cache").rewind(jnp.full(rows, context))
    (tokens, _), _ = jax.lax.scan(step, (jnp.zeros((rows, 1), jnp.int32), cache), length=new)
    return tokens


def cache_bytes(model, variables, rows: int, length: int) -> int:
    """Return the bytes of the cached keys and values."""
    cache = jax.eval_shape(lambda: model.apply(variables, rows, length, method="init_cache"))
    return sum(part.size * part.dtype.itemsize for part in cache.key + cache.value)


def speculation(options) -> None:
    """Time the target alone, and with drafts of several lengths."""
    experiment, *pairs = restored(options.target, options.draft)
    tokens = experiment.data.splits["validation"][0]["tokens"][: options.batch or 1, :32]
    settings = {"max_new_tokens": options.new, "temperature": options.temperature}
    ways, calls, counts = {"target alone": partial(generate, *pairs[0], tokens, **settings)}, {}, (2, 4, 8)
    for count in counts:
        ways[f"{count} drafted"] = partial(speculate, *pairs[0], *pairs[1], tokens, num_drafted=count, **settings)
    for count in (1, *(count + 1 for count in counts)):
        calls[count] = partial(repeated, *pairs[0], np.repeat(tokens[:, :1], count, axis=1), options.new)
    calls["draft"] = partial(repeated, *pairs[1], tokens[:, :1], options.new)
    times = medians([*ways.values(), *calls.values()], options.rounds, options.clock)
    costs = dict(zip(calls, times[len(ways) :]))
    print(f"{len(tokens)} sequences, {options.new} new tokens, temperature {options.temperature:g}")
    print("                 tokens/s   accepted   target calls   cost of these   bound of the gain")
    for (name, way), seconds in zip(ways.items(), times):
        what, out = "", way()
        if "drafted" in name:
            count = int(name.split()[0])
            cost, draft = costs[count + 1] / costs[1], costs["draft"] / costs[1]
            bound = options.new / int(out.calls) / (cost + (count + 1) * draft)
            what = f"{out.acceptance_rate:8.1%}   {int(out.calls):12d}   {cost:13.2f}   {bound:17.2f}"
        print(f"{name:14s}   {tokens.shape[0] * options.new / seconds:8.0f}   {what}")
    print(f"A call of the draft takes {draft:.3f} of the time of one of the target for one token.")


@partial(jax.jit, static_argnums=(0, 3))
def repeated(model, variables, tokens, times):
    """Call a model repeatedly with a fixed number of tokens per sequence, without sampling."""
    variables = separate_layers(model, variables)
    start = jnp.full(len(tokens), 32)
    cache, _ = empty(model, variables, None, len(tokens), 32 + times + tokens.shape[1])

    def step(i, state):
        tokens, cache = state
        logits, cache = model.apply(variables, tokens, cache, None, method="decode")
        return logits.argmax(axis=-1).astype(tokens.dtype), cache.rewind(start + i)

    return jax.lax.fori_loop(0, times, step, (tokens, cache.rewind(start)))[0]


def restored(*folders):
    """Return the last of the given runs, and the model and the variables of each."""
    pairs = []
    for folder in folders:
        experiment = Experiment(cli.load(f"{folder}/config.json")[0], Path(folder))
        pairs.append((experiment.model, experiment.restore().variables(average=True)))
    return experiment, *pairs


def cache_quality(options) -> None:
    """Print cache size, loss and most probable tokens of windows of the validation split, decoded token by token."""
    experiment, (model, variables) = restored(options.target)
    batch = experiment.data.splits["validation"][0]
    tokens, targets = (jnp.asarray(batch[name][: options.batch or 16]) for name in ("tokens", "targets"))
    expected = None
    for kind in (None, "int8"):
        cache, _ = empty(model, variables, None, *tokens.shape, cache_format=kind)
        loss, likeliest = jax.jit(partial(one_by_one, model, cache_format=kind))(variables, tokens, targets)
        expected = likeliest if expected is None else expected
        size = sum(array.nbytes for array in jax.tree.leaves((cache.key, cache.value)))
        about = f"loss {loss:.5f}, perplexity {np.exp(loss):.5f}, agreement {(likeliest == expected).mean():.2%}"
        print(f"{kind or 'float32'}: {size / 2**20:.2f} MiB for {tokens.size} tokens, {about}")


def one_by_one(model, variables, tokens, targets, cache_format):
    """Return the mean loss of the targets and the most probable tokens [B, T], decoded token by token."""
    cache, _ = empty(model, variables, None, *tokens.shape, cache_format=cache_format)

    def step(cache, column):
        logits, cache = model.apply(variables, column[:, :1], cache, None, method="decode")
        scores = jax.nn.log_softmax(logits[:, 0])
        return cache, (-jnp.take_along_axis(scores, column[:, 1:], axis=1)[:, 0], scores.argmax(axis=-1))

    start = cache.rewind(jnp.zeros(len(tokens), jnp.int32))
    _, (losses, likeliest) = jax.lax.scan(step, start, jnp.stack([tokens, targets], axis=-1).swapaxes(0, 1))
    return losses.mean(), likeliest.T


def continuous(options) -> None:
    """Count and time the steps of continuous batching and of static batches, in the order of the prompts."""
    experiment, pair = restored(options.target)
    texts, rng = experiment.data.splits["validation"][0]["tokens"], np.random.default_rng(0)
    lengths = rng.integers(4, 33, options.prompts)
    limits = np.minimum(rng.geometric(1 / 48, options.prompts), 256)
    prompts = [Prompt(texts[row % len(texts), :n], int(new)) for row, (n, new) in enumerate(zip(lengths, limits))]
    refills = {"continuous": 1, f"{max(1, options.slots // 4)} at a time": max(1, options.slots // 4)}
    ways, slots = [], {}
    for name, refill in (refills | {"static": options.slots}).items():
        slots[name] = Slots(*pair, options.slots, refill, temperature=0.0)
        ways.append(lambda one=slots[name]: [each.tokens for each in one.generate(prompts)])
    times = medians(ways, options.rounds, options.clock)
    print(f"{options.prompts} prompts, {limits.sum()} tokens, at least {limits.sum() / options.slots:.0f} steps")
    for (name, one), seconds in zip(slots.items(), times):
        steps, rounds = (count // (options.rounds + 1) for count in (one.steps, one.rounds))
        print(f"{name:14s} {steps} steps, {rounds} rounds, {limits.sum() / seconds:.0f} tokens/s")


def weight_quality(options) -> None:
    """Print the metrics of a run in each format, and how often the most probable token equals that of float32."""
    config, _ = cli.load(f"{options.target}/config.json")
    expected: dict[str, np.ndarray] = {}
    for weights in (None, "int8", "fp8"):
        config.weights = weights
        experiment = Experiment(config, Path(options.target))
        variables, context = experiment.variables(experiment.restore()), experiment.context()
        metrics = experiment.evaluation()(variables)
        for split, batches in experiment.data.splits.items():
            likeliest = context.rows(partial(most_probable, context.task), variables, batches)
            metrics[f"{split}/agreement"] = (likeliest == expected.setdefault(split, likeliest)).mean()
        size = sum(array.nbytes for array in jax.tree.leaves(variables))
        print(f"{weights or 'float32'}: {size / 2**20:.2f} MiB")
        print("".join(f"  {key:40s} {value:.5f}\n" for key, value in metrics.items()))


def most_probable(task, model, batch):
    """Return the tokens with the highest logits."""
    return task.forward(model, batch).argmax(axis=-1)


if __name__ == "__main__":
    main()
