"""ViT from and to the `.npz` files of google-research/vision_transformer, whose layout is Flax's, as ours is.

The reference code computes the tanh approximation of GELU, with norms of epsilon 1e-6. Hybrids (R50+ViT-B/16...) are
supported too.
"""

import math
import os
import re
import zipfile
from collections import Counter
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from lineage.models.vit import ViT

# Prefixes of names there -> here; `*` is the number of a layer, for which our parameters have a leading axis.
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


def load(path: str | os.PathLike, dtype: DTypeLike = jnp.float32, **settings) -> tuple[nn.Module, dict]:
    """Return the model in a file and its variables; its sizes are those of the arrays, unless `settings` has them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is corrupt, or is not one of a ViT.
    """
    try:
        with np.load(path) as file:
            arrays = dict(file)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not an .npz file: {error}.") from None
    parts: dict[str, dict[int, np.ndarray]] = {}
    units = {tuple(map(int, unit)) for unit in re.findall(r"block(\d+)/unit(\d+)/conv1/", " ".join(arrays))}
    hybrid = tuple(Counter(stage for stage, _ in sorted(units)).values())
    names = NAMES | _resnet(hybrid)
    for name, array in arrays.items():
        layer = re.search(r"encoderblock_(\d+)", name)
        place = _renamed(name.replace(layer[0], "encoderblock_*") if layer else name, names)
        parts.setdefault(place, {})[int(layer[1]) if layer else -1] = array
    found = {
        place: np.stack([of[n] for n in sorted(of)]) if "layers/" in place else of[min(of)]
        for place, of in parts.items()
    }
    try:
        size, _, channels, width = found["patch_embed/projection/kernel"].shape
        depth, _, num_heads, _ = found["stack/layers/attention/query/kernel"].shape
        hidden, table = found["stack/layers/mlp/up/kernel"].shape[-1], found["table/table"]
        if hybrid:
            size, channels = size * _stride(hybrid), found["backbone/stem_conv/kernel"].shape[2]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} holds no ViT: {error}.") from None
    token = "class_token" in found
    known = {
        "num_classes": found["classifier/bias"].size if "classifier/bias" in found else 0,
        "image_size": math.isqrt(table.shape[1] - token) * size,
        "patch_size": size,
        "channels": channels,
        "depth": depth,
        "width": width,
        "num_heads": num_heads,
        "mlp_dim": hidden,
        "hybrid": hybrid,
        "pooling": "token" if token else "gap",
        "head": "mlp" if "pre_logits/bias" in found else "linear",
    }
    model = ViT(**FIXED | known | settings)
    shapes = _shapes(model)
    sizes, expected = ({place: math.prod(x.shape) for place, x in of.items()} for of in (found, shapes))
    wrong = sorted(set(sizes.items()) ^ set(expected.items()))
    if wrong:
        raise ValueError(f"{path} holds another model: {wrong[0][0]} is missing, unexpected or of another size.")
    params = {place: jnp.asarray(array.reshape(shapes[place].shape), dtype) for place, array in found.items()}
    return model, {"params": unflatten_dict(params, sep="/")}


def save(path: str | os.PathLike, model: nn.Module, variables: dict) -> None:
    """Write a file; raise ValueError if the reference code has no such model."""
    known = type(model) is ViT and all(getattr(model, name) == value for name, value in FIXED.items())
    if not known or model.pooling not in ("token", "gap") or model.head == "probe":
        raise ValueError(f"the .npz layout has no such model: it must be a ViT with {FIXED} and pooling token or gap.")
    size, width = model.patch_size // _stride(model.hybrid), model.width
    shapes = {"class_token": (1, 1, -1), "table/table": (1, -1, width)}
    shapes["patch_embed/projection/kernel"] = (size, size, -1, width)
    back = {ours: name for name, ours in (NAMES | _resnet(model.hybrid)).items()}
    arrays = {}
    for place, value in flatten_dict(variables["params"], sep="/").items():
        name, value = _renamed(place, back), np.asarray(value, np.float32)
        if "*" in name:
            arrays |= {name.replace("*", str(n)): part for n, part in enumerate(value)}
        else:
            arrays[name] = value.reshape(shapes.get(place, value.shape))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def _resnet(blocks):
    """Return the `NAMES` of a hybrid's ResNet with these numbers of blocks in its stages."""
    names = {"conv_root/": "backbone/stem_conv/", "gn_root/": "backbone/outer_norm/"} if blocks else {}
    parts = {"conv_proj/": "shortcut/", "gn_proj/": "shortcut_norm/"}
    parts |= {
        f"{there}{i + 1}/": f"{here}_{i}/" for there, here in (("conv", "conv"), ("gn", "norm")) for i in range(3)
    }
    for stage, depth in enumerate(blocks):
        for unit in range(depth):
            start, ours = f"block{stage + 1}/unit{unit + 1}/", f"backbone/stages_{stage}_{unit}/"
            names |= {start + there: ours + here for there, here in parts.items()}
    return names


def _stride(blocks):
    """Return the stride, in pixels of the image, of the feature map that is cut into patches."""
    return 2 ** (len(blocks) + 1) if blocks else 1


def _renamed(name, names):
    """Return the name with its prefix replaced as in `names`, or unchanged if it has none of the prefixes."""
    return next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name)


def _shapes(model):
    image = np.zeros((1, model.image_size, model.image_size, model.channels), np.float32)
    return flatten_dict(jax.eval_shape(model.init, jax.random.key(0), image)["params"], sep="/")
