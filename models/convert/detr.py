"""DETR: `DetrForObjectDetection` with a `ResNetConfig` as its backbone's.

The reference's dropout is ours, but it drops nothing from attention weights and hidden layers: the paper's code does.
"""

import numpy as np

from models.convert import bart, resnet
from models.convert.family import Family, Rule, labels, linear, norm, num_labels
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


def _rules(model):
    return [
        *resnet.backbone(model.backbone, "model.backbone.conv_encoder.model.", "backbone/"),
        *linear("model.input_projection", "projection", "D E 1 1 -> E D"),
        Rule("model.query_position_embeddings.weight", "queries/table"),
        *bart.layers(),
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
    return {"backbone": backbone, "num_classes": num_labels(config)}


def _config(model):
    if not isinstance(model.backbone, ResNet) or model.backbone.norm != "batch" or model.placement != "post":
        raise ValueError("`transformers` has a DETR with a ResNet's batch norm and placement='post' alone.")
    backbone = resnet.FAMILY.config(model.backbone)
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
        **labels(model),
    }


FAMILY = Family(
    model="detr",
    architectures=("DetrForObjectDetection",),
    prefix="",
    fields=FIELDS,
    fixed={"position_embedding_type": "sine", "dilation": False},
    example=lambda model: np.zeros((1, 64, 64, model.channels), np.float32),
    rules=_rules,
    config=_config,
    settings=_settings,
    ignored=r".*\.num_batches_tracked",
)
