"""ViT: `ViTForImageClassification` <-> a class token and a linear head; `ViTModel` <-> `num_classes=0`.

A `ViTModel`'s pooler is the tanh layer of the pre-training head: `head="mlp"`. Tensors have their names in the files,
not those of the live modules. The reference's dropout is ours, but it drops nothing inside the feed-forward layer.
"""

import numpy as np

from models.convert.family import Family, Rule, heads, linear, norm

FIELDS = {
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 16),
    "num_channels": ("channels", 3),
    "num_hidden_layers": ("depth", 12),
    "hidden_size": ("width", 768),
    "num_attention_heads": ("num_heads", 12),
    "intermediate_size": ("hidden", 3072),
    "hidden_act": ("activation", "gelu"),
    "layer_norm_eps": ("epsilon", 1e-12),
    "hidden_dropout_prob": ("dropout", 0.0),
    "attention_probs_dropout_prob": ("dropout", 0.0),
}


def _rules(model):
    body = "" if _has_pooler(model) else "vit."
    layer, ours = f"{body}encoder.layer.*.", "stack/layers/"
    patch = linear(f"{body}embeddings.patch_embeddings.projection", "patch_embed/projection", "D c p q -> (p q c) D")
    table = [
        Rule(f"{body}embeddings.cls_token", "class_token", "1 1 D -> D"),
        Rule(f"{body}embeddings.position_embeddings", "table/table", "1 P D -> P D"),
        *patch,
        *norm(f"{layer}layernorm_before", f"{ours}attention_norm"),
        *heads(f"{layer}attention.attention.query", f"{ours}attention/query"),
        *heads(f"{layer}attention.attention.key", f"{ours}attention/key"),
        *heads(f"{layer}attention.attention.value", f"{ours}attention/value"),
        *linear(f"{layer}attention.output.dense", f"{ours}attention/out", "D (H C) -> H C D"),
        *norm(f"{layer}layernorm_after", f"{ours}mlp_norm"),
        *linear(f"{layer}intermediate.dense", f"{ours}mlp/up"),
        *linear(f"{layer}output.dense", f"{ours}mlp/down"),
        *norm(f"{body}layernorm", "norm"),
    ]
    if model.num_classes:
        return table + linear("classifier", "classifier")
    return table + linear("pooler.dense", "pre_logits") if _has_pooler(model) else table


def _has_pooler(model):
    return model.head == "mlp" and not model.num_classes


def _settings(config, architecture, names):
    for field in ("image_size", "patch_size"):
        size = config.get(field)
        if isinstance(size, list) and len(set(size)) == 1:
            config[field] = size[0]
    if architecture == "ViTModel":
        pooler = "pooler.dense.weight" in names
        if pooler and config.get("pooler_act", "tanh") != "tanh":
            raise ValueError(f"pooler_act is {config['pooler_act']!r}: the model knows only 'tanh'.")
        return {"num_classes": 0, "head": "mlp" if pooler else "linear"}
    # The reference leaves out what is its default: two labels.
    return {"num_classes": config.get("num_labels", len(config.get("id2label", "01")))}


def _config(model):
    kind = {"position": model.position, "pooling": model.pooling, "head": model.head if model.num_classes else "linear"}
    allowed = {"position": "1d", "pooling": "token", "head": "linear"}
    if kind != allowed:
        raise ValueError(f"`transformers` has no ViT with {kind}: it must have {allowed} (or no classes).")
    labels = [f"LABEL_{label}" for label in range(model.num_classes)]
    return {
        "architectures": ["ViTModel" if _has_pooler(model) else "ViTForImageClassification"],
        "id2label": dict(enumerate(labels)),
        "label2id": {name: label for label, name in enumerate(labels)},
        "intermediate_size": model.hidden or 4 * model.width,
        "encoder_stride": model.patch_size,
    }


FAMILY = Family(
    model="vit",
    architectures=("ViTForImageClassification", "ViTModel"),
    prefix="vit.",
    fields=FIELDS,
    fixed={"qkv_bias": True},
    sizes={"H": "num_heads", "p": "patch_size", "q": "patch_size", "c": "channels"},
    example=lambda model: np.zeros((1, model.image_size, model.image_size, model.channels), np.float32),
    rules=_rules,
    config=_config,
    settings=_settings,
)
