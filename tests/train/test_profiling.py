"""Cost estimates of experiments match XLA's memory plan for the training step."""

import math
import threading
import time
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from lineage.configs import cli
from lineage.train import preparation
from lineage.train.experiment import Experiment
from lineage.train.profiling.estimates import experiment_budget, memory_per_device, out_of_memory_explained
from lineage.train.profiling.throughput import Throughput, resources
from tests.tiers import tiered

# No tokenizer is needed of a model whose embeddings are not loaded.
ADAPTED = {"init.path": "there", "init.skip": ("embed",), "adapter.name": "lora", "task.name": "causal_lm"}
ZOO = {
    "gpt_stdlib": {},
    "vit_digits": {},
    "bert_stdlib": {"grad_accum_steps": 4},
    "t5_stdlib": {"model.remat": "full", "grad_accum_steps": 2},
    "llama_stdlib": ADAPTED,
}
# Meshes for the memory per device: without constraints on batch axes, XLA shards the activations as the tables.
SPREAD = {
    "fsdp": {"mesh.fsdp": 4},
    "tensor": {"mesh.data": 2, "mesh.tensor": 2},
    "sequence": {"mesh.data": 2, "mesh.tensor": 2, "sequence_sharding": True},
}
SLOW = {
    "bart_stdlib": {},
    "bert_stdlib": {},
    "bigbird_stdlib": {},
    "detr_shapes": {},
    "elmo_stdlib": {},
    "gpt_stdlib": {"model.remat": "full", "grad_accum_steps": 4},
    "llama_stdlib": {},
    "mae_digits": {},
    "resnet_digits": {},
    "seq2seq_cldr": {},
    "swin_digits": {},
    "t5_stdlib": {},
    "transformer_cldr": {},
    "transformer_xl_stdlib": {},
}


# On CPUs, XLA runs independent operations concurrently, which needs more memory: the directions of an LSTM.
INDEPENDENT = ("elmo_stdlib",)
ONE_AFTER_THE_OTHER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def experiment(name, changes):
    config, _ = cli.load(name)
    if "unroll" in config.model:
        config.model.unroll = 1
    if config.source.name == "stdlib":
        config.source.max_bytes = 1_000_000
    cli.override(config, changes)
    return Experiment(config, devices=jax.devices()[: max(config.mesh.data, 1) * config.mesh.fsdp * config.mesh.tensor])


@pytest.mark.thorough
@tiered(
    ("name", "changes"),
    [*ZOO.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())],
    first=2,
)
def test_memory_of_training_step_is_close_to_xla(name, changes):
    check_memory(name, changes)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["gpt_stdlib", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert_stdlib", "t5_stdlib"))]
)
@tiered("mesh", SPREAD)
def test_memory_per_device_is_close_to_xla(mesh, name):
    check_memory(name, SPREAD[mesh])


def check_memory(name, changes):
    its = experiment(name, changes)
    estimate = memory_per_device(its, experiment_budget(its), its.mesh)["total"]
    lowered = preparation.jit_step(its).lower(its.abstract_state, jax.eval_shape(its.zeros))
    plan = lowered.compile(compiler_options=ONE_AFTER_THE_OTHER if name in INDEPENDENT else {}).memory_analysis()
    planned = plan.argument_size_in_bytes + plan.temp_size_in_bytes
    planned += plan.output_size_in_bytes - plan.alias_size_in_bytes
    assert estimate == pytest.approx(planned, rel=0.15)


@pytest.mark.thorough
def test_adapters_cost_less_than_full_training():
    whole, adapted = (experiment_budget(experiment("gpt_stdlib", changes)) for changes in ({}, ADAPTED))
    assert whole.parameters == adapted.parameters
    assert whole.flops["forward"] == adapted.flops["forward"]
    forward = whole.flops["forward"]["model"]
    assert whole.flops["training"]["model"] == pytest.approx(3 * forward, rel=0.01)
    # The gradients of adapted matrices are still computed; that of the output layer is not.
    assert 2 * forward < adapted.flops["training"]["model"] < 2.9 * forward
    for name in ("gradients", "optimizer"):
        assert adapted.memory["training"][name] < 0.2 * whole.memory["training"][name]
    assert adapted.memory["training"]["weights"] > whole.memory["training"]["weights"]
    assert adapted.memory["inference"] == whole.memory["inference"]


class Outputs:
    """Outputs of a step that ends when `end` is called."""

    def __init__(self):
        self.ended = threading.Event()

    def block_until_ready(self):
        self.ended.wait()

    def end(self, throughput):
        self.ended.set()
        while throughput._ended == math.inf:
            time.sleep(0.001)


def test_only_time_without_a_step_in_progress_is_waited_for_data():
    throughput = Throughput(experiment("vit_digits", {}))

    def wait(step=None):
        before, start = throughput._spent["waiting"], time.monotonic()
        with throughput.waiting():
            time.sleep(0.05)
            if step:
                step.end(throughput)
                time.sleep(0.05)
        return throughput._spent["waiting"] - before, time.monotonic() - start

    assert wait()[0] >= 0.05  # before the first step
    steps = [Outputs() for _ in range(3)]
    for step in steps:
        throughput.dispatched(step)
    assert wait()[0] == 0
    steps[0].ended.set()
    assert wait()[0] == 0  # another step is in progress
    steps[1].ended.set()
    counted, whole = wait(steps[2])  # it ends in the middle
    assert 0.05 <= counted <= whole - 0.05
    assert wait()[0] >= 0.05
    throughput.close()


def test_rates_of_a_clock(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def passes(seconds):
        nonlocal now
        now += seconds

    throughput = Throughput(experiment("vit_digits", {"loader.batch_size": 32}))
    passes(10)  # compilation
    found = []
    for _ in range(2):
        with throughput.waiting():
            passes(4)
        for _ in range(5):
            throughput.dispatched(Outputs())
        passes(12)
        found.append(throughput.rates(5 * len(found)))
        for activity, seconds in (("evaluating", 6), ("saving", 8)):
            with throughput.spent(activity):
                passes(seconds)
    assert found[0] == {}
    throughput.skipped, throughput.earlier = 5, (100.0, 40.0)
    passes(10)
    last = throughput.rates(10)
    assert found[1] == {
        "time/steps_per_second": pytest.approx(5 / 16),
        "time/examples_per_second": pytest.approx(32 * 5 / 16),
        "time/waiting": 0,
        "time/evaluating": pytest.approx(6 / 30),
        "time/saving": pytest.approx(8 / 30),
        "time/goodput": pytest.approx((46 - 18) / 56),
        "time/seconds": pytest.approx(56),
    }
    assert last["time/goodput"] == pytest.approx((40 + (12 + 16 + 10) / 2) / 180)
    assert last["time/seconds"] == pytest.approx(180)


def test_memory_of_the_fullest_device(monkeypatch):
    peaks = [{"peak_bytes_in_use": size << 30} for size in (2, 5, 3)]
    devices = [SimpleNamespace(memory_stats=partial(dict, peak)) for peak in peaks]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert resources()["system/device_memory_gib"] == 5
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: None)])
    assert "system/device_memory_gib" not in resources()  # a CPU has no statistics


def exhaust(**estimate):
    """Ask for more memory than any device has."""
    with out_of_memory_explained() as memory:
        memory |= estimate
        jnp.zeros(1 << 45).block_until_ready()


def test_out_of_memory_error_shows_the_estimate():
    needed = r"Estimated for a step, on all devices together: weights 2 GiB, total 3.5 GiB\.$"
    with pytest.raises(MemoryError, match=needed):
        exhaust(weights=2**31, total=7 * 2**29)


def test_other_runtime_errors_are_not_changed():
    message = r"^out of memory \(RESOURCE_EXHAUSTED: .*\): make loader.*`lineage describe`\.$"
    with pytest.raises(MemoryError, match=message):
        exhaust()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^INTERNAL"), out_of_memory_explained():
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
