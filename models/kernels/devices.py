"""Common parts of our attention kernels: their settings, and the partition of their work over devices."""

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
from lineage.models.layers.placement import EXAMPLES, HEADS, dividing

SAVED = "flash_attention"  # checkpoint name of the residuals, for `saves_attention`
MASKED = float(jnp.finfo(jnp.float32).min)  # score of a masked key


@dataclass(frozen=True)
class Shape:
    """Static properties of a kernel; for `causal` and `window`, see `Mask`."""

    heads: int  # number of heads in a block
    rows: int  # number of queries in a block
    channels: int  # C
    causal: bool
    window: int | None
    scale: float  # factor of the scores
    rate: float  # dropout rate of the weights
    all_heads: int  # number of heads on all devices
    interpret: bool  # whether to emulate the kernel

    @property
    def factor(self) -> float:
        """Scale of the weights that dropout keeps."""
        return 1 / (1 - self.rate)


def is_described(mask: Mask, queries: int, keys: int) -> bool:
    """Return whether `on_devices` supports a mask: its only T x S array may be a bias that all examples share."""
    if mask.bias is not None and (mask.bias.shape[0] > 1 or mask.bias.shape[2:] != (queries, keys)):
        return False
    return mask.positions is None and mask.allowed is None


def visited_blocks(shape: tuple[int, int], sizes: tuple[int, int], causal: bool, window: int | None) -> tuple[int, int]:
    """Return the number of blocks of queries x keys that a mask does not exclude entirely, and that of all blocks."""
    queries, keys = np.ogrid[0 : shape[0] : sizes[0], 0 : shape[1] : sizes[1]]  # first position of each block
    visited = np.ones(np.broadcast(queries, keys).shape, bool)
    if causal:
        visited = keys < queries + sizes[0]
        visited &= True if window is None else keys + sizes[1] > queries - window + 1
    return int(visited.sum()), visited.size


def on_devices(
    attend: Callable[..., Array], query: Queries, key: Keys, value: Keys, mask: Mask, scale: float, *,
    dropout: DropWeights | None = None, tables: dict[str, Array] | None = None, interpret: bool = False,
) -> Queries:  # fmt: skip
    """Attend as `dense` does, with a kernel; each device attends to its examples and heads.

    Args:
        attend: kernel (arrays, **settings) -> outputs [B, T, D], with the settings of `Shape` from `channels` on. The
            arrays are "query" [B, T, D], "key" and "value" [B, S, K x C], with D = H x C; "seed" [3], the seed of
            dropout and the indices of the device's first example and first head; optionally "own" [#B, T] and "seen"
            [#B, S], the segment ids of queries and keys, -1 for padding; "bias" [1, H, T, S]; and `tables`.
        mask: a mask that `is_described`.
        scale, interpret: see `Shape`.
        dropout: dropout of the weights, if any.
        tables: other arrays for the kernel, the same on all devices.
    """
    batch, length, heads, channels = query.shape
    own = seen = mask.segments
    if mask.keys is not None:
        seen = jnp.where(mask.keys, 0 if seen is None else seen, -1)
    bias = None if mask.bias is None else jnp.broadcast_to(mask.bias, (1, heads, length, key.shape[1]))
    settings = {"channels": channels, "causal": mask.causal, "window": mask.window, "scale": scale}
    settings |= {"rate": 0.0 if dropout is None else dropout.rate, "all_heads": heads, "interpret": interpret}
    local, mesh = partial(_attend_locally, partial(attend, **settings)), jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        examples, split = dividing(EXAMPLES, batch), dividing(HEADS, key.shape[2])
        arrays = PartitionSpec(examples, None, split)
        masks = [None if x is None else PartitionSpec(examples if len(x) > 1 else ()) for x in (own, seen)]
        biases = None if bias is None else PartitionSpec(None, split)
        specs = (arrays, arrays, arrays, *masks, biases, PartitionSpec(), PartitionSpec())
        local = partial(local, examples=examples, split=split)
        local = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=arrays, check_vma=False)
    return local(query, key, value, own, seen, bias, jnp.int32(0) if dropout is None else dropout.seed, tables or {})


def _attend_locally(
    attend: Callable[..., Array], query, key, value, own, seen, bias, seed: Any, tables, *, examples=(), split=()
) -> Queries:
    """Attend on this device; examples and heads are split over the mesh axes `examples` and `split`."""
    parts = ((examples, len(query)), (split, query.shape[2]))
    first = [jax.lax.axis_index(axes) * count if axes else jnp.int32(0) for axes, count in parts]
    arrays = {name: x.reshape(*x.shape[:2], -1) for name, x in (("query", query), ("key", key), ("value", value))}
    arrays |= {name: x for name, x in (("own", own), ("seen", seen), ("bias", bias)) if x is not None}
    return attend(arrays | tables | {"seed": jnp.stack([seed, *first])}).reshape(query.shape)


def keeps_weights(
    shape: Shape, seed: Any, example: Any, head: Any, row: Any, column: Any, size: tuple[int, int]
) -> Bool[Array, "R K"]:
    """Return which weights of a block of `size` (rows, columns) dropout keeps, the same as `DropWeights`.

    For `seed`, see `on_devices`. `head` is an index on this device, `example` one on all devices, `row` and `column`
    the position of the first weight of the block.
    """
    index = example * shape.all_heads + seed[2] + head
    row = jax.lax.broadcasted_iota(jnp.int32, size, 0) + row
    column = jax.lax.broadcasted_iota(jnp.int32, size, 1) + column
    return keeps(shape.rate, seed[0], index, row * 2**16 + column)
