"""DETR: `DetrForObjectDetection` with a ResNet as its backbone, by a `ResNetConfig` or, in old files, by timm's name.

The dropout rates are the same, but the reference, unlike the paper's code, has no dropout on attention weights and
hidden layers. With `auxiliary_loss`, the reference normalizes the input of each decoder layer; ours does not.
"""

import re

import numpy as np

from lineage.models.convert import bart
from lineage.models.convert.family import FAMILIES, Family, Rule, labels, linear, norm, num_labels, register
from lineage.models.resnet import ResNet


@register("detr")
class DETR(Family):
    model = "detr"
    architectures = ("DetrForObjectDetection",)
    fields = {
        "num_queries": ("num_queries", 100),
        "encoder_layers": ("depth", 6),
        "decoder_layers": ("decoder_depth", 6),
        "d_model": ("width", 256),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), ("num_heads", 8)),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), ("mlp_dim", 2048)),
        "activation_function": ("activation", "relu"),
        "dropout": ("dropout", 0.1),
    }
    synonyms = bart.SYNONYMS
    fixed = {"position_embedding_type": "sine", "dilation": False, "auxiliary_loss": False}
    unread = r".*\.num_batches_tracked"

    def example(self, model):
        return (np.zeros((1, 64, 64, model.channels), np.float32),)

    def rules(self, model):
        return [
            *FAMILIES["resnet"].backbone(model.backbone, "model.backbone.conv_encoder.model.", "backbone/"),
            *linear("model.input_projection", "projection", "D E 1 1 -> E D"),
            Rule("model.query_position_embeddings.weight", "queries/table"),
            *bart.layers(),
            *norm("model.decoder.layernorm", "decoder_norm"),
            *linear("class_labels_classifier", "classifier"),
            *(rule for i in range(3) for rule in linear(f"bbox_predictor.layers.{i}", f"box_{i}")),
        ]

    def settings(self, config, architecture, names):
        return {"backbone": _backbone(config, names), "num_classes": num_labels(config, architecture)}

    def config(self, model):
        backbone, family = model.backbone, FAMILIES["resnet"]
        if not isinstance(backbone, ResNet) or backbone.norm != "batch" or model.norm_placement != "post":
            raise ValueError("`transformers` has DETR only with a ResNet with batch norm and norm_placement 'post'.")
        fields = {name: getattr(backbone, setting) for name, (setting, _) in family.fields.items()}
        fields |= {"model_type": "resnet", "out_features": [f"stage{len(backbone.depths)}"]}
        return {"backbone_config": family.config(backbone) | fields, **labels(model)}

    def other(self, name):
        """Return timm's name of a tensor of the backbone: `layer1.0.conv2.weight`, `layer1.0.downsample.1.weight`..."""
        layers = r"(?:embedder\.embedder|encoder\.stages\.(\d+)\.layers\.(\d+)\.(?:layer\.(\d+)|shortcut))"
        match = re.fullmatch(rf"(.+\.conv_encoder\.model\.){layers}\.(convolution|normalization)(\..+)", name)
        if not match:
            return name
        start, stage, block, layer, kind, end = match.groups()
        part = f"{'conv' if kind == 'convolution' else 'bn'}{int(layer or 0) + 1}"
        if stage and not layer:
            part = f"downsample.{int(kind == 'normalization')}"
        return start + (f"layer{int(stage) + 1}.{block}." if stage else "") + part + end


def _backbone(config, names):
    described, family = config.get("backbone_config") or {}, FAMILIES["resnet"]
    if (stride := described.get("output_stride")) not in (None, 32):
        raise ValueError(f"backbone_config has output_stride {stride!r}: it must be 32, without dilation.")
    if described.get("model_type", "timm_backbone") == "timm_backbone":
        name = (described or config).get("backbone") or "resnet50"
        if not name.startswith("resnet") or name[6:] not in ("18", "50", "101"):
            raise ValueError(f"backbone is {name!r}: it must be resnet18, resnet50 or resnet101.")
        backbone = ResNet(num_classes=0, **ResNet.VARIANTS[name[6:]], frozen=True)
        _check_last(described or config.get("backbone_kwargs") or {}, len(backbone.depths))
        return backbone
    for name, value in ({"model_type": "resnet"} | family.fixed).items():
        if described.get(name, value) != value:
            raise ValueError(f"backbone_config has {name} {described.get(name)!r}: it must be {value!r}.")
    settings = {setting: described.get(name, default) for name, (setting, default) in family.fields.items()}
    settings = {setting: tuple(value) if isinstance(value, list) else value for setting, value in settings.items()}
    _check_last(described, len(settings["depths"]))
    return ResNet(**family.settings(described, "ResNetModel", names), **settings, frozen=True)


def _check_last(described, stages):
    """Raise ValueError if the last of the feature maps that a backbone returns is not that of its last stage."""
    for name, last in (("out_features", f"stage{stages}"), ("out_indices", stages)):
        if (given := described.get(name)) and given[-1] not in (last, -1):
            raise ValueError(f"backbone_config has {name} {given}: the last must be {last!r}.")
