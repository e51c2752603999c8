"""Flash attention for TPUs and NVIDIA GPUs: neither pass materializes the T x S weights in main memory."""

import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lineage.models.kernels import fused_attention, short_attention, triton_attention, triton_programs
from lineage.models.kernels.devices import SAVED, on_devices, visited_blocks
from lineage.models.kernels.fused_attention import LANES
from lineage.models.layers.attend import (
    SOFTMAX,
    Attend,
    DropWeights,
    Keys,
    Mask,
    Outputs,
    Queries,
    Values,
    Weighting,
    dot_product,
    scaled_dot_product,
)

MIN_LENGTH = 128  # minimum number of queries and keys for which kernels are used; on GPUs, some take fewer
BLOCK = 512  # maximum number of queries and of keys in a block of splash attention
BACKWARD_BLOCKS = 8  # maximum number of blocks of keys in its backward pass


def on_platform(
    plain: Attend,
    kernels: Callable[..., dict[str, Attend]],
    query: Queries,
    key: Keys,
    value: Values,
    mask: Mask,
    weighting: Weighting = SOFTMAX,
) -> Outputs:
    """Attend with a kernel of the platform that runs the program if there is one, otherwise with `plain`.

    Kernels support inner products, scaled or not, and do not record weights. `kernels` returns those that support the
    arrays, the mask and the dropout, see `kernels_for`.
    """
    plain = partial(plain, weighting=weighting)
    score, dropout = weighting.score, weighting.transform
    supported = weighting.sow is None and isinstance(dropout, DropWeights | None)
    supported = supported and (score is scaled_dot_product or score is dot_product)
    available = kernels(query, key, value, mask, dropout) if supported else {}
    if isinstance(dropout, DropWeights) and "cuda" not in available and jax.default_backend() == "gpu":
        message = "Dropout on attention weights is above 0: attention is computed without a fast kernel."
        warnings.warn(message, stacklevel=3)
    if not available:
        return plain(query, key, value, mask)
    scale = 1.0 if score is dot_product else query.shape[-1] ** -0.5
    branches = {platform: partial(kernel, scale=scale) for platform, kernel in available.items()}
    return jax.lax.platform_dependent(query, key, value, mask, default=plain, **branches)


def kernels_for(
    query: Queries, key: Keys, value: Values, mask: Mask, dropout: DropWeights | None = None
) -> dict[str, Attend]:
    """Return the kernels that support these arrays and this mask, by JAX's name of the platform."""
    (length, heads), (keys, kv_heads, size) = query.shape[1:3], key.shape[1:]
    found: dict[str, Attend] = {}
    if mask.positions is not None or value.shape[-1] != size:
        return found
    compact, half = mask.allowed is None and mask.bias is None, query.dtype.itemsize == 2
    ours = half and heads == kv_heads  # what our own kernels require
    if ours and short_attention.fits(query, key, mask):
        found["cuda"] = partial(short_attention.attend, dropout=dropout)
    if min(length, keys) < MIN_LENGTH // 2:
        return found
    if dropout is not None and ours and triton_programs.fits(query, key, mask):
        found["cuda"] = partial(triton_attention.flash, dropout=dropout)
    if min(length, keys) < MIN_LENGTH:
        return found
    short = dropout is not None or not compact or max(length, keys) <= BLOCK
    if short and ours and fused_attention.fits(query, key, mask):
        found["tpu"] = partial(fused_attention.fused, dropout=dropout)
    elif compact and dropout is None:
        found["tpu"] = splash
    if dropout is not None:
        return found
    no_mask = compact and mask.keys is None and mask.segments is None
    supported = half and size % 8 == 0 and size <= 128 and (no_mask or length % 2 == keys % 2 == 0)
    if supported and any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        found["cuda"] = cudnn  # can be traced only where JAX finds cuDNN
    return found


def cudnn(query: Queries, key: Keys, value: Keys, mask: Mask, scale: float) -> Queries:
    """Attend with cuDNN's flash attention, in bfloat16 or float16; `scale` multiplies the scores.

    With `keys`, `segments`, `allowed` or `bias`, the numbers of queries and of keys must be even.
    """
    batch, length, keys = *query.shape[:2], key.shape[1]
    window = (mask.window - 1, 0) if mask.causal and mask.window else None
    options = {"is_causal": mask.causal, "local_window_size": window, "scale": scale, "implementation": "cudnn"}
    allowed = mask.replace(causal=False).materialize(length, keys)
    if allowed is not None:
        options["mask"] = jnp.broadcast_to(allowed, (*allowed.shape[:2], length, keys))
    if mask.bias is not None:
        options["bias"] = jnp.broadcast_to(mask.bias.astype(query.dtype), (*mask.bias.shape[:2], length, keys))
    if keys % 2 and not mask.causal:  # a causal mask excludes the key of padding that is added below
        counts = {"query_seq_lengths": length, "key_value_seq_lengths": keys}
        options |= {name: jnp.full(batch, count, jnp.int32) for name, count in counts.items()}
    # JAX's gradient does not support odd lengths.
    arrays = (jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value))
    return jax.nn.dot_product_attention(*arrays, **options)[:, :length]


def saves_attention(primitive: Any, *_: Any, **options: Any) -> bool:
    """Rematerialization policy that saves the residuals of the attention kernels."""
    return options.get("name") == SAVED or primitive.name.startswith("dot_product_attention_fwd")


def block_sizes(queries: int, keys: int) -> tuple[int, int, int]:
    """Return the sizes of blocks of queries, of keys, and of keys in the backward pass, chosen for little padding.

    The backward pass writes a gradient of the queries for each block of keys, so its blocks are few and large.
    """
    counts = [-(-n // BLOCK) for n in (queries, keys)]
    sizes = [-(-n // (count * LANES)) * LANES for n, count in zip((queries, keys), counts)]
    return *sizes, sizes[1] * -(-counts[1] // BACKWARD_BLOCKS)


def _splash(
    arrays: dict[str, Array], *, channels: int, causal: bool, window: int | None, scale: float, interpret: bool, **_
) -> Float[Array, "B T D"]:
    """Attend on one device with splash attention, a Pallas kernel that skips blocks that the mask excludes.

    See `on_devices` for the arguments; there must be no bias. There may be fewer key/value heads than heads.
    """
    # Imported here because only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (batch, length, _), keys = arrays["query"].shape, arrays["key"].shape[1]
    rows, columns, backward = block_sizes(length, keys)
    shape = -(-length // rows) * rows, -(-keys // backward) * backward
    totals = {"query": shape[0], "own": shape[0], "key": shape[1], "value": shape[1], "seen": shape[1]}

    def padded(name, x, value=0):  # along the tokens, axis 1
        return jnp.pad(x, [(0, 0), (0, totals[name] - x.shape[1])] + [(0, 0)] * (x.ndim - 2), constant_values=value)

    segments = None
    if "seen" in arrays or (shape[1] > keys and not causal):
        same = {"own": jnp.zeros((1, length), jnp.int32), "seen": jnp.zeros((1, keys), jnp.int32)}
        pair = (padded(name, arrays.get(name, same[name]), -1) for name in same)
        segments = kernels.SegmentIds(*(jnp.broadcast_to(x, (batch, x.shape[1])) for x in pair))
    heads = {name: arrays[name].reshape(*arrays[name].shape[:2], -1, channels) for name in ("query", "key", "value")}
    heads["query"] = heads["query"] * scale
    if causal and window is not None:
        head_mask = masks.LocalMask(shape, (window - 1, 0), 0)
    else:
        head_mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    sizes = {"block_q": rows, "block_kv": columns}
    sizes |= {"block_q_dkv": rows, "block_kv_dkv": backward, "block_kv_dkv_compute": columns}
    attend = kernels.make_splash_mha(
        mask=masks.MultiHeadMask([head_mask] * heads["query"].shape[2]),
        block_sizes=kernels.BlockSizes(**sizes, use_fused_bwd_kernel=True),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=SAVED,
        interpret=interpret,
    )
    visited, count = visited_blocks(shape, (rows, backward), causal, window)
    with jax.named_scope(f"visits_{visited}_of_{count}_blocks"):  # for `lineage compile`
        out = jax.vmap(attend)(*(padded(name, x).swapaxes(1, 2) for name, x in heads.items()), segments)
    return out.swapaxes(1, 2)[:, :length].reshape(batch, length, -1)


splash = partial(on_devices, _splash)
