"""DETR: `DetrForObjectDetection` with a `ResNetConfig` as its backbone's.

The reference's dropout is ours, but it drops nothing from attention weights and hidden layers: the paper's code does.
"""

import numpy as np

from models.convert import resnet
from models.convert.family import Family, Rule, heads, linear, norm
from models.resnet import ResNet

FIELDS = {
    "num_queries": ("num_queries", 100),
    "encoder_layers": ("depth", 6),
    "decoder_layers": ("decoder_depth", 6),
    "d_model": ("width", 256),
    "encoder_attention_heads": ("num_heads", 8),
    "decoder_attention_heads": ("num_heads", 8),
    "encoder_ffn_dim": ("hidden", 2048),
    "decoder_ffn_dim": ("hidden", 2048),
    "activation_function": ("activation", "relu"),
    "dropout": ("dropout", 0.1),
}


def _attention(reference, ours):
    parts = [
        rule for name in ("query", "key", "value") for rule in heads(f"{reference}.{name[0]}_proj", f"{ours}/{name}")
    ]
    return parts + linear(f"{reference}.out_proj", f"{ours}/out", "D (H C) -> H C D")


def _block(reference, ours):
    return [
        *_attention(f"{reference}.self_attn", f"{ours}/attention"),
        *norm(f"{reference}.self_attn_layer_norm", f"{ours}/attention_norm"),
        *linear(f"{reference}.fc1", f"{ours}/mlp/up"),
        *linear(f"{reference}.fc2", f"{ours}/mlp/down"),
        *norm(f"{reference}.final_layer_norm", f"{ours}/mlp_norm"),
    ]


def _rules(model):
    decoder, ours = "model.decoder.layers.*", "decoder_stack/layers"
    return [
        *resnet.backbone(model.backbone, "model.backbone.conv_encoder.model.", "backbone/"),
        *linear("model.input_projection", "projection", "D E 1 1 -> E D"),
        Rule("model.query_position_embeddings.weight", "queries/table"),
        *_block("model.encoder.layers.*", "encoder_stack/layers"),
        *_block(decoder, ours),
        *_attention(f"{decoder}.encoder_attn", f"{ours}/cross_attention"),
        *norm(f"{decoder}.encoder_attn_layer_norm", f"{ours}/cross_attention_norm"),
        *norm("model.decoder.layernorm", "decoder_norm"),
        *linear("class_labels_classifier", "classifier"),
        *(rule for i in range(3) for rule in linear(f"bbox_predictor.layers.{i}", f"box_{i}")),
    ]


def _settings(config, architecture, names):
    found = config.get("backbone_config") or {}
    for name, value in ({"model_type": "resnet"} | resnet.FAMILY.fixed).items():
        if found.get(name, value if name != "model_type" else None) != value:
            raise ValueError(f"backbone_config has {name} {found.get(name)!r}: it must be {value!r}.")
    own = {setting: found.get(name, default) for name, (setting, default) in resnet.FAMILY.fields.items()}
    backbone = ResNet(**resnet.FAMILY.settings(found, "ResNetModel", names), **own, frozen=True)
    return {"backbone": backbone, "num_classes": config.get("num_labels", len(config.get("id2label", "01")))}


def _config(model):
    if not isinstance(model.backbone, ResNet) or model.backbone.norm != "batch" or model.placement != "post":
        raise ValueError("`transformers` has a DETR with a ResNet's batch norm and placement='post' alone.")
    backbone, labels = resnet.FAMILY.config(model.backbone), [f"LABEL_{label}" for label in range(model.num_classes)]
    own = {name: getattr(model.backbone, setting) for name, (setting, _) in resnet.FAMILY.fields.items()}
    hidden = model.hidden or 8 * model.width
    return {
        "architectures": list(FAMILY.architectures),
        "backbone_config": backbone
        | own
        | {"model_type": "resnet", "out_features": [f"stage{len(model.backbone.depths)}"]},
        "decoder_layers": model.decoder_depth or model.depth,
        "encoder_ffn_dim": hidden,
        "decoder_ffn_dim": hidden,
        "id2label": dict(enumerate(labels)),
        "label2id": {name: label for label, name in enumerate(labels)},
    }


FAMILY = Family(
    model="detr",
    architectures=("DetrForObjectDetection",),
    prefix="",
    fields=FIELDS,
    fixed={"position_embedding_type": "sine", "dilation": False},
    sizes={"H": "num_heads"},
    example=lambda model: np.zeros((1, 64, 64, model.channels), np.float32),
    rules=_rules,
    config=_config,
    settings=_settings,
    ignored=r".*\.num_batches_tracked",
)
