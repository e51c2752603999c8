"""Cost estimates of experiments match XLA's memory plan for the training step."""

import jax
import jax.numpy as jnp
import pytest

from lineage.configs import cli
from lineage.train import loop, profiling
from lineage.train.experiment import Experiment
from tests.tiers import tiered

ADAPTED = {"init.path": "there", "adapter.name": "lora", "task.name": "causal_lm"}
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
    estimate = profiling.memory_per_device(its, profiling.experiment_budget(its), its.mesh)["total"]
    plan = loop.jit_step(its).lower(its.abstract_state, jax.eval_shape(its.zeros)).compile().memory_analysis()
    planned = plan.argument_size_in_bytes + plan.temp_size_in_bytes
    planned += plan.output_size_in_bytes - plan.alias_size_in_bytes
    assert estimate == pytest.approx(planned, rel=0.15)


def test_adapters_cost_less_than_full_training():
    whole, adapted = (profiling.experiment_budget(experiment("gpt_stdlib", changes)) for changes in ({}, ADAPTED))
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


def exhaust():
    """Ask for more memory than any device has."""
    jnp.zeros(1 << 45).block_until_ready()


def test_out_of_memory_error_shows_the_estimate():
    needed = r"Estimated for a step, on all devices together: weights 2 GiB, total 3.5 GiB\.$"
    memory = {"weights": 2**31, "total": 7 * 2**29}
    with pytest.raises(MemoryError, match=needed), profiling.out_of_memory_explained(memory):
        exhaust()


def test_other_runtime_errors_are_not_changed():
    with (
        pytest.raises(
            MemoryError, match=r"^out of memory \(RESOURCE_EXHAUSTED: .*\): make loader.*`lineage describe`\.$"
        ),
        profiling.out_of_memory_explained(),
    ):
        exhaust()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^INTERNAL"), profiling.out_of_memory_explained():
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
