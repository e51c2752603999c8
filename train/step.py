"""One training step and one evaluation step: pure functions, compiled by the loop."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from optax.tree_utils import tree_get

from lineage.metrics.states import State
from lineage.tasks.objectives import Batch, Objective
from lineage.train.adapters import begin, merged, noting
from lineage.train.state import TrainState

Metrics = dict[str, jax.Array]


def init_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    batch: Batch,
    *,
    seed: int,
    ema: bool = False,
    adapt: Mapping[str, Any] | None = None,
) -> TrainState:
    """The state before the first step; `batch` gives shapes alone, and `adapt` is what `models.adapt.begin` takes."""
    key, axes = jax.random.key(seed), {}
    with nn.intercept_methods(noting(axes)):
        variables = nn.init(objective, model)(key, batch)
    params = variables.pop("params")
    variables.pop("intermediates", None)
    if adapt:
        params, variables["base"] = begin(params, axes, key, **adapt)
    average = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), variables, average)


def make_train_step(
    model: nn.Module,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    grad_accum_steps: int = 1,
    precision: str = "float32",
    ema_decay: float = 0.0,
    total_steps: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A function (state, batch) -> (state after one more step, metrics of that step).

    Args:
        grad_accum_steps: number of parts that the batch is split into; their gradients are summed before the update.
            Uses less memory and gives the same result, unless the loss mixes examples, as mixup does. It must divide
            the batch size.
        precision: "float32", or "bfloat16" to compute in it; parameters, gradients and the optimizer stay float32.
        ema_decay: the moving average keeps this part of itself in each step; 0 keeps no average.
        total_steps: of the run: what part of them is done is an objective's variable `progress`, of collection "run".
    """
    dtype = compute_dtype(precision)

    def loss(params, base, overwritten, collections, batch, rng):
        whole = merged({"params": params, **base})["params"]
        origin = {name: _cast(of["params"], dtype) for name, of in base.items()}  # for an objective that compares
        variables = {"params": _cast(whole, dtype), **origin, **collections, **overwritten}
        apply = nn.apply(objective, model, mutable=list(collections))
        (loss_sum, weight, aux), collections = apply(variables, _read_in(batch, dtype), rngs={"dropout": rng})
        return loss_sum, (weight, aux, collections)

    def gradients(params, base, collections, batch, rng):
        # What a backward pass leaves for the next one comes out as the gradient of what it found.
        overwritten = {name: value for name, value in collections.items() if name == OVERWRITE_WITH_GRADIENT}
        differentiate = jax.grad(loss, argnums=(0, 2), has_aux=True)
        (grads, new), (weight, aux, collections) = differentiate(params, base, overwritten, collections, batch, rng)
        return collections | new, (grads, weight, aux)

    def accumulated(params, base, collections, batch, rng):
        # Part i holds rows i, i + A, ...: each device then works on rows of its own in every part.
        parts = jax.tree.map(lambda a: a.reshape(-1, grad_accum_steps, *a.shape[1:]).swapaxes(0, 1), batch)
        kept = {"is_leaf": lambda a: isinstance(a, State)}
        add = partial(jax.tree.map, lambda a, b: a.merge(b) if isinstance(a, State) else a + b, **kept)

        def body(carry, part):
            index, batch = part
            collections, sums = gradients(params, base, carry[0], batch, jax.random.fold_in(rng, index))
            return (collections, add(carry[1], sums)), None

        first = jax.tree.map(lambda a: a[0], parts)
        shapes = jax.eval_shape(gradients, params, base, collections, first, rng)[1]
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        return jax.lax.scan(body, (collections, zeros), (jnp.arange(grad_accum_steps), parts))[0]

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if grad_accum_steps > 1 and "memory" in state.collections:
            raise ValueError(f"grad_accum_steps is {grad_accum_steps}: it must be 1 for a model with a memory.")
        rng = jax.random.fold_in(jax.random.key(seed), state.step)
        compute = gradients if grad_accum_steps == 1 else accumulated
        real = {name: value.sum() for name, value in batch.items() if value.dtype == bool}
        collections = {**state.collections, "run": {"progress": state.step / total_steps, "real": real}}
        base = {"base": collections.pop("base")} if "base" in collections else {}
        collections, (grads, weight, aux) = compute(state.params, base, collections, batch, rng)
        del collections["run"]
        grads = jax.tree.map(lambda g: g / weight, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = optax.incremental_update(params, state.ema, 1 - ema_decay) if ema_decay else None
        metrics = {name: value.compute() for name, value in aux.items()} | {"gradient_norm": optax.tree.norm(grads)}
        collections |= base
        if (in_a_row := tree_get(opt_state, "notfinite_count")) is not None:  # of `optax.apply_if_finite`
            kept = partial(jnp.where, in_a_row == 0)
            collections, ema = jax.tree.map(kept, (collections, ema), (state.collections, state.ema))
            metrics |= {"skipped": tree_get(opt_state, "total_notfinite"), "skipped_in_a_row": in_a_row}
        return TrainState(state.step + 1, params, opt_state, collections, ema), metrics

    return step


def make_evaluation_step(
    model: nn.Module, objective: Objective, precision: str = "float32"
) -> Callable[[Any, Batch], tuple[dict[str, State], dict[str, Any]]]:
    """A function (variables, batch) -> (metric states of the batch, the memory after it if any), without randomness."""
    return make_asking_step(model, lambda bound, batch: objective(bound, batch)[2], precision, mutable=["memory"])


def make_asking_step(
    model: nn.Module, ask: Callable[[nn.Module, Batch], Any], precision: str = "float32", **kwargs: Any
) -> Callable[[Any, Batch], Any]:
    """A function (variables, batch) -> what `ask` finds out from the model and the batch, without randomness.

    `kwargs` are those of Flax's `apply`.
    """
    dtype = compute_dtype(precision)

    def step(variables: Any, batch: Batch) -> Any:
        variables = {**variables, "params": _cast(variables["params"], dtype)}
        return nn.apply(ask, model, **kwargs)(variables, _read_in(batch, dtype))

    return step


def compute_dtype(precision: str) -> jnp.dtype:
    """What a model computes in; ValueError for a name that is unknown."""
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision is {precision!r}: it must be float32 or bfloat16.")
    return jnp.dtype(precision)


def _read_in(batch, dtype):
    """The batch with its images as `dtype`; what an answer is compared with stays as it is."""
    return {name: value.astype(dtype) if name == "image" else value for name, value in batch.items()}


def _cast(tree, dtype):
    """The tree with its floating-point leaves as `dtype`."""
    return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)
