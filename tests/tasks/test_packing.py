"""Losses and gradients of packed texts are those of the texts alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.data.examples.packing import Packed
from lineage.data.tokens import Stream
from lineage.models import MODELS
from lineage.models.layers.attend import Mask
from lineage.models.layers.attention import Attention
from lineage.models.layers.position import RelativeBuckets, RelativeKeys
from lineage.tasks.causal_lm import CausalLM
from lineage.train import loop
from lineage.train.experiment import Experiment
from tests.tiers import tiered

T, V = 24, 50
TASK = CausalLM(sequence_length=T, packing=True)
SMALL = {"vocab_size": V, "max_length": T, "depth": 2, "width": 32, "num_heads": 4, "dropout": 0.0}


def alone(packed):
    """Return rows with one document, or a part of a long one, each."""
    batch = {name: np.zeros((len(packed.starts), packed.length), np.int32) for name in ("tokens", "targets")}
    for row, (start, size) in enumerate(zip(packed.starts, packed.lengths)):
        batch["tokens"][row, :size] = packed.tokens[start : start + size]
        batch["targets"][row, :size] = packed.tokens[start + 1 : start + size + 1]
    return jax.tree.map(jnp.asarray, batch | {"mask": np.arange(packed.length) < packed.lengths[:, None]})


@pytest.fixture(scope="module")
def batches():
    """Packed rows, and the same documents alone."""
    rng = np.random.default_rng(0)
    lengths = np.append(rng.integers(1, T // 2, 16), [60, 25, 26])
    packed = Packed(Stream(rng.integers(0, V, lengths.sum()), 0, 0, np.cumsum(lengths)), T)
    together = packed.take(np.arange(len(packed)))
    assert together["segments"].max() > 3
    assert len(packed) < len(packed.starts) / 1.5
    return jax.tree.map(jnp.asarray, together), alone(packed)


def loss_and_gradients(model, params, batch):
    def loss(params):
        total, weight, _ = TASK.loss(model.bind({"params": params}), batch)
        return total, weight

    (total, weight), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return {"loss": total, "weight": weight, "gradients": gradients}


@tiered(
    ("name", "options"),
    [
        ("gpt", {}),
        ("llama", {"num_kv_heads": 2}),
        ("gpt", {"fused_loss": True}),
        ("gpt", {"attend": "dense"}),
        ("llama", {"window": 5}),
    ],
    first=2,
)
def test_packed_loss_and_gradients_are_those_of_the_documents(batches, name, options):
    together, single = batches
    model = MODELS[name](**SMALL, **options)
    params = model.init(jax.random.key(0), single["tokens"])["params"]
    packed, expected = (loss_and_gradients(model, params, batch) for batch in (together, single))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), packed, expected)
    assert packed["weight"] == single["mask"].sum()
    for missing in ("segments", "positions"):  # each of them matters
        part = {name: value for name, value in together.items() if name != missing}
        assert abs(loss_and_gradients(model, params, part)["loss"] - expected["loss"]) > 1e-3 or (
            missing == "positions" and name == "llama"  # only distances count
        )


@pytest.mark.thorough
@pytest.mark.parametrize("relative", [RelativeKeys, None])
def test_relative_positions_of_segments(relative):
    attention = Attention(2, relative=relative and (lambda name: RelativeKeys(4, name=name)), causal=True)
    x, sizes = jax.random.normal(jax.random.key(0), (1, 12, 8)), (3, 4, 5)
    positions = jnp.concatenate([jnp.arange(size) for size in sizes])[None]
    segments = jnp.repeat(jnp.arange(3), np.array(sizes))[None]
    biases = RelativeBuckets(2, buckets=4, max_distance=8)
    table = biases.init(jax.random.key(1), jnp.arange(12)[None], 12)

    def bias(size):
        return None if relative else biases.apply(table, jnp.arange(size)[None], size)

    variables = attention.init(jax.random.key(2), x)
    packed, _ = attention.apply(variables, x, mask=Mask(segments=segments, bias=bias(12)), positions=positions)
    separate = [
        attention.apply(variables, part, mask=Mask(bias=bias(part.shape[1])))[0]
        for part in jnp.split(x, (3, 7), axis=1)
    ]
    np.testing.assert_allclose(packed, jnp.concatenate(separate, axis=1), rtol=1e-5, atol=1e-6)


def test_models_without_segments_are_refused():
    with pytest.raises(ValueError, match=r"task.packing is True: it must be False for TransformerXL"):
        TASK.check_model(MODELS["transformer_xl"](vocab_size=V, depth=1, width=16, num_heads=2))


@pytest.mark.thorough
def test_packed_run(tiny, tmp_path, no_report):
    """Compare the validation loss of a run with that of the documents alone."""
    changes = {"task.packing": True, "task.cache_dir": str(tmp_path / "tokens"), "source.max_bytes": 60_000}
    config = tiny("gpt", changes | {"total_steps": 10})
    metrics = loop.train(config, tmp_path / "run")
    experiment = Experiment(config, tmp_path / "run")
    variables = experiment.variables(experiment.restore())
    loss, weight, _ = jax.jit(lambda batch: experiment.task.loss(experiment.model.bind(variables), batch))(
        alone(experiment.data.splits["validation"].source)
    )
    assert metrics["validation/loss"] == pytest.approx(float(loss / weight), rel=1e-5)
