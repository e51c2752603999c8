"""Attention of each block of tokens to few others: work and memory grow as the length, not as its square."""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from lineage.models.layers.attention import attend


@struct.dataclass
class BlockSparse:
    """`attend` where a block sees itself, its neighbours, the first, the last and R others (arXiv 2007.14062).

    The first and the last block see all, as all see them. Blocks are cut out and gathered: there are no T x T scores.

    Attributes:
        others: the R others of each of the N blocks between the ends; with a layer axis, of each layer.
        size: tokens in a block.
    """

    others: Int[Array | np.ndarray, "*L N R"]
    size: int = struct.field(pytree_node=False)

    def __call__(
        self,
        query: Float[Array, "B T H C"],
        key: Float[Array, "B T K C"],
        value: Float[Array, "B T K E"],
        *,
        mask: Bool[Array, "#B #H 1 T"] | None = None,
        bias: None = None,
        **options,
    ) -> Float[Array, "B T H E"]:
        batch, length, count = *query.shape[:2], self.others.shape[-2]
        real = jnp.ones((1, 1, 1, length), bool) if mask is None else mask
        real = jnp.broadcast_to(real, (batch, *real.shape[1:])).transpose(0, 3, 1, 2)

        def blocks(x):  # [B, T, ...] -> [B, N + 2, size, ...]
            x = jnp.pad(x, [(0, 0), (0, -length % self.size), (0, 0), (0, 0)])
            return x.reshape(batch, -1, self.size, *x.shape[2:])

        def seen(x):  # [B, N + 2, size, ...] -> [B, N, 5 + R, size, ...]
            near = [x[:, :-2], x[:, 1:-1], x[:, 2:]]
            ends = [jnp.broadcast_to(end, near[0].shape) for end in (x[:, :1], x[:, -1:])]
            return jnp.concatenate([jnp.stack(ends + near, axis=2), x[:, self.others]], axis=2)

        def look(rows, query, key, value, real):
            query, key, value, real = (x.reshape(rows, -1, *x.shape[-2:]) for x in (query, key, value, real))
            out = attend(query, key, value, mask=real.transpose(0, 2, 3, 1), **options)
            return out.reshape(batch, -1, self.size, *out.shape[2:])

        query, key, value, real = map(blocks, (query, key, value, real))
        ends = look(batch, query[:, [0, -1]], key, value, real)
        once = np.ones((count, 5 + self.others.shape[-1], 1, 1, 1), bool)
        once[0, 2] = once[-1, 4] = False  # a neighbour that is an end
        between = look(batch * count, query[:, 1:-1], seen(key), seen(value), seen(real) & once)
        out = jnp.concatenate([ends[:, :1], between, ends[:, 1:]], axis=1)
        return out.reshape(batch, -1, *out.shape[3:])[:, :length]


def other_blocks(depth: int, blocks: int, count: int, seed: int) -> Int[np.ndarray, "L N R"]:
    """In each layer, `count` random blocks for each one between the ends: none that it sees anyway.

    Raises:
        ValueError: there are not so many.
    """
    if blocks < 5 + count:
        raise ValueError(f"{blocks} blocks leave no {count} others for each: there must be at least {5 + count}.")
    place = np.arange(blocks)
    seen = np.abs(place[1:-1, None] - place) < 2
    seen[:, [0, -1]] = True
    draws = np.random.default_rng(seed).random((depth, *seen.shape))
    return np.argsort(np.where(seen, 2, draws), axis=-1)[..., :count]
