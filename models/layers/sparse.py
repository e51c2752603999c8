"""Sparse attention, whose time and memory are linear in the length of the sequence instead of quadratic."""

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from lineage.models.kernels.attention import on_platform
from lineage.models.kernels.sparse_attention import flash
from lineage.models.kernels.triton_programs import BLOCK, fits
from lineage.models.layers.attend import SOFTMAX, DropWeights, Keys, Mask, Outputs, Queries, Values, Weighting, dense


def has_windows(mask: Mask, length: int) -> bool:
    """Return whether `windowed` can compute this mask for `length` queries with fewer scores than `dense`."""
    others = (mask.segments, mask.allowed, mask.positions, mask.bias)
    return mask.causal and mask.window is not None and length > 2 * mask.window and all(x is None for x in others)


def windowed(query: Queries, key: Keys, value: Values, mask: Mask, weighting: Weighting = SOFTMAX) -> Outputs:
    """Attend within a causal window: 2 T x window scores instead of T x T (arXiv 2310.06825, section 2).

    Queries are split into blocks of `window` tokens, which attend to their own and the preceding block. The mask must
    be causal with a window, and may have `keys`. The weights are [B x blocks, H, window, 2 x window].
    """
    batch, length = query.shape[:2]
    window = mask.window
    blocks = -(-length // window)
    rest = blocks * window - length

    def block(x, before=0):  # [B, T, ...] -> [B x blocks, window (or 2 windows), ...]
        x = jnp.pad(x, [(0, 0), (before, rest)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, x.shape[1] // window, window, *x.shape[2:])
        x = jnp.concatenate([x[:, :-1], x[:, 1:]], axis=2) if before else x
        return x.reshape(batch * blocks, *x.shape[2:])

    real = jnp.broadcast_to(jnp.ones((1, length), bool) if mask.keys is None else mask.keys, (batch, length))
    near = Mask(keys=block(real, window), causal=True, window=window, positions=window + jnp.arange(window)[None])
    out = dense(block(query), block(key, window), block(value, window), near, weighting)
    return out.reshape(batch, blocks * window, *out.shape[2:])[:, :length]


@struct.dataclass
class BlockSparse:
    """BigBird's attention (arXiv 2007.14062): a block attends to itself, its neighbors, both end blocks and R others.

    The end blocks attend to all blocks. There are no T x T scores.
    """

    others: Int[Array | np.ndarray, "*L N R"]  # indices of the R others of each of the N blocks between the ends
    size: int = struct.field(pytree_node=False)  # number of tokens in a block

    def __call__(self, query: Queries, key: Keys, value: Values, mask: Mask, weighting: Weighting = SOFTMAX) -> Outputs:
        """Attend; the mask may only have `keys`."""
        return on_platform(self.gathered, self.kernels, query, key, value, mask, weighting)

    def kernels(self, query: Queries, key: Keys, value: Values, mask: Mask, dropout: DropWeights | None) -> dict:
        """Return the kernels that support these arrays, by JAX's name of the platform."""
        half, same = query.dtype.itemsize == 2, query.shape == key.shape == value.shape
        if self.size != BLOCK or not half or not same or not fits(query, key, mask):
            return {}
        return {"cuda": partial(flash, others=self.others, dropout=dropout)}

    def gathered(self, query: Queries, key: Keys, value: Values, mask: Mask, weighting: Weighting = SOFTMAX) -> Outputs:
        """Gather the blocks that each block attends to."""
        batch, length, count = *query.shape[:2], self.others.shape[-2]
        real = jnp.ones((1, length), bool) if mask.keys is None else mask.keys
        real = jnp.broadcast_to(real, (batch, length))[..., None, None]

        def blocks(x):  # [B, T, ...] -> [B, N + 2, size, ...]
            x = jnp.pad(x, [(0, 0), (0, -length % self.size), (0, 0), (0, 0)])
            return x.reshape(batch, x.shape[1] // self.size, self.size, *x.shape[2:])

        def seen(x):  # [B, N + 2, size, ...] -> [B, N, 5 + R, size, ...]
            near = [x[:, :-2], x[:, 1:-1], x[:, 2:]]
            ends = [jnp.broadcast_to(end, near[0].shape) for end in (x[:, :1], x[:, -1:])]
            return jnp.concatenate([jnp.stack(ends + near, axis=2), x[:, self.others]], axis=2)

        def attend(axes, query, key, value, real):  # tokens have all axes from `axes` on but two
            shape = query.shape[:3]
            query, key, value, real = (
                x.reshape(math.prod(x.shape[:axes]), math.prod(x.shape[axes:-2]), *x.shape[-2:])
                for x in (query, key, value, real)
            )
            out = dense(query, key, value, Mask(keys=real[..., 0, 0]), weighting)
            return out.reshape(*shape, *out.shape[2:])

        query, key, value, real = map(blocks, (query, key, value, real))
        ends = attend(1, query[:, [0, -1]], key, value, real)
        distinct = np.ones((count, 5 + self.others.shape[-1], 1, 1, 1), bool)
        distinct[0, 2] = distinct[-1, 4] = False  # a neighbor that is also one of the ends
        between = attend(2, query[:, 1:-1], seen(key), seen(value), seen(real) & distinct)
        out = jnp.concatenate([ends[:, :1], between, ends[:, 1:]], axis=1)
        return out.reshape(batch, out.shape[1] * self.size, *out.shape[3:])[:, :length]
