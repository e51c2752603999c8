"""Training on any mesh and with gradient accumulation matches a single device."""

import math

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from lineage.models.layers.linear import Linear
from lineage.train.checkpoint import Checkpoints
from lineage.train.compiler.chips import CHIPS
from lineage.train.experiment import Experiment
from lineage.train.loop import compile_step, device_batches
from lineage.train.profiling.description import describe
from lineage.train.profiling.estimates import experiment_budget, memory_per_device
from lineage.train.sharding import (
    abstract_mesh,
    check_batch,
    make_mesh,
    on_mesh,
    part_of,
    placement,
    shardings,
    share,
)
from tests.tiers import tiered

STEPS = 20
MESHES = {
    "data": {"mesh.data": 8},
    "fsdp": {"mesh.fsdp": 8},
    "tensor": {"mesh.data": 4, "mesh.tensor": 2},
    "mixed": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    "sequence": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "sequence_sharding": True},
    "context": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.context": 2},
}


def start(config, devices, folder):
    """Return an experiment and its initial state."""
    experiment = Experiment(config, None, devices)
    with Checkpoints(folder) as checkpoints:
        return experiment, experiment.state(checkpoints)


def train(config, devices, folder):
    """Return the losses of the first steps and the final state."""
    experiment, state = start(config, devices, folder)
    step, batches, losses = compile_step(experiment, state), device_batches(experiment, 0), []
    for _ in range(STEPS):
        state, metrics = step(state, next(batches))
        losses.append(float(metrics["loss"]))
    return np.array(losses), state


@pytest.fixture(scope="module", params=["gpt", pytest.param("vit", marks=pytest.mark.thorough)])
def single(request, tiny, tmp_path_factory):
    """Return the name of a model, its config changes with dropout, and its losses on one device."""
    changes = {"model.dropout": 0.1, "schedule.learning_rate": 3e-3}
    losses, _ = train(tiny(request.param, changes), jax.devices()[:1], tmp_path_factory.mktemp("single"))
    assert losses[-1] < losses[0] - 0.05  # the loss decreases, so the trajectory is informative
    return request.param, changes, losses


def assert_same_trajectory(losses, expected):
    np.testing.assert_allclose(losses[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@tiered("mesh", MESHES, first=lambda mesh: mesh in ("fsdp", "context"))
def test_mesh_matches_one_device(single, mesh, tiny, tmp_path):
    model, changes, expected = single
    losses, state = train(tiny(model, changes | MESHES[mesh]), jax.devices(), tmp_path)
    assert_same_trajectory(losses, expected)
    kernel = state.params["stack"]["layers"]["mlp"]["up"]["kernel"]
    assert len(kernel.sharding.device_set) == 8
    parts = {"data": 1, "fsdp": 8, "tensor": 2, "mixed": 4, "sequence": 4, "context": 2}[mesh]
    moment = optax.tree_utils.tree_get(state.opt_state, "nu")["stack"]["layers"]["mlp"]["up"]["kernel"]
    for leaf in (kernel, moment):
        assert leaf.addressable_shards[0].data.nbytes * parts == leaf.nbytes
    # Norms, biases and dimensions not divisible by 8 are replicated, which is a larger fraction in a tiny model.
    leaves = jax.tree.leaves((state.params, state.opt_state))
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / sum(leaf.nbytes for leaf in leaves)
    assert here < {"data": 1.01, "fsdp": 0.3, "tensor": 0.8, "mixed": 0.45, "sequence": 0.45, "context": 0.65}[mesh]


@pytest.mark.thorough
@tiered("model", ["gpt", "vit"], slow=lambda model: model == "vit")
def test_gradient_accumulation_matches_full_batches(model, tiny, tmp_path):
    changes = {"schedule.learning_rate": 3e-3}
    expected, _ = train(tiny(model, changes), jax.devices()[:1], tmp_path / "whole")
    for parts, devices in ((4, 1), (2, 4)):
        config = tiny(model, changes | {"grad_accum_steps": parts})
        losses, _ = train(config, jax.devices()[:devices], tmp_path / str(parts))
        assert_same_trajectory(losses, expected)


@pytest.mark.thorough
@tiered("model", ["gpt", "vit"], slow=lambda model: model == "vit")
def test_checkpoint_moves_from_eight_devices_to_one_and_back(model, tiny, tmp_path):
    def save(state, folder):
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(state, {}, {})

    def assert_equal(state, expected):
        for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            assert leaf.dtype == other.dtype
            assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()

    wide, narrow = tiny(model, MESHES["mixed"]), tiny(model)
    experiment, state = start(wide, jax.devices(), tmp_path / "none")
    state, _ = compile_step(experiment, state)(state, next(device_batches(experiment, 0)))  # moments are not zero
    assert int(state.step) == 1
    save(state, tmp_path / "eight")
    _, one = start(narrow, jax.devices()[:1], tmp_path / "eight")
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(one))
    assert_equal(one, state)
    save(one, tmp_path / "one")
    _, eight = start(wide, jax.devices(), tmp_path / "one")
    assert_equal(eight, state)
    for leaf, other in zip(jax.tree.leaves(eight), jax.tree.leaves(state)):
        assert leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim)


@pytest.mark.parametrize(
    ("sizes", "sequence", "shape"),
    [
        ({"data": 1}, False, "32,3"),
        ({"data": 2, "fsdp": 2}, True, "32,3"),
        ({"data": 2, "tensor": 2}, False, "32,3"),
        ({"data": 2, "tensor": 2}, True, "4,8,3"),
        ({"data": 2, "context": 2}, False, "4,8,3"),
    ],
)
def test_examples_and_tokens_are_merged_unless_tokens_are_split(sizes, sequence, shape):
    linear, x = Linear((3,)), jax.numpy.ones((4, 8, 2))
    variables = linear.init(jax.random.key(0), x)
    mesh = make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    applied = on_mesh(linear.apply, mesh, (), sequence)
    assert f":f32[{shape}] = dot_general" in str(jax.make_jaxpr(applied)(variables, x))


@pytest.mark.parametrize(
    ("tensor", "devices", "parts"),
    [(2, 4, [(0, 2), (1, 2)]), (1, 2, [(0, 4), (1, 4), (2, 4), (3, 4)]), (4, 2, [(0, 2), (0, 2), (1, 2), (1, 2)])],
)
def test_share_of_the_batch_of_each_process(tensor, devices, parts):
    owners = (np.arange(8) // devices).reshape(-1, tensor)  # process of each of the eight devices
    assert [part_of(owners, process) for process in range(8 // devices)] == parts


def test_example_divided_between_processes_raises():
    owners = (np.arange(12) // 6).reshape(-1, 4)
    with pytest.raises(
        ValueError, match=r"mesh.context x mesh.tensor is 4, but a process has 6 devices: one must be a multiple of"
    ):
        part_of(owners, 1)
    assert share(make_mesh(2, 2, tensor=2)) == (0, 1)


def test_first_matching_sharding_rule_applies_to_the_last_dimensions():
    mesh = make_mesh(2, 2, tensor=2)
    tree = {"stack": {"up": {"kernel": np.zeros((3, 4, 6)), "bias": np.zeros((3, 5))}}, "scale": np.zeros(4)}
    rules = (("up/kernel", ("fsdp", "tensor")), ("bias", ("tensor",)), ("kernel", (None, "fsdp")))
    places = shardings(tree, rules, mesh)
    assert places["stack"]["up"]["kernel"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert places["stack"]["up"]["bias"].spec == PartitionSpec(None, None)  # 5 is not divisible by 2
    assert places["scale"].is_fully_replicated


def test_fsdp_splits_the_first_dimension_where_parts_of_the_last_would_be_narrow():
    mesh = abstract_mesh(fsdp=4, tensor=2)
    shapes = {"wide": (8, 2, 512), "narrow": (8, 2, 256), "odd": (12, 2, 256)}
    rules = ((".", ("tensor", None, "fsdp")),)
    actual = {name: placement(name, shape, rules, mesh) for name, shape in shapes.items()}
    assert actual["wide"] == actual["odd"] == PartitionSpec("tensor", None, "fsdp")
    assert actual["narrow"] == PartitionSpec(("tensor", "fsdp"), None, ())


@pytest.mark.thorough
def test_described_memory_matches_each_device(tiny, tmp_path):
    config = tiny("gpt", MESHES["mixed"] | {"ema_decay": 0.9})
    experiment, state = start(config, jax.devices(), tmp_path)
    real = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim]
    total = experiment_budget(experiment)
    actual = memory_per_device(experiment, total, abstract_mesh(**config.mesh))
    assert actual["weights"] + actual["optimizer"] == pytest.approx(sum(real), abs=8)  # and step counts
    assert actual["weights"] == 2 * actual["gradients"] < total.memory["training"]["weights"]
    assert actual["gradients"] < actual["gathered"] <= 2 * actual["gradients"]  # two parts of most weights
    alone = memory_per_device(experiment, total, abstract_mesh(data=-1))
    # A quarter of the examples; 24 of 34 units are sharded over the tensor axis, and all with sequence sharding.
    assert actual["activations"] == pytest.approx(alone["activations"] / 4 * (10 + 24 / 2) / 34, abs=1)
    config.sequence_sharding = True
    tokens = memory_per_device(Experiment(config), total, abstract_mesh(**config.mesh))
    assert tokens["activations"] == pytest.approx(alone["activations"] / 8, abs=1)
    config.sequence_sharding = False
    assert alone["total"] >= total.memory["training"]["total"]
    text = describe(experiment)
    assert "on each of 8 devices (data 2, fsdp 2, context 1, tensor 2)" in text
    devices = {line[:10].strip(): line[10:].split() for line in text.splitlines()[-len(CHIPS) - 1 : -1]}
    share = actual["total"] / 16e9
    assert devices["TPU v5e"][2] == f"{share:.0%}"
    # 8 devices at 40% of 459 TFLOP/s in bfloat16
    expected = total.flops["training"]["model"] / (0.4 * 8 * 459e12) * 1e6
    assert float(devices["TPU v5p"][3]) == pytest.approx(expected, rel=0.01)
    assert devices["TPU v5p"][4] == "µs"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_mesh(3, 2), r"a mesh of data=3, fsdp=2, context=1, tensor=1 does not fit 8 devices"),
        (lambda: make_mesh(-1, 3), r"data=-1, fsdp=3, context=1, tensor=1 does not fit 8 devices"),
        (lambda: make_mesh(-1, -1), r"data=-1, fsdp=-1, context=1, tensor=1 does not fit 8 devices"),
        (lambda: make_mesh(0, 8), r"mesh.data is 0: it must be 1 or more, or -1"),
        (lambda: shardings({}, [("kernel", ("model",))], make_mesh()), r"names 'model': mesh axes are data, fsdp"),
        (lambda: check_batch(12, make_mesh(4, 2)), r"12 examples cannot be split evenly over 8 devices.*multiple of 8"),
        (lambda: check_batch(12, make_mesh(4, 1, 2), 2), r"over 4 devices.* in 2 micro-batches.*multiple of 8"),
    ],
)  # fmt: skip
def test_invalid_mesh_raises(make, message):
    with pytest.raises(ValueError, match=message):
        make()
