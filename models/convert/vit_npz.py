"""ViT from and to the `.npz` files of google-research/vision_transformer, whose layout is Flax's, as ours is.

The reference code uses the tanh approximation of GELU, and norms with epsilon 1e-6. Hybrids such as R50+ViT-B/16 are
supported.
"""

import math
import os
import re
from collections import Counter
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from lineage.models.vit import ViT, stride_of

# Prefix of a name in files -> ours; `*` is the index of a layer, for which our parameters have a leading axis.
NAMES = {
    "cls": "class_token",
    "embedding/": "patch_embed/projection/",
    "Transformer/posembed_input/pos_embedding": "table/table",
    "Transformer/encoderblock_*/LayerNorm_0/": "stack/layers/attention_norm/",
    "Transformer/encoderblock_*/MultiHeadDotProductAttention_1/": "stack/layers/attention/",
    "Transformer/encoderblock_*/LayerNorm_2/": "stack/layers/mlp_norm/",
    "Transformer/encoderblock_*/MlpBlock_3/Dense_0/": "stack/layers/mlp/up/",
    "Transformer/encoderblock_*/MlpBlock_3/Dense_1/": "stack/layers/mlp/down/",
    "Transformer/encoder_norm/": "norm/",
    "pre_logits/": "pre_logits/",
    "head/": "classifier/",
}
FIXED = {"position": "1d", "activation": "gelu_tanh", "epsilon": 1e-6}
FIXED |= {"num_registers": 0, "layer_scale": 0.0, "qk_norm": False}
MAX_BYTES = 10**8  # maximum size of a file's arrays, in addition to four times that of the file


def load(path: str | os.PathLike, dtype: DTypeLike = jnp.float32, **settings) -> tuple[nn.Module, dict]:
    """Return the model in a file and its variables; sizes that are not in `settings` are those of the arrays.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is corrupt, or is not one of a ViT.
    """
    arrays = _read(path)
    try:
        model = ViT(**FIXED | _settings(arrays) | settings)
        image = jax.ShapeDtypeStruct((1, model.image_size, model.image_size, model.channels), jnp.float32)
        shapes = flatten_dict(jax.eval_shape(model.init, jax.random.key(0), image)["params"], sep="/")
        with np.errstate(over="ignore"):
            arrays = {name: array.astype(dtype, copy=False) for name, array in arrays.items()}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a ViT: {' '.join(str(error).split())[:200]}.") from None
    names = {ours: _names(model, ours) for ours in shapes}
    zeros = {ours: np.broadcast_to(np.float32(0), leaf.shape) for ours, leaf in shapes.items()}
    expected, given = (
        {name: tuple(size for size in array.shape if size != 1) for name, array in group.items()}  # as in old files
        for group in (_in_file(model, zeros), arrays)
    )
    if wrong := sorted(expected.items() ^ given.items()):
        raise ValueError(f"{path} is another model: {wrong[0][0]} is missing, unexpected or of another shape.")
    if wrong := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
        raise ValueError(f"{path}: tensor {wrong[0]} has values that are not finite.")
    arrays = {ours: np.stack([arrays[name] for name in group]) for ours, group in names.items()}
    params = {ours: jnp.asarray(array.reshape(shapes[ours].shape)) for ours, array in arrays.items()}
    return model, {"params": unflatten_dict(params, sep="/")}


def _read(path):
    """Return the arrays in a file, which must not be compressed so much that they would take too much memory."""
    size = os.stat(path).st_size  # 0 for a pipe
    try:
        if not size:
            raise ValueError("it is empty")
        with np.load(path) as file:
            if (needed := sum(entry.file_size for entry in file.zip.infolist())) > 4 * size + MAX_BYTES:
                raise ValueError(f"it has {size:,} bytes for arrays of {needed:,}")
            # NumPy writes bfloat16 as items of two bytes without a type.
            return {name: array.view(jnp.bfloat16) if array.dtype == "V2" else array for name, array in file.items()}
    except Exception as error:  # archives raise exceptions of many types
        if isinstance(error, OSError) and error.filename:
            raise
        raise ValueError(f"{path} is not an .npz file: {' '.join(str(error).split())[:200]}.") from None


def _settings(arrays):
    """Return the settings of the model of some arrays, by their names and shapes."""
    paths = " ".join(arrays)
    units = set(re.findall(r"block(\d+)/unit(\d+)/conv1/", paths))
    hybrid = tuple(Counter(stage for stage, _ in sorted(units)).values())
    layer = "Transformer/encoderblock_0/"
    size, _, channels, width = arrays["embedding/kernel"].shape
    _, num_heads, _ = arrays[f"{layer}MultiHeadDotProductAttention_1/query/kernel"].shape
    positions = arrays["Transformer/posembed_input/pos_embedding"].shape[1]
    if hybrid:
        size, channels = size * stride_of(hybrid), arrays["conv_root/kernel"].shape[2]
    token = "cls" in arrays
    return {
        "num_classes": arrays["head/bias"].size if "head/bias" in arrays else 0,
        "image_size": math.isqrt(positions - token) * size,
        "patch_size": size,
        "channels": channels,
        "depth": len(set(re.findall(r"encoderblock_\d+/", paths))),
        "width": width,
        "num_heads": num_heads,
        "mlp_dim": arrays[f"{layer}MlpBlock_3/Dense_0/kernel"].shape[-1],
        "hybrid": hybrid,
        "pooling": "token" if token else "gap",
        "head": "mlp" if "pre_logits/bias" in arrays else "linear",
    }


def save(path: str | os.PathLike, model: nn.Module, variables: dict) -> None:
    """Write a file; raise ValueError if the reference code has no such model."""
    known = type(model) is ViT and all(getattr(model, name) == value for name, value in FIXED.items())
    if not known or model.pooling not in ("token", "gap") or model.head == "probe":
        raise ValueError(f"the .npz layout has no such model: it must be a ViT with {FIXED} and pooling token or gap.")
    params = flatten_dict(variables["params"], sep="/")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **_in_file(model, {ours: np.asarray(value, np.float32) for ours, value in params.items()}))


def _in_file(model, params):
    """Return the arrays of a file, by their names in it, from those of our parameters."""
    size, width = model.patch_size // stride_of(model.hybrid), model.width
    shapes = {"class_token": (1, 1, -1), "table/table": (1, -1, width)}
    shapes["patch_embed/projection/kernel"] = (size, size, -1, width)
    arrays = {}
    for ours, value in params.items():
        parts = value if "layers/" in ours else [value.reshape(shapes.get(ours, value.shape))]
        arrays |= zip(_names(model, ours), parts)
    return arrays


def _resnet(blocks):
    """Return the `NAMES` of a hybrid's ResNet, given the number of blocks of each stage."""
    names = {"conv_root/": "backbone/stem_conv/", "gn_root/": "backbone/outer_norm/"} if blocks else {}
    parts = {"conv_proj/": "shortcut/", "gn_proj/": "shortcut_norm/"}
    for i in range(3):
        parts |= {f"conv{i + 1}/": f"conv_{i}/", f"gn{i + 1}/": f"norm_{i}/"}
    for stage, depth in enumerate(blocks):
        for unit in range(depth):
            theirs, ours = f"block{stage + 1}/unit{unit + 1}/", f"backbone/stages_{stage}_{unit}/"
            names |= {theirs + their_part: ours + our_part for their_part, our_part in parts.items()}
    return names


def _names(model, ours):
    """Return the name of our parameter in files, or its names in all layers."""
    known = NAMES | _resnet(model.hybrid)
    name = next((theirs + ours.removeprefix(start) for theirs, start in known.items() if ours.startswith(start)), ours)
    return [name.replace("*", str(layer)) for layer in range(model.depth)] if "*" in name else [name]
