"""Lineage's side of `benchmarks.accelerator`; each job returns functions that prepare its rows (see `sections`)."""

import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lineage.configs import cli
from lineage.models.decoding.generate import generate
from lineage.models.jaxpr_costs import bytes_of, flops
from lineage.models.layers.attend import Mask, dense
from lineage.models.layers.attention import auto
from lineage.models.layers.quantized import take_rows
from lineage.models.resnet import Conv
from lineage.train.compiler.chips import chip_of
from lineage.train.compiler.compile import without_data
from lineage.train.experiment import Experiment
from lineage.train.loop import compile_step
from lineage.train.profiling.estimates import experiment_budget
from lineage.train.sharding import to_mesh
from lineage.train.step import cast

Settings = Mapping[str, Any]
Run = Callable[[float], Any]  # seconds to measure for -> seconds per repetition, or the results of a check
Rows = dict[str, Callable[[], tuple[dict[str, Any], Run]]]

WARM_UP = 3  # repetitions before the first measurement


def check(settings: Settings) -> None:
    """Raise RuntimeError if full sizes would run on a CPU."""
    if device()["device"] == "cpu" and not settings["on_cpu"]:
        raise RuntimeError("JAX finds no accelerator; --cpu and --tiny run on a CPU.")


def experiment(settings: Settings, devices: Any = None, workdir: Path | None = None) -> Experiment:
    """Return the experiment of the settings, by default on the first device."""
    config, _ = cli.load(settings["config"])
    changes = {key: tuple(value) if isinstance(value, list) else value for key, value in settings["changes"].items()}
    cli.override(config, {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1} | changes)
    return Experiment(without_data(config), workdir, devices or jax.devices()[:1])


def random_batch(of: Experiment) -> dict[str, np.ndarray]:
    """Return a batch of random tokens, with frequencies as in text, images and labels, without padding."""
    model, random = of.model, np.random.default_rng(0)
    length = getattr(of.task, "sequence_length", None)
    words = dict.fromkeys(("inputs", "tokens", "targets"), model.data_options["vocab_size"])
    limits = {"masked_positions": length, "segments": 2, "label": model.data_options["num_classes"] or 2}
    limits |= {"noise": np.iinfo(np.int32).max}

    def array(name, like):
        if like.dtype == bool:
            return np.ones(like.shape, bool)
        if name in words:
            return zipf(random, like.shape, words[name])
        if jnp.issubdtype(like.dtype, jnp.integer):
            return random.integers(0, limits[name], like.shape, like.dtype)
        return random.standard_normal(like.shape, like.dtype)

    return {name: array(name, like) for name, like in jax.eval_shape(of.zeros).items()}


def zipf(random: np.random.Generator, shape: tuple[int, ...], vocabulary: int) -> np.ndarray:
    """Return tokens whose frequencies are proportional to the inverse of their ranks, as those of words are."""
    weights = 1 / np.arange(1, vocabulary + 1)
    return random.choice(vocabulary, shape, p=weights / weights.sum()).astype(np.int32)


def measured_peak() -> float:
    """Measure the FLOP/s of float32 matrix products, for devices with unknown peak."""
    size = 1024
    a = jnp.ones((size, size))
    product = jax.jit(jnp.matmul).lower(a, a).compile()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


@cache
def device() -> dict[str, Any]:
    """Return the kind of the device, and the peaks of its matrix products and its memory, per second."""
    kind = jax.devices()[0].device_kind
    chip = chip_of(kind)
    peak = chip.peak if chip else measured_peak()
    return {"device": kind, "peak_flops": peak, "peak_bandwidth": (chip and chip.bandwidth) or None}


def timed(function: Callable[[], Any], *, lazy: bool = False, **facts: Any) -> tuple[dict[str, Any], Run]:
    """Return facts, and a function that times repeated calls; unless `lazy`, warm up."""
    run = measured(function, jax.block_until_ready)
    if not lazy:
        run(0)
    return {**device(), **facts}, run


def measured(function: Callable[[], Any], wait: Callable[[Any], Any]) -> Run:
    """Return a function that times repeated calls, after a warm-up when it is first called.

    `wait` waits for the result of a call.
    """

    def repeated(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            out = function()
        wait(out)
        return time.perf_counter() - start

    @cache
    def estimate() -> float:
        repeated(WARM_UP)
        return repeated(1)

    def run(seconds: float) -> float:
        count = max(1, round(seconds / estimate()))
        return repeated(count) / count

    return run


def training(settings: Settings) -> Rows:
    """Time the training step of an experiment on a random batch on the device.

    The first step that is measured allocates the memory.
    """

    def prepare():
        of = experiment(settings)
        arrays = random_batch(of)
        make_state = jax.jit(of.make_state, out_shardings=of.state_shardings).lower().compile()
        step = compile_step(of, of.abstract_state)
        kept = []

        def once():
            first = not kept
            if first:
                kept[:] = make_state(), to_mesh(arrays, of.mesh)
            kept[0], metrics = step(*kept)
            if first and not np.isfinite(loss := float(metrics["loss"])):
                raise FloatingPointError(f"the loss is {loss} in the first step.")
            return metrics

        shape = arrays["image" if "image" in arrays else "tokens"].shape
        count = sum(array.size for array in jax.tree.leaves(of.abstract_state.params))
        each = "pixels" if "image" in arrays else "tokens"
        sizes = f"{count / 1e6:,.0f}M parameters, {shape[0]} x {shape[1]:,} {each}"
        return timed(once, lazy=True, flops=experiment_budget(of).flops["training"]["model"], sizes=sizes)

    return {"training step": prepare}


def decoding(settings: Settings) -> Rows:
    """Time greedy generation after a prompt, with weights of the experiment's precision, by batch size."""
    of = experiment(settings)
    model, dtype, new = of.model, jnp.dtype(of.run.precision), settings["new"]
    tokens = jnp.zeros((1, 2), jnp.int32)
    variables = jax.jit(lambda: cast(model.init(jax.random.key(0), tokens), dtype))()

    def prepare(batch):
        prompts = np.random.default_rng(0).integers(0, model.vocab_size, (batch, settings["prompt"]), np.int32)
        once = partial(generate, model, variables, jnp.asarray(prompts), max_new_tokens=new, temperature=0.0)
        return timed(once, steps=new, bytes=new * token_bytes(model, variables, batch, settings))

    return {f"decoding, batch {batch}": partial(prepare, batch) for batch in settings["batches"]}


def token_bytes(model: Any, variables: Any, batch: int, settings: Settings) -> float:
    """Return the bytes that decoding a token must read: the weights, and the cache with half of the new tokens."""
    layers, heads, channels = model.cache_shape
    itemsize = jax.tree.leaves(variables)[0].dtype.itemsize
    live = settings["prompt"] + settings["new"] / 2
    return bytes_of(variables) + 2 * batch * live * layers * heads * channels * itemsize


def ceilings(settings: Settings) -> Rows:
    """Time a large matrix product and a pass over memory."""
    dtype = jnp.dtype(settings["dtype"])
    size, length = settings["size"], settings["bytes"] // dtype.itemsize
    draw = jax.jit(partial(jax.random.normal, dtype=dtype), static_argnums=1)

    def product():
        a, b = (draw(jax.random.key(i), (size, size)) for i in range(2))
        return timed(partial(jax.jit(jnp.matmul), a, b), flops=2 * size**3)

    def copy():
        return timed(partial(jax.jit(lambda x: x + 1), draw(jax.random.key(0), (length,))), bytes=2 * settings["bytes"])

    return {"matrix product": product, "copy": copy}


def products(settings: Settings) -> Rows:
    """Time matrix products of tokens and a kernel, forward and backward."""

    def prepare(tokens, inputs, features):
        shapes = (tokens, inputs), (inputs, features), (tokens, features)
        arrays = [jax.random.normal(jax.random.key(0), shape, jnp.dtype(settings["dtype"])) for shape in shapes]

        def gradients(x, kernel, cotangent):
            out, backward = jax.vjp(jnp.matmul, x, kernel)
            return out, backward(cotangent)

        return timed(partial(jax.jit(gradients), *arrays), flops=6 * tokens * inputs * features)

    return {product_name(*shape): partial(prepare, *shape) for shape in settings["shapes"]}


def product_name(tokens: int, inputs: int, features: int) -> str:
    """Return the row name of a matrix product."""
    return f"{tokens:,} tokens, {inputs:,} to {features:,} channels"


def convolutions(settings: Settings) -> Rows:
    """Time convolutions of `models.resnet`, forward and backward."""
    draw, dtype = jax.random.normal, jnp.dtype(settings["dtype"])

    def prepare(pixels, inputs, features, size, stride):
        conv = Conv(features, size, stride)
        image = draw(jax.random.key(0), (settings["batch"], pixels, pixels, inputs), dtype)
        kernel = cast(conv.init(jax.random.key(1), image.astype(jnp.float32)), dtype)
        cotangent = draw(jax.random.key(2), jax.eval_shape(conv.apply, kernel, image).shape, dtype)

        def gradients(*arrays):
            out, backward = jax.vjp(conv.apply, *arrays)
            return out, backward(cotangent)

        return timed(partial(jax.jit(gradients), kernel, image), flops=flops(gradients, kernel, image)["model"])

    return {convolution_name(*shape): partial(prepare, *shape) for shape in settings["shapes"]}


def convolution_name(pixels: int, inputs: int, features: int, size: int, stride: int) -> str:
    """Return the row name of a convolution."""
    return f"{size}x{size} of stride {stride}, {inputs} to {features} channels, {pixels} pixels"


def embeddings(settings: Settings) -> Rows:
    """Time the gradient of a table of bfloat16 vectors that tokens select."""

    def prepare(tokens, vocabulary, width):
        table = jax.random.normal(jax.random.key(0), (vocabulary, width), jnp.bfloat16)
        cotangent = jax.random.normal(jax.random.key(1), (tokens, width), jnp.bfloat16)

        def gradient(table, indices):
            return jax.vjp(lambda table: take_rows(table, indices), table)[1](cotangent)

        indices = zipf(np.random.default_rng(0), (tokens,), vocabulary)
        once = partial(jax.jit(gradient), table, jnp.asarray(indices))
        return timed(once, bytes=table.nbytes + cotangent.nbytes)

    return {embedding_name(*shape): partial(prepare, *shape) for shape in settings["shapes"]}


def embedding_name(tokens: int, vocabulary: int, width: int) -> str:
    """Return the row name of an embedding."""
    return f"{tokens:,} tokens, {vocabulary:,} vectors of {width}"


def attention(settings: Settings) -> Rows:
    """Time `auto` attention in bfloat16, forward and backward."""

    def prepare(causal, kv_heads):
        heads = (settings["heads"], kv_heads, kv_heads, settings["heads"])
        shapes = [(settings["batch"], settings["length"], count, settings["channels"]) for count in heads]
        *inputs, cotangent = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(shapes))

        def gradients(attend, *inputs):
            out, backward = jax.vjp(lambda *inputs: attend(*inputs, Mask(causal=causal)), *inputs)
            return out, backward(cotangent)

        cost = flops(partial(gradients, dense), *inputs)["model"]
        return timed(partial(jax.jit(partial(gradients, auto)), *inputs), flops=cost)

    return {name: partial(prepare, *case) for name, case in attention_cases(settings["heads"]).items()}


def attention_cases(heads: int) -> dict[str, tuple[bool, int]]:
    """Return whether attention is causal, and the number of key/value heads, by the name of the row."""
    return {"causal": (True, heads), "bidirectional": (False, heads), "causal, grouped queries": (True, heads // 4)}
