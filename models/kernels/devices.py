"""Settings that the attention kernels of the project share, and the division of their work over devices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool

from lineage.models.layers.attend import DropWeights, Keys, Mask, Queries
from lineage.models.layers.dropout import keeps
from lineage.models.layers.placement import EXAMPLES, HEADS, num_parts

SAVED = "flash_attention"  # name of the results that `saves_attention` keeps
MASKED = float(jnp.finfo(jnp.float32).min)  # score of a key that the mask excludes


@dataclass(frozen=True)
class Shape:
    """Static properties of a kernel.

    Attributes:
        heads: number of heads in a block.
        rows: number of queries in a block.
        channels: C.
        causal, window: see `Mask`.
        scale: factor of the scores.
        rate: dropout rate of the weights.
        all_heads: number of heads on all devices.
        interpret: emulate the kernel.
    """

    heads: int
    rows: int
    channels: int
    causal: bool
    window: int | None
    scale: float
    rate: float
    all_heads: int
    interpret: bool

    @property
    def factor(self) -> float:
        """Factor of the weights that dropout keeps."""
        return 1 / (1 - self.rate)


def is_described(mask: Mask, queries: int, keys: int) -> bool:
    """Return whether `on_devices` supports a mask: no arrays of T x S but a bias that all examples share."""
    if mask.bias is not None and (mask.bias.shape[0] > 1 or mask.bias.shape[2:] != (queries, keys)):
        return False
    return mask.positions is None and mask.allowed is None


def visited_blocks(shape: tuple[int, int], sizes: tuple[int, int], causal: bool, window: int | None) -> tuple[int, int]:
    """Return how many blocks of queries x keys a mask does not exclude as a whole, and the number of all blocks."""
    queries, keys = np.ogrid[0 : shape[0] : sizes[0], 0 : shape[1] : sizes[1]]  # the first of each block
    visited = np.ones(np.broadcast(queries, keys).shape, bool)
    if causal:
        visited = keys < queries + sizes[0]
        visited &= True if window is None else keys + sizes[1] > queries - window + 1
    return int(visited.sum()), visited.size


def heads_axes(heads: int) -> tuple[str, ...]:
    """Return the axes of the mesh over which heads are split."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.empty or heads % num_parts(mesh, HEADS) else HEADS


def on_devices(
    attend: Callable[..., Array], query: Queries, key: Keys, value: Keys, mask: Mask, scale: float, *,
    dropout: DropWeights | None = None, interpret: bool = False,
) -> Queries:  # fmt: skip
    """Attend as `dense` does, with a kernel; each device attends to its examples and heads.

    Args:
        attend: the kernel. It takes the settings of `Shape` from `channels` on, and the arrays "query" [B, T, D], "key"
            and "value" [B, S, D], with D = H x C; "seed" [3], followed by the numbers of the first example and of the
            first head of the device; optionally "own" [#B, T] and "seen" [#B, S], segments of the queries and of the
            keys, those of padding -1; "bias" [1, H, T, S].
        mask: one that `is_described`.
        scale: factor of the scores.
        dropout: dropout on the weights.
        interpret: emulate the kernel, on any platform.
    """
    batch, length, heads, channels = query.shape
    own = seen = mask.segments
    if mask.keys is not None:
        seen = jnp.where(mask.keys, 0 if seen is None else seen, -1)
    bias = None if mask.bias is None else jnp.broadcast_to(mask.bias, (1, heads, length, key.shape[1]))
    settings = {"channels": channels, "causal": mask.causal, "window": mask.window, "scale": scale}
    settings |= {"rate": 0.0 if dropout is None else dropout.rate, "all_heads": heads, "interpret": interpret}
    here, mesh = partial(_here, partial(attend, **settings)), jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        examples = EXAMPLES if batch % num_parts(mesh, EXAMPLES) == 0 else ()
        split = heads_axes(heads)
        arrays = PartitionSpec(examples, None, split)
        masks = [None if x is None else PartitionSpec(examples if len(x) > 1 else ()) for x in (own, seen)]
        places = (arrays, arrays, arrays, *masks, None if bias is None else PartitionSpec(None, split), PartitionSpec())
        here = partial(here, examples=examples, split=split)
        here = jax.shard_map(here, mesh=mesh, in_specs=places, out_specs=arrays, check_vma=False)
    return here(query, key, value, own, seen, bias, jnp.int32(0) if dropout is None else dropout.seed)


def _here(
    attend: Callable[..., Array], query, key, value, own, seen, bias, seed: Any, *, examples=(), split=()
) -> Queries:
    """Attend to the examples and heads of this device, which are split over these axes of the mesh."""
    parts = ((examples, len(query)), (split, query.shape[2]))
    first = [jax.lax.axis_index(axes) * count if axes else jnp.int32(0) for axes, count in parts]
    arrays = {name: x.reshape(*x.shape[:2], -1) for name, x in (("query", query), ("key", key), ("value", value))}
    arrays |= {name: x for name, x in (("own", own), ("seen", seen), ("bias", bias)) if x is not None}
    return attend(arrays | {"seed": jnp.stack([seed, *first])}).reshape(query.shape)


def keeps_weights(
    shape: Shape, seed: Any, example: Any, head: Any, row: Any, column: Any, size: tuple[int, int]
) -> Bool[Array, "R K"]:
    """Return which weights of a block dropout keeps, the same as `DropWeights`.

    Args:
        seed: see `on_devices`.
        example, head: numbers on this device.
        row, column: position of the first weight of the block.
        size: size of the block.
    """
    index = (seed[1] + example) * shape.all_heads + seed[2] + head
    row = jax.lax.broadcasted_iota(jnp.int32, size, 0) + row
    column = jax.lax.broadcasted_iota(jnp.int32, size, 1) + column
    return keeps(shape.rate, seed[0], index, row * 2**16 + column)
