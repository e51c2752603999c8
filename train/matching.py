"""The cheapest assignment of targets to predictions, on the device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def match(cost: Float[Array, "B N Q"], real: Bool[Array, "B N"]) -> Int[Array, "B N"]:
    """The query of each real target, all different, so that the sum of their costs is the least; of others Q.

    One target after the other finds its way: the shortest augmenting path (Crouse, "On implementing 2D rectangular
    assignment algorithms", 2016), of all examples at once. A query's price makes the reduced cost of each target's own
    query its least one. There must be as many queries as real targets.
    """
    batch, targets, queries = cost.shape
    every, numbers = jnp.arange(batch), jnp.arange(queries)

    def visit(state):
        """Goes on from `target`, reached at `distance`, to the nearest query that was not visited."""
        price, owner, taken, start, target, distance, nearest, before, visited, end = state
        own = taken[every, target]
        at_own = cost[every, target, own] - price[every, own]
        reduced = cost[every, target] - price - jnp.where(target == start, 0, at_own)[:, None]
        through = distance[:, None] + reduced
        closer = ~visited & (through < nearest)
        nearest, before = jnp.where(closer, through, nearest), jnp.where(closer, target[:, None], before)
        query = jnp.where(visited, jnp.inf, nearest).argmin(axis=1)
        going = end < 0
        visited = visited | (going[:, None] & (numbers == query[:, None]))
        distance = jnp.where(going, nearest[every, query], distance)
        free = owner[every, query] < 0
        target = jnp.where(going & ~free, owner[every, query], target)
        end = jnp.where(going & free, query, end)
        return price, owner, taken, start, target, distance, nearest, before, visited, end

    def reassign(state):
        """Gives the query to the target before it, which gives its own to the one before."""
        owner, taken, start, before, query = state
        going = query < queries
        target = before[every, jnp.minimum(query, queries - 1)]
        owner = jnp.where(going[:, None] & (numbers == query[:, None]), target[:, None], owner)
        mine = going[:, None] & (jnp.arange(targets) == target[:, None])
        following = jnp.where(target == start, queries, taken[every, target])
        return owner, jnp.where(mine, query[:, None], taken), start, before, jnp.where(going, following, query)

    def add(start, state):
        price, owner, taken = state
        start = jnp.full(batch, start)
        here = real[every, start]
        unseen = (
            jnp.full((batch, queries), jnp.inf),
            jnp.zeros((batch, queries), jnp.int32),
            jnp.zeros(owner.shape, bool),
        )
        state = price, owner, taken, start, start, jnp.zeros(batch), *unseen, jnp.where(here, -1, queries)
        state = jax.lax.while_loop(lambda state: (state[-1] < 0).any(), visit, state)
        distance, nearest, before, visited, end = state[5:]
        price = price - jnp.where(visited, distance[:, None] - nearest, 0)
        state = jax.lax.while_loop(
            lambda state: (state[-1] < queries).any(), reassign, (owner, taken, start, before, end)
        )
        return price, *state[:2]

    # In float32 a price must stay far below infinity; what is not a number is never chosen before what is.
    cost = jnp.nan_to_num(cost.astype(jnp.float32), nan=1e9, posinf=1e9, neginf=-1e9)
    last = jnp.where(real, jnp.arange(1, targets + 1), 0).max(initial=0)
    state = jnp.zeros((batch, queries)), jnp.full((batch, queries), -1), jnp.full((batch, targets), queries)
    return jax.lax.fori_loop(0, last, add, state)[-1]
