"""DETR's set loss (arXiv 2005.12872, section 3.1), with the assignment of targets to predictions on the device."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lineage.metrics.boxes import generalized_iou, to_corners
from lineage.metrics.likelihood import cross_entropy
from lineage.metrics.states import Mean, State, Total

NO_OBJECT = 0.1  # weight of a query without an object in the cross-entropy


def set_loss(
    logits: Float[Array, "L B Q V"],
    boxes: Float[Array, "L B Q 4"],
    batch: Mapping[str, Array],
    weights: Sequence[float],
    whole: Mapping[str, Array],
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, State]]:
    """Return `(loss_sum, weight, metric states)` of the predictions of all decoder layers.

    The objects of an image, `boxes` [B, N, 4] and `classes` [B, N] where `boxes_mask` is True, are assigned to
    different queries so that the sum of the costs (- class probability, L1 distance, - generalized IoU) is minimal. The
    losses are the weighted mean of the cross-entropies of queries, and the means of the distances and of 1 - IoU over
    all objects. The losses of the intermediate decoder layers are reported as `class_loss_layer_i` and so on.

    Args:
        logits: class logits of each query in each layer; the last class is "no object".
        weights: weights of the three costs and losses.
        whole: numbers of images (`mask`) and objects (`boxes_mask`) of the whole batch, of which `batch` may be a part.
    """
    classes, real = batch["classes"], batch["boxes_mask"] & batch["mask"][:, None]
    queries, no_object = logits.shape[2], logits.shape[3] - 1
    predicted, true = boxes[:, :, None], batch["boxes"].astype(jnp.float32)[:, :, None]
    distance = jnp.abs(predicted - true).sum(axis=-1)  # [L, B, N, Q], like the other costs
    overlap = generalized_iou(to_corners(predicted), to_corners(true))
    probability = jax.nn.softmax(logits.astype(jnp.float32))
    probability = jnp.take_along_axis(probability, classes[None, :, None], axis=-1).swapaxes(2, 3)
    costs = zip(weights, (-probability, distance, -overlap))
    query = jax.vmap(match, (0, None))(jax.lax.stop_gradient(sum(weight * cost for weight, cost in costs)), real)

    matched = query[..., None] == jnp.arange(queries)
    target = jnp.where(matched.any(axis=2), (matched * classes[..., None]).sum(axis=2), no_object)
    query_weight = jnp.where(target == no_object, NO_OBJECT, 1.0) * batch["mask"][:, None]
    losses = {
        "class_loss": cross_entropy(logits, target) * query_weight,
        "box_loss": jnp.where(matched, distance, 0),
        "giou_loss": jnp.where(matched, 1 - overlap, 0),
    }
    losses = {name: value.reshape(len(value), -1).sum(axis=1) for name, value in losses.items()}  # [L]
    objects, weight = real.sum().astype(jnp.float32), query_weight[-1].sum()
    divisors = {"class_loss": weight, "box_loss": objects, "giou_loss": objects}
    aux = {name: Mean(value[-1], divisors[name]) for name, value in losses.items()}
    for layer in range(len(logits) - 1):
        aux |= {f"{name}_layer_{layer + 1}": Mean(value[layer], divisors[name]) for name, value in losses.items()}
    detected = (logits[-1].argmax(axis=-1) != no_object).sum(axis=-1)
    aux["cardinality_error"] = Mean.empty().update(jnp.abs(detected - real.sum(axis=-1)), batch["mask"])

    class_loss, *box_losses = (factor * value.sum() for factor, value in zip(weights, losses.values()))
    aux["loss"] = Total((Mean(class_loss, weight), Mean(sum(box_losses), objects)))
    # The losses are means over different counts; the ratios of the counts are those of the whole batch.
    whole_weight = NO_OBJECT * queries * whole["mask"] + (1 - NO_OBJECT) * whole["boxes_mask"]
    return class_loss + sum(box_losses) * whole_weight / jnp.maximum(whole["boxes_mask"], 1), weight, aux


def match(cost: Float[Array, "B N Q"], real: Bool[Array, "B N"]) -> Int[Array, "B N"]:
    """Return the query assigned to each real target, so that the sum of the costs is minimal; Q for other targets.

    Targets are added one by one along the shortest augmenting path (Crouse, "On implementing 2D rectangular assignment
    algorithms", 2016), for all examples at once. The price of a query makes the reduced cost of each target's own query
    minimal. There must be at least as many queries as real targets.
    """
    batch, targets, queries = cost.shape
    # In float32, prices must stay far below infinity. NaN becomes the maximum cost.
    cost = jnp.nan_to_num(cost.astype(jnp.float32), nan=1e9, posinf=1e9, neginf=-1e9)

    def add(start, state):
        price, owner, taken = state
        start = jnp.full(batch, start)
        path = _Path(
            target=start,
            distance=jnp.zeros(batch),
            nearest=jnp.full((batch, queries), jnp.inf),
            before=jnp.zeros((batch, queries), jnp.int32),
            visited=jnp.zeros((batch, queries), bool),
            end=jnp.where(real[jnp.arange(batch), start], -1, queries),
        )
        extend = partial(_extend, cost, price, owner, taken, start)
        path = jax.lax.while_loop(lambda path: (path.end < 0).any(), extend, path)
        price = price - jnp.where(path.visited, path.distance[:, None] - path.nearest, 0)
        reassign = partial(_reassign, start, path.before)
        owner, taken, _ = jax.lax.while_loop(
            lambda state: (state[2] < queries).any(), reassign, (owner, taken, path.end)
        )
        return price, owner, taken

    last = jnp.where(real, jnp.arange(1, targets + 1), 0).max(initial=0)
    state = jnp.zeros((batch, queries)), jnp.full((batch, queries), -1), jnp.full((batch, targets), queries)
    return jax.lax.fori_loop(0, last, add, state)[-1]


class _Path(NamedTuple):
    """Shortest augmenting path of each example, while it is searched.

    Attributes:
        target: last target that was reached.
        distance: length of the path to it.
        nearest: length of the shortest known path to each query.
        before: target before each query on that path.
        visited: whether the path to a query is known to be the shortest.
        end: free query that was reached, or -1 during the search, or Q if there is no target to assign.
    """

    target: Int[Array, "B"]
    distance: Float[Array, "B"]
    nearest: Float[Array, "B Q"]
    before: Int[Array, "B Q"]
    visited: Bool[Array, "B Q"]
    end: Int[Array, "B"]


def _extend(cost, price, owner, taken, start, path):
    """Extend each path to the nearest query that was not visited, and to the target that owns it.

    Args:
        price: price of each query [B, Q].
        owner: target of each query [B, Q]; -1 if it is free.
        taken: query of each target [B, N].
        start: target from which the paths begin [B].
    """
    every, numbers = jnp.arange(cost.shape[0]), jnp.arange(cost.shape[2])
    target, searching = path.target, path.end < 0
    own = taken[every, target]
    at_own = cost[every, target, own] - price[every, own]
    reduced = cost[every, target] - price - jnp.where(target == start, 0, at_own)[:, None]
    through = path.distance[:, None] + reduced
    closer = ~path.visited & (through < path.nearest)
    nearest = jnp.where(closer, through, path.nearest)
    query = jnp.where(path.visited, jnp.inf, nearest).argmin(axis=1)
    reached = owner[every, query]
    return _Path(
        target=jnp.where(searching & (reached >= 0), reached, target),
        distance=jnp.where(searching, nearest[every, query], path.distance),
        nearest=nearest,
        before=jnp.where(closer, target[:, None], path.before),
        visited=path.visited | (searching[:, None] & (numbers == query[:, None])),
        end=jnp.where(searching & (reached < 0), query, path.end),
    )


def _reassign(start, before, state):
    """Assign a query to the target before it on the path; the query that this target had is the next one."""
    owner, taken, query = state
    (batch, queries), targets = owner.shape, taken.shape[1]
    every, numbers = jnp.arange(batch), jnp.arange(queries)
    going = query < queries
    target = before[every, jnp.minimum(query, queries - 1)]
    owner = jnp.where(going[:, None] & (numbers == query[:, None]), target[:, None], owner)
    mine = going[:, None] & (jnp.arange(targets) == target[:, None])
    following = jnp.where(target == start, queries, taken[every, target])
    return owner, jnp.where(mine, query[:, None], taken), jnp.where(going, following, query)
