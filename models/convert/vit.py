"""ViT, I-JEPA, DeiT and MAE.

ViT: `ViTForImageClassification` <-> a class token and a linear head; `ViTModel` <-> `num_classes=0`, and its pooler is
the tanh layer of the pre-training head, `head="mlp"`. I-JEPA, a ViT that averages its patches:
`IJepaForImageClassification`; `IJepaModel` <-> `num_classes=0`. DeiT: `DeiTForImageClassificationWithTeacher`, or
`DeiTForImageClassification` <-> `distillation_head=False`.

Tensor names are those in files, not those of the modules in memory. Dropout rates are the same, but the reference has
no dropout inside the MLP.
"""

from typing import ClassVar

import flax.linen as nn
import numpy as np

from lineage.models.convert.family import ENCODER, ImageFamily, Rule, block, labels, linear, norm, num_labels, register
from lineage.models.layers.position import sincos_2d


def layers(reference: str, ours: str, attention: str = "attention", **options) -> list[Rule]:
    """Return the rules of a stack of blocks, as in ViT and Swin; `options` are those of `block`."""
    return block(
        f"{reference}.*.",
        ours,
        attended=(*(f"attention.{attention}.{part}" for part in ("query", "key", "value")), "attention.output.dense"),
        mlp=("intermediate.dense", "output.dense"),
        norms=("layernorm_before", "layernorm_after"),
        **options,
    )


def encoder(body: str, class_token: bool = True) -> list[Rule]:
    """Return the rules of all parameters but positions and heads; `body` is the prefix of the tensors."""
    first = [Rule(f"{body}embeddings.cls_token", "class_token", "1 1 D -> D")] if class_token else []
    return [
        *first,
        *linear(f"{body}embeddings.patch_embeddings.projection", "patch_embed/projection", "D c p q -> (p q c) D"),
        *layers(f"{body}encoder.layer", "stack/layers"),
        *norm(f"{body}layernorm", "norm"),
    ]


def make_square(config: dict) -> None:
    """Replace sizes given as two equal numbers by one number, in place."""
    for field in ("image_size", "patch_size"):
        size = config.get(field)
        if isinstance(size, list) and len(set(size)) == 1:
            config[field] = size[0]


def check_supported(model: nn.Module, position: str = "1d", pooling: str = "token", **kind) -> None:
    """Raise ValueError for a model that `transformers` does not have."""
    allowed = {"position": position, "pooling": pooling, "head": "linear"}
    allowed |= {"num_registers": 0, "layer_scale": 0.0, "qk_norm": False, "hybrid": ()}
    kind = {name: getattr(model, name) for name in allowed} | kind
    wrong = {name: value for name, value in kind.items() if value != allowed[name]}
    if wrong:
        needed = {name: allowed[name] for name in wrong}
        raise ValueError(f"`transformers` has no {type(model).__name__} with {wrong}: it must have {needed}.")


@register("vit")
class ViT(ImageFamily):
    model = "vit"
    architectures = ("ViTForImageClassification", "ViTModel")
    prefix = "vit."
    fields = {
        "image_size": ("image_size", 224),
        "patch_size": ("patch_size", 16),
        "num_channels": ("channels", 3),
        **ENCODER,
        "hidden_dropout_prob": ("dropout", 0.0),
        "attention_probs_dropout_prob": ("attention_dropout", 0.0),
    }
    fixed = {"qkv_bias": True}
    class_token = True

    def rules(self, model):
        pooled = self._has_pooler(model)
        body = "" if pooled or model.pooling == "tokens" else self.prefix
        table = encoder(body, self.class_token)
        table.append(Rule(f"{body}embeddings.position_embeddings", "table/table", "1 P D -> P D"))
        if model.num_classes:
            return table + linear("classifier", "classifier")
        return table + linear("pooler.dense", "pre_logits") if pooled else table

    def settings(self, config, architecture, names):
        make_square(config)
        if not architecture.endswith("Model"):
            return {"num_classes": num_labels(config, architecture)}
        pooler = "pooler.dense.weight" in names
        if pooler and config.get("pooler_act", "tanh") != "tanh":
            raise ValueError(f"pooler_act is {config['pooler_act']!r}: it must be 'tanh'.")
        return {"num_classes": 0, "head": "mlp" if pooler else "linear"}

    def fits(self, model):
        return model.pooling not in IJepa.POOLING

    def config(self, model):
        check_supported(model, head=model.head if model.num_classes else "linear")
        return self.written(model, self.architectures[1 if self._has_pooler(model) else 0])

    def written(self, model, architecture: str) -> dict:
        """Return the fields of `config.json` of a class in `transformers`."""
        return {"architectures": [architecture], **labels(model), "encoder_stride": model.patch_size}

    def _has_pooler(self, model):
        return model.head == "mlp" and not model.num_classes


@register("ijepa")
class IJepa(ViT):
    """ViT without a class token: `IJepaForImageClassification` averages the patches, `IJepaModel` has no classes."""

    architectures = ("IJepaForImageClassification", "IJepaModel")
    prefix = "ijepa."
    class_token = False
    POOLING: ClassVar = {"gap": "IJepaForImageClassification", "tokens": "IJepaModel"}

    def settings(self, config, architecture, names):
        make_square(config)
        pooling = "tokens" if architecture.endswith("Model") else "gap"
        return {"num_classes": num_labels(config, architecture), "pooling": pooling}

    def fits(self, model):
        return model.pooling in self.POOLING

    def config(self, model):
        check_supported(model, pooling="gap" if model.num_classes else "tokens")
        return self.written(model, self.POOLING[model.pooling])


@register("deit")
class DeiT(ViT):
    model = "deit"
    architectures = ("DeiTForImageClassificationWithTeacher", "DeiTForImageClassification")
    prefix = "deit."

    def rules(self, model):
        table = [
            *encoder("deit."),
            Rule("deit.embeddings.distillation_token", "distillation_token", "1 1 D -> D"),
            Rule("deit.embeddings.position_embeddings", "table/table", "1 P D -> P D"),
        ]
        if not model.distillation_head:
            return table + linear("classifier", "classifier")
        teacher = linear("distillation_classifier", "distillation_classifier")
        return table + linear("cls_classifier", "classifier") + teacher

    def settings(self, config, architecture, names):
        teacher = architecture.endswith("WithTeacher")
        return super().settings(config, architecture, names) | {"distillation_head": teacher}

    def config(self, model):
        check_supported(model)
        if not model.num_classes:
            raise ValueError("num_classes is 0: `transformers` has no DeiT with two tokens and no classes.")
        return self.written(model, self.architectures[0 if model.distillation_head else 1])


@register("vit_mae")
class ViTMAE(ImageFamily):
    """Masked autoencoder: `ViTMAEForPreTraining` <-> `MAE`; `ViTMAEModel` <-> `decoder_depth=0`.

    Its sine-cosine tables are in the files, but are not parameters. For images of another size, the reference
    interpolates the decoder's table along the sequence of patches, ours along the rows and columns of the grid.
    """

    model = "mae"
    architectures = ("ViTMAEForPreTraining", "ViTMAEModel")
    prefix = "vit."
    fields = ViT.fields | {
        "decoder_hidden_size": ("decoder_width", 512),
        "decoder_num_attention_heads": ("decoder_num_heads", 16),
        "decoder_intermediate_size": ("decoder_mlp_dim", 2048),
        "mask_ratio": ("mask_rate", 0.75),
        "norm_pix_loss": ("normalized", False),
    }
    fixed = ViT.fixed
    sizes = ImageFamily.sizes | {"K": "decoder_num_heads"}

    def example(self, model):
        return *super().example(model), np.zeros((1, model.side**2), np.float32)

    def rules(self, model):
        if not model.decoder_depth:
            return encoder("")
        return [
            *encoder("vit."),
            *linear("decoder.decoder_embed", "decoder_embed"),
            Rule("decoder.mask_token", "mask_token", "1 1 D -> D"),
            *layers("decoder.decoder_encoder.layer", "decoder_stack/layers", h="K"),
            *norm("decoder.decoder_norm", "decoder_norm"),
            *linear("decoder.decoder_pred", "decoder_head"),
        ]

    def constants(self, model):
        names = {"vit.embeddings.position_embeddings": model.width, "decoder.decoder_pos_embed": model.decoder_width}
        if not model.decoder_depth:
            names = {"embeddings.position_embeddings": model.width}
        side = model.side
        return {name: np.pad(sincos_2d(side, side, width), ((1, 0), (0, 0)))[None] for name, width in names.items()}

    def settings(self, config, architecture, names):
        make_square(config)
        depth = 0 if architecture == "ViTMAEModel" else config.get("decoder_num_hidden_layers", 8)
        return {"decoder_depth": depth}

    def config(self, model):
        check_supported(model, position="mae")
        if model.num_classes:
            raise ValueError(f"num_classes is {model.num_classes}: `transformers` has no MAE with classes.")
        return {
            "architectures": [self.architectures[0 if model.decoder_depth else 1]],
            "decoder_num_hidden_layers": model.decoder_depth,
            "decoder_intermediate_size": model.decoder_mlp_dim or 4 * model.decoder_width,
        }
