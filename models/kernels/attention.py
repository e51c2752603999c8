"""Attention implementations for some platforms, see `models.layers.attend`."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from lineage.models.layers.attend import Mask, Score, scaled_dot_product


def cudnn(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Mask,
    *,
    score: Score = scaled_dot_product,
    transform: Callable[[Array], Array] | None = None,
    sow: Callable[[Array], object] | None = None,
) -> Float[Array, "B T H C"]:
    """Attend with cuDNN's flash attention, on an NVIDIA GPU in bfloat16 or float16.

    The weights never exist as a whole, so that `sow` is not called, and `transform` and other scores raise ValueError.
    """
    if score is not scaled_dot_product or transform is not None:
        raise ValueError(
            "cuDNN attention computes the scaled dot product without dropout on the weights: "
            "set attention dropout to 0 or attend to 'auto'."
        )
    causal = mask.causal and mask.positions is None
    rest = mask.replace(causal=False) if causal else mask
    allowed = rest.materialize(query.shape[1], key.shape[1])
    window = (mask.window - 1, 0) if causal and mask.window else None
    options = {"is_causal": causal, "local_window_size": window, "implementation": "cudnn"}
    return jax.nn.dot_product_attention(query, key, value, bias=mask.bias, mask=allowed, **options)
