"""Swin and Swin V2: `SwinForImageClassification`, `Swinv2ForImageClassification` <-> `Swin`; `SwinModel`,
`Swinv2Model` <-> `num_classes=0`.

The dropout rates are the same, but the reference has no dropout inside the MLP, and the stochastic depth of its version
1 skips only attention, whereas ours and the paper's skip both sublayers.
"""

from lineage.models.convert.family import ImageFamily, Rule, labels, linear, norm, num_labels, register
from lineage.models.convert.vit import layers, make_square


@register("swin")
class Swin(ImageFamily):
    model = "swin"
    architectures = ("SwinForImageClassification", "SwinModel")
    prefix = "swin."
    fields = {
        "image_size": ("image_size", 224),
        "patch_size": ("patch_size", 4),
        "depths": ("depths", (2, 2, 6, 2)),
        "num_heads": ("num_heads", (3, 6, 12, 24)),
        "num_channels": ("channels", 3),
        "embed_dim": ("width", 96),
        "window_size": ("window", 7),
        "mlp_ratio": ("mlp_ratio", 4.0),
        "hidden_act": ("activation", "gelu"),
        "layer_norm_eps": ("epsilon", 1e-5),
        "drop_path_rate": ("stochastic_depth", 0.1),
        "hidden_dropout_prob": ("dropout", 0.0),
        "attention_probs_dropout_prob": ("dropout", 0.0),
    }
    synonyms = {"num_attention_heads": "num_heads"}
    fixed = {"qkv_bias": True, "use_absolute_embeddings": False}
    sizes = {"p": "patch_size", "q": "patch_size", "c": "channels"}
    kind = {"version": "v1"}
    unread = r".*\.relative_(position_index|coords_table)"  # in old files

    def rules(self, model):
        prefix, embed, second = self.prefix, f"{self.prefix}embeddings.", model.version == "v2"
        table = [
            *linear(f"{embed}patch_embeddings.projection", "patch_embed/projection", "D c p q -> (p q c) D"),
            *norm(f"{embed}norm", "embed_norm"),
            *norm(f"{prefix}layernorm", "norm"),
        ]
        for stage, number in enumerate(model.num_heads):
            layer, ours = f"{prefix}encoder.layers.{stage}.blocks", f"stacks_{stage}/layers"
            rules = layers(layer, ours, "self", h=number, inner="/attention")
            table += [rule for rule in rules if not second or not rule.ours.endswith("key/bias")]
            attention, target = f"{layer}.*.attention.self.", f"{ours}/attention/attention/"
            if second:
                bias = f"{attention}continuous_position_bias_mlp."
                table += [
                    Rule(f"{attention}logit_scale", f"{target}score/scale", "H 1 1 -> H 1"),
                    *linear(f"{bias}0", f"{target}relative/hidden"),
                    Rule(f"{bias}2.weight", f"{target}relative/out/kernel", "H F -> F H"),
                ]
            else:
                table.append(Rule(f"{attention}relative_position_bias_table", f"{target}relative/table"))
            if stage < len(model.depths) - 1:
                merge, ours = f"{prefix}encoder.layers.{stage}.downsample.", f"merges_{stage}/"
                table += [
                    Rule(f"{merge}reduction.weight", f"{ours}projection/kernel", "F D -> D F"),
                    *norm(f"{merge}norm", f"{ours}norm"),
                ]
        return table + (linear("classifier", "classifier") if model.num_classes else [])

    def settings(self, config, architecture, names):
        make_square(config)
        trained = config.get("pretrained_window_sizes", ())
        trained = tuple(trained) if any(trained) else ()
        return {"trained_windows": trained, "num_classes": num_labels(config, architecture)}

    def config(self, model):
        stages = len(model.depths)
        trained, stride = model.trained_windows or [0] * stages, model.patch_size * 2 ** (stages - 1)
        side = -(-model.image_size // stride)  # of the smallest feature map, in tokens
        if model.version == "v1" and side < model.window:  # the reference has one table of biases for all windows
            given = (
                f"window is {model.window}, but the last feature map of {model.image_size} pixels is {side} x {side}"
            )
            raise ValueError(f"{given} tokens: `transformers` needs windows that are not larger than a feature map.")
        return labels(model) | {"pretrained_window_sizes": trained, "encoder_stride": stride}


@register("swinv2")
class SwinV2(Swin):
    architectures = ("Swinv2ForImageClassification", "Swinv2Model")
    prefix = "swinv2."
    kind = {"version": "v2"}
