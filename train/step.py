"""The training state, one training step and one forward step: pure functions, compiled by the loop."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from optax.tree_utils import tree_get

from lineage.configs.run import Run
from lineage.metrics.states import State
from lineage.models import Model
from lineage.tasks import Batch, Result
from lineage.train.adapters import NO_ADAPTER, Adapter, Kernels, recording
from lineage.train.optimizer import averaged, merged

Metrics = dict[str, jax.Array]
Objective = Callable[[Any, Batch], Result]  # (bound model, batch) -> result of `Task.loss`
Part = Callable[[Any], Any]  # parameters -> the part of them that is trained, see `Optimizer.trained`


@struct.dataclass
class TrainState:
    """The state after `step` steps.

    Random numbers and batches are functions of (seed, step) and therefore not part of the state.
    """

    step: Any  # number of completed steps, int32
    params: Any  # trained parameters; with an adapter, only its parameters
    opt_state: Any  # state of the optimizer
    collections: Any  # other variables that modules update, such as running statistics
    ema: Any  # average of `params` for evaluation, exponential or the optimizer's own; None if none is kept
    frozen: Any = None  # parameters that the adapter does not train; None without an adapter
    adapter: Adapter = struct.field(pytree_node=False, default=NO_ADAPTER)  # combines `params` and `frozen`

    def variables(self, average: bool = False) -> dict[str, Any]:
        """Return the variables of the model; with `average`, the moving average of the parameters, if one is kept."""
        params = self.params
        if average and self.ema is not None:
            params = jax.device_put(self.ema, jax.memory.Space.Device)  # it may be offloaded
        if self.frozen is not None:
            params = _apply(self.adapter, self.frozen, params)
        return {"params": params, **self.collections}


@jax.jit
def _apply(adapter, frozen, params):
    return adapter.apply(frozen, params)


def init_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    batch: Batch,
    *,
    seed: int,
    ema: bool = False,
    adapter: Adapter = NO_ADAPTER,
) -> TrainState:
    """Return the state before the first step, with a moving average of the parameters if `ema`.

    Only the shapes and dtypes of the batch are used.
    """
    key, kernels = jax.random.key(seed), Kernels()
    with nn.intercept_methods(recording(kernels)):
        variables = nn.init(objective, model)(key, batch)
    if (params := variables.pop("params", None)) is None:
        raise ValueError(f"The model {type(model).__name__} has no parameters to train.")
    variables.pop("intermediates", None)
    params, frozen = adapter.init(params, kernels, key)
    opt_state = optimizer.init(params)
    average = averaged(opt_state, params)
    if ema and average is not None:
        raise ValueError("ema_decay is above 0: it must be 0 for an optimizer that averages the parameters itself.")
    if ema:
        average = jax.tree.map(jnp.copy, params)
    step = jnp.zeros((), jnp.int32)
    return TrainState(step, params, opt_state, variables, average, frozen=frozen, adapter=adapter)


def make_train_step(
    model: Model,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    run: Run,
    total_steps: int = 1,
    trained: Part = lambda params: params,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return a function (state, batch) -> (state after one more step, metrics of that step).

    With `run.grad_accum_steps`, the gradients of micro-batches are summed before the update: this needs less memory and
    gives the same result, unless the loss mixes examples, as mixup does. Parameters, gradients and the optimizer's
    state are float32 in any `run.precision`.

    Args:
        total_steps: number of steps of the run; the completed fraction is the variable `progress` of the collection
            "run" for objectives.
        trained: function that returns the part of the parameters that the optimizer trains; the gradients of the others
            are 0 and are not computed.
    """
    dtype = jnp.dtype(run.precision)
    gradients = make_gradients(make_loss(model, objective, dtype, trained))
    twice_differentiable = make_loss(model.portable(), objective, dtype, trained)
    if run.grad_accum_steps > 1:
        gradients = accumulated(gradients, run.grad_accum_steps)
    update = optax.with_extra_args_support(optimizer).update

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if run.grad_accum_steps > 1 and "memory" in state.collections:
            raise ValueError(f"grad_accum_steps is {run.grad_accum_steps}: it must be 1 for a model with a memory.")
        rng = jax.random.fold_in(jax.random.key(run.seed, impl=run.prng), state.step)
        before = {**state.collections, "run": {"progress": state.step / total_steps, "real": _counts(batch)}}
        collections, (grads, weight, states) = gradients(state, before, batch, rng)
        del collections["run"]
        grads = jax.tree.map(lambda g: g / weight, grads)
        opt_state, ema = state.opt_state, state.ema
        if run.offload:
            opt_state, ema = jax.device_put((opt_state, ema), jax.memory.Space.Device)

        def mean_loss(params):  # first micro-batch, for optimizers that estimate second derivatives
            params = merged(params, state.params)  # some optimizers train only some parameters
            part = jax.tree.map(lambda a: a[:: run.grad_accum_steps], batch)
            loss_sum, (weight, *_) = twice_differentiable(params, {}, state, before, part, rng)
            return loss_sum / weight

        updates, opt_state = update(grads, opt_state, state.params, obj_fn=mean_loss)
        params = optax.apply_updates(state.params, updates)
        average = averaged(opt_state, params)
        if run.ema_decay:
            average = optax.incremental_update(params, ema, 1 - run.ema_decay)
        metrics = {name: value.compute() for name, value in states.items()} | {"gradient_norm": optax.tree.norm(grads)}
        if (in_a_row := tree_get(opt_state, "notfinite_count")) is not None:  # state of `optax.apply_if_finite`
            kept = partial(jnp.where, in_a_row == 0)
            collections, average = jax.tree.map(kept, (collections, average), (state.collections, ema))
            metrics |= {"skipped": tree_get(opt_state, "total_notfinite"), "skipped_in_a_row": in_a_row}
        new = {"params": params, "opt_state": opt_state, "collections": collections, "ema": average}
        return state.replace(step=state.step + 1, **new), metrics

    return step


def _counts(batch):
    """Return the number of examples in a batch, and of True entries of each mask."""
    masks = {name: value.sum() for name, value in batch.items() if value.dtype == bool}
    return masks | {"examples": jnp.int32(len(next(iter(batch.values()))))}


def make_loss(
    model: nn.Module, objective: Objective, dtype: jnp.dtype, trained: Part = lambda params: params
) -> Callable[..., Any]:
    """Return a function that computes the sum of an objective, and (weight, metric states, updated collections).

    The function takes (params, overwritten collections, state, collections, batch, rng). It uses only the adapter and
    the frozen parameters of the state. Gradients flow only into the `trained` part of the parameters.
    """

    def loss(params, overwritten, state, collections, batch, rng):
        params = merged(trained(params), jax.lax.stop_gradient(params))
        params = state.adapter.apply(state.frozen, params)
        variables = {"params": cast(params, dtype), **collections, **overwritten}
        reference = state.adapter.reference(state.frozen)  # for objectives that compare with the original model
        if reference is not None:
            variables["reference"] = cast(reference, dtype)
        apply = nn.apply(objective, model, mutable=list(collections))
        result, collections = apply(variables, _cast_images(batch, dtype), rngs={"dropout": rng})
        _check_result(result)
        loss_sum, weight, states = result
        return loss_sum, (weight, states, collections)

    return loss


def _check_result(result):
    """Raise ValueError if the loss of a task does not return what `Task.loss` documents."""
    returns, needed = "The loss of the task returns", "(loss_sum, weight, metric states)"
    if not isinstance(result, tuple | list):
        given = f"an array of shape {result.shape}" if isinstance(result, jax.Array) else f"a {type(result).__name__}"
        raise ValueError(f"{returns} {given}: it must be {needed}.")
    if len(result) != 3:
        raise ValueError(f"{returns} {len(result)} values: they must be {needed}.")
    *numbers, states = result
    for name, value in zip(("loss_sum", "weight"), numbers):
        if shape := jnp.shape(value):
            raise ValueError(f"{returns} a {name} of shape {shape}: it must be a scalar, the sum over the examples.")
    if not isinstance(states, Mapping):
        raise ValueError(f"{returns} metrics in a {type(states).__name__}: they must be in a dictionary.")
    for name, state in states.items():
        if not isinstance(state, State):
            kind = "Array" if isinstance(state, jax.Array) else type(state).__name__
            needed = "a state, such as Mean.empty().update(values, mask)"
            raise ValueError(f"{returns} the metric {name!r} of the type {kind}: it must be {needed}.")
    if "loss" not in states:
        raise ValueError(f"{returns} the metrics {', '.join(states)}: they must include 'loss'.")


def make_gradients(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the gradients of a function from `make_loss`.

    The function takes (state, collections, batch, rng) and returns the updated collections and (gradients of the loss's
    sum with respect to the trained parameters, weight, metric states).
    """

    def gradients(state, collections, batch, rng):
        # Flax returns the state of low-precision (fp8) operations as the gradient with respect to the old state.
        overwritten = {name: value for name, value in collections.items() if name == OVERWRITE_WITH_GRADIENT}
        differentiate = jax.grad(loss, argnums=(0, 1), has_aux=True)
        rest = state, collections, batch, rng
        (grads, new), (weight, states, collections) = differentiate(state.params, overwritten, *rest)
        return collections | new, (grads, weight, states)

    return gradients


def accumulated(gradients: Callable[..., Any], steps: int) -> Callable[..., Any]:
    """Wrap a function from `make_gradients` to process the batch in `steps` micro-batches and sum the results."""

    def add(a, b):
        return a.merge(b) if isinstance(a, State) else a + b

    def compute(state, collections, batch, rng):
        # Micro-batch i has rows i, i + steps, ..., so that each device computes its own rows in every micro-batch.
        parts = jax.tree.map(lambda a: a.reshape(-1, steps, *a.shape[1:]).swapaxes(0, 1), batch)

        def body(carry, part):
            (collections, sums), (index, batch) = carry, part
            collections, new = gradients(state, collections, batch, jax.random.fold_in(rng, index))
            return (collections, jax.tree.map(add, sums, new, is_leaf=lambda a: isinstance(a, State))), None

        first = jax.tree.map(lambda a: a[0], parts)
        shapes = jax.eval_shape(gradients, state, collections, first, rng)[1]
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        return jax.lax.scan(body, (collections, zeros), (jnp.arange(steps), parts))[0]

    return compute


def make_forward_step(
    model: nn.Module, function: Callable[[nn.Module, Batch], Any], precision: str = "float32", **kwargs: Any
) -> Callable[[Any, Batch], Any]:
    """Return a function (variables, batch) -> `function(bound model, batch)`, without randomness.

    `kwargs` are passed to Flax's `apply`.
    """
    dtype = jnp.dtype(precision)

    def step(variables: Any, batch: Batch) -> Any:
        variables = {**variables, "params": cast(variables["params"], dtype)}
        return nn.apply(function, model, **kwargs)(variables, _cast_images(batch, dtype))

    return step


def _cast_images(batch, dtype):
    """Return the batch with its images cast to `dtype`; labels and other targets keep their dtype."""
    return {name: value.astype(dtype) if name == "image" else value for name, value in batch.items()}


def cast(tree: Any, dtype: jnp.dtype) -> Any:
    """Return the tree with floating-point leaves cast to `dtype`, except 8-bit leaves, which have a scale."""

    def converted(leaf):
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1 else leaf

    return jax.tree.map(converted, tree)
