"""Checks of `benchmarks.accelerator` without a peer: kernels, float32, a trace, several processes."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device import ours, process
from benchmarks.device.ours import Rows, Settings
from lineage.models import convert
from lineage.models.bigbird import random_blocks
from lineage.models.kernels.attention import kernels_for
from lineage.models.kernels.triton_programs import BLOCK
from lineage.models.layers.attend import DropWeights, Mask, Weighting, dense
from lineage.models.layers.attention import auto
from lineage.models.layers.sparse import BlockSparse
from lineage.train.loop import TrainingLoop
from lineage.train.profiling.throughput import Throughput

WINDOW = 49  # number of tokens in a window of Swin
FLOAT32_ERROR = 1e-4  # allowed relative error of outputs and gradients in float32
SMALL = {"hidden_size": 64, "n_embd": 64, "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4, "n_head": 4}
SMALL |= {"intermediate_size": 128, "vocab_size": 512}


def relative(found: Any, expected: Any) -> float:
    """Return the norm of the difference of two trees, relative to the norm of the second."""
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    ]
    return float(np.sqrt(sum(np.square(a - b).sum() for a, b in pairs) / sum(np.square(b).sum() for _, b in pairs)))


# Kernels


def masks(batch: int, length: int, heads: int) -> dict[str, tuple[Mask, dict[str, Any]]]:
    """Return the masks to check by name, with the arguments of `prepare` that differ from the default."""
    keys = jnp.arange(length) < jnp.linspace(length, length // 3, batch).astype(int)[:, None]
    segments = jnp.broadcast_to(jnp.arange(length) // (length // 3), (batch, length))
    bias = jax.random.normal(jax.random.key(9), (1, heads, length, length))
    window, shifted = {"queries": WINDOW, "keys": WINDOW}, segments[:, :: length // WINDOW][:, :WINDOW]
    blocks = {"queries": 12 * BLOCK, "keys": 12 * BLOCK, "pattern": BlockSparse(random_blocks(1, 12, 3, 0)[0], BLOCK)}
    return {
        "bidirectional": (Mask(), {}),
        "causal": (Mask(causal=True), {}),
        "padding": (Mask(keys=keys), {}),
        "causal, padding": (Mask(causal=True, keys=keys), {}),
        "segments": (Mask(segments=segments), {}),
        "causal, segments": (Mask(causal=True, segments=segments), {}),
        "window": (Mask(causal=True, window=length // 4), {}),
        "grouped queries": (Mask(causal=True), {"kv_heads": heads // 4}),
        "grouped queries, window": (Mask(causal=True, window=length // 4), {"kv_heads": heads // 4}),
        "cross-attention, padding": (Mask(keys=keys), {"queries": length // 2}),
        "bias": (Mask(bias=bias), {}),
        "padding, dropout": (Mask(keys=keys), {"rate": 0.1}),
        "causal, dropout": (Mask(causal=True), {"rate": 0.1}),
        "odd length": (Mask(), {"queries": length + 37, "keys": length + 37}),
        "odd length, causal": (Mask(causal=True), {"queries": length + 37, "keys": length + 37}),
        "128 channels": (Mask(causal=True), {"channels": 128}),
        "windows of Swin": (Mask(segments=shifted, bias=bias[..., :WINDOW, :WINDOW]), window),
        "windows of Swin, dropout": (Mask(segments=shifted), window | {"rate": 0.1}),
        "blocks of BigBird": (Mask(), blocks),
        "blocks of BigBird, dropout": (Mask(), blocks | {"rate": 0.1}),
    }


def kernels(settings: Settings) -> Rows:
    """Compare the attention that models use, forward and backward in bfloat16, with dense attention in float32.

    The allowed error is twice that of dense attention in bfloat16.
    """
    batch, length, heads, channels = (settings[name] for name in ("batch", "length", "heads", "channels"))

    def prepare(mask, queries=length, keys=length, kv_heads=heads, channels=channels, rate=0.0, pattern=None):
        drop = DropWeights(jnp.int32(1), rate) if rate else None
        shapes = [(queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)]
        arrays = [
            jax.random.normal(jax.random.key(i), (batch, *shape, channels), jnp.bfloat16)
            for i, shape in enumerate(shapes)
        ]
        if mask.keys is not None and queries == keys:  # outputs of padding differ between implementations
            arrays[3] = jnp.where(mask.keys[:, :, None, None], arrays[3], 0)

        def gradients(attend, mask, query, key, value, weights):
            def weighted(*inputs):
                out = attend(*inputs, mask).astype(jnp.float32)
                return (out * weights).sum(), jnp.where(weights == 0, 0, out)

            return jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True)(query, key, value)

        def compare(mask, *arrays):
            with jax.default_matmul_precision("highest"):
                exact = gradients(plain, mask, *(x.astype(jnp.float32) for x in arrays))
            return exact, {name: gradients(attend, mask, *arrays) for name, attend in implementations.items()}

        weighting = Weighting(transform=drop)
        plain = partial(pattern.gathered if pattern else dense, weighting=weighting)
        attend, find = (pattern, pattern.kernels) if pattern else (auto, kernels_for)
        chosen = candidates(partial(attend, weighting=weighting), find(*arrays[:3], mask, drop), arrays[0].shape[-1])
        implementations = {"dense": plain, **chosen}
        program = jax.jit(compare).lower(mask, *arrays).compile()
        return {}, lambda _: compared(*program(mask, *arrays))

    return {name: partial(prepare, mask, **sizes) for name, (mask, sizes) in masks(batch, length, heads).items()}


def candidates(attend: Any, found: dict[str, Any], channels: int) -> dict[str, Any]:
    """Return the attention, named after the kernel of this platform, and on a CPU also the emulated TPU kernel."""
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    names = {platform: getattr(kernel, "func", kernel).__name__ for platform, kernel in found.items()}
    chosen = {f"auto: {names.get(platform, 'no kernel')}": attend}
    if platform == "cpu" and "tpu" in found:
        chosen[f"{names['tpu']}, emulated"] = partial(found["tpu"], scale=channels**-0.5, interpret=True)
    return chosen


def compared(exact: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return the relative errors of the outputs and of the gradients, and whether they are within the tolerance."""
    errors = {}
    for name, ((_, out), grads) in found.items():
        pairs = zip((out, *grads), (exact[0][1], *exact[1]))
        errors[name] = [relative(a, b) for a, b in pairs]
    allowed = [2 * error + 1e-3 for error in errors["dense"]]
    ok = all(error <= limit for values in errors.values() for error, limit in zip(values, allowed))
    short = {name: {"forward": values[0], "backward": max(values[1:])} for name, values in errors.items()}
    return {"ok": ok, "errors": short}


# float32


def parity(settings: Settings) -> Rows:
    """Compare models in float32 on the device with `transformers` on the CPU: outputs, and gradients of their norm."""
    import torch
    import transformers

    small = SMALL if settings["small"] else {}
    llama = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 2816}
    kinds = {
        "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {}),
        "Llama": ("LlamaForCausalLM", "LlamaConfig", llama | {"num_key_value_heads": 4}),
        "BERT": ("BertForMaskedLM", "BertConfig", {}),
        "ViT": ("ViTForImageClassification", "ViTConfig", {}),
    }

    def prepare(model, config, sizes):
        torch.manual_seed(0)
        known = vars(getattr(transformers, config)())
        sizes = sizes | {key: value for key, value in small.items() if key in known}
        reference = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
        if model.startswith("ViT"):
            inputs = torch.randn(2, 3, 224, 224)
            mine = inputs.permute(0, 2, 3, 1)
        else:
            # Without token 0, BERT's padding, for whose embedding PyTorch computes no gradient.
            mine = inputs = torch.randint(1, reference.config.vocab_size, (2, 128))
        out = reference(inputs).logits
        out.square().mean().backward()
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            reference.save_pretrained(folder)
            loaded, variables = convert.load(folder)
            for parameter in reference.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            reference.save_pretrained(folder)
            expected = out.numpy(), convert.load(folder)[1]["params"]

        def loss(params, inputs):
            logits = loaded.apply({**variables, "params": params}, inputs)
            return jnp.square(logits).mean(), logits

        with jax.default_matmul_precision("highest"):
            program = jax.jit(jax.grad(loss, has_aux=True)).lower(variables["params"], mine.numpy()).compile()

        def run(_):
            grads, logits = program(variables["params"], mine.numpy())
            errors = {"forward": relative(logits, expected[0]), "backward": relative(grads, expected[1])}
            return {"ok": max(errors.values()) < FLOAT32_ERROR, "errors": {"float32": errors}}

        return {}, run

    return {name: partial(prepare, *kind) for name, kind in kinds.items()}


# The training loop


def trace(settings: Settings) -> Rows:
    """Profile steps of the training loop: the fraction of the time in which the device is idle.

    The time of a step of the loop is compared with that of the compiled step alone on one batch, without a profile.
    """
    stack = contextlib.ExitStack()

    def prepare():
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        of = ours.experiment(settings, workdir=folder)
        loop = TrainingLoop(of, Throughput(of), stack)
        steps = settings["steps"]

        def advance(first):
            for step in range(first, first + steps):
                loop.run(step)
            jax.block_until_ready(loop.state)

        def alone():
            for _ in range(steps):
                loop.state, _ = loop.step_function(loop.state, batch)
            jax.block_until_ready(loop.state)

        def run(_):
            seconds = []
            for work in (alone, partial(advance, steps + 1)):
                start = time.perf_counter()
                work()
                seconds.append((time.perf_counter() - start) / steps)
            with jax.profiler.trace(folder / "trace"):
                advance(2 * steps + 1)
            file = max((folder / "trace").rglob("*.xplane.pb"))
            idle, lines = idle_fraction(jax.profiler.ProfileData.from_file(str(file)).planes)
            return {"seconds": seconds[1], "over": seconds[1] / seconds[0] - 1, "idle": idle, "lines": lines}

        advance(1)
        batch = next(loop.batches)
        return ours.device() | {"flops": loop.throughput.budget.flops["training"]["model"]}, run

    return {"device idle": prepare}


def idle_fraction(planes: Iterable[Any]) -> tuple[float, list[str]]:
    """Return the fraction of a profile in which the device is idle, and the profile lines used.

    The lines are the streams of a GPU without copies, the operations of a TPU, or the threads of XLA on a CPU.
    """
    planes = list(planes)
    devices = [plane for plane in planes if plane.name.startswith(("/device:GPU", "/device:TPU"))]
    lines = [line for plane in devices[:1] for line in plane.lines]
    for prefix in ("Stream", "XLA Ops"):
        if chosen := [line for line in lines if line.name.startswith(prefix)]:
            break
    else:
        chosen = [line for plane in planes for line in plane.lines if "XLA" in line.name or "Eigen" in line.name]
    events = (event for line in chosen for event in line.events if not event.name.startswith("Memcpy"))
    spans = sorted((event.start_ns, event.end_ns) for event in events)
    if not spans:
        raise ValueError("the profile has no operations of the device.")
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - spans[0][0]), [line.name for line in chosen]


# Several processes


def processes(settings: Settings) -> Rows:
    """Train for a few steps with one process per device, and compare the losses with those of one process."""

    def prepare():
        cpu = jax.default_backend() == "cpu"
        count = 2 if cpu else jax.local_device_count()
        if jax.default_backend() == "tpu" or count < 2:
            why = "a process of a TPU owns all of its chips" if count > 1 else "there is one device"
            return {}, lambda _: {"skipped": f"skipped: {why}"}
        alone = process.losses(settings)
        return {}, lambda _: several(count, settings, alone)

    return {"losses": prepare}


def several(count: int, settings: Settings, alone: list[float]) -> dict[str, Any]:
    """Return the deviation of the losses of `count` processes from those of one process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks.device.process", address, str(count)]
    last = json.dumps(settings)
    started = [subprocess.Popen([*command, str(i), last], stdout=subprocess.PIPE, text=True) for i in range(count)]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"the processes ended with {[process.returncode for process in started]}.")
    together = json.loads(outputs[0].splitlines()[-1])
    error = max(abs(a / b - 1) for a, b in zip(together, alone, strict=True))
    return {"ok": error < FLOAT32_ERROR, "errors": {f"{count} processes": {"losses": error}}}
