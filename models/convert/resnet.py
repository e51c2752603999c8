"""ResNet and BiT: `ResNetForImageClassification` <-> `norm="batch"`, `BitForImageClassification` <-> `norm="group"`.

`ResNetModel` and `BitModel` <-> `num_classes=0`.
"""

import numpy as np

from lineage.models.convert.family import Family, Rule, labels, linear, norm, num_labels, register

# Fields of Big Transfer and of the stem of hybrid ViTs, by our `padding`.
BITS = {
    "symmetric": {"layer_type": "preactivation", "global_padding": None, "embedding_dynamic_padding": False},
    "same": {"layer_type": "bottleneck", "global_padding": "SAME", "embedding_dynamic_padding": True},
}


def _conv(reference, ours):
    return [Rule(f"{reference}.weight", f"{ours}/kernel", "O I p q -> p q I O")]


def _blocks(model):
    """Yield the name of each block, our path, and whether its input is projected."""
    for stage, (depth, width) in enumerate(zip(model.depths, model.widths)):
        for i in range(depth):
            projected = not i and (stage > 0 or width != model.stem_width)
            yield f"encoder.stages.{stage}.layers.{i}", f"stages_{stage}_{i}", projected


@register("resnet")
class ResNet(Family):
    model = "resnet"
    architectures = ("ResNetForImageClassification", "ResNetModel")
    prefix = "resnet."
    fields = {
        "num_channels": ("channels", 3),
        "embedding_size": ("stem_width", 64),
        "depths": ("depths", (3, 4, 6, 3)),
        "hidden_sizes": ("widths", (256, 512, 1024, 2048)),
    }
    fixed = {"hidden_act": "relu", "downsample_in_first_stage": False, "downsample_in_bottleneck": False}
    kind = {"norm": "batch"}
    sizes = {}
    unread = r".*\.num_batches_tracked"

    def example(self, model):
        return (np.zeros((1, 64, 64, model.channels), np.float32),)

    def rules(self, model):
        if not model.num_classes:
            return self.backbone(model, "")
        return self.backbone(model, self.prefix) + linear("classifier.1", "classifier")

    def backbone(self, model, prefix: str, ours: str = "") -> list[Rule]:
        """Return the rules of all but the classifier, from tensors with a prefix to parameters under a path."""

        def layer(name, conv, our_norm):
            normalization = f"{prefix}{name}.normalization"
            return [
                *_conv(f"{prefix}{name}.convolution", f"{ours}{conv}"),
                *norm(normalization, f"{ours}{our_norm}"),
                Rule(f"{normalization}.running_mean", f"{ours}{our_norm}/mean"),
                Rule(f"{normalization}.running_var", f"{ours}{our_norm}/variance"),
            ]

        table = layer("embedder.embedder", "stem_conv", "outer_norm")
        for name, own, projected in _blocks(model):
            for i in range(2 + model.bottleneck):
                table += layer(f"{name}.layer.{i}", f"{own}/conv_{i}", f"{own}/norm_{i}")
            if projected:
                table += layer(f"{name}.shortcut", f"{own}/shortcut", f"{own}/shortcut_norm")
        return table

    def additional(self, names):
        """Return the counters of batches of the batch normalizations, which the reference does not use."""
        ends = "running_mean", "num_batches_tracked"
        return {name.replace(*ends): np.zeros((), np.int64) for name in names if name.endswith(ends[0])}

    def settings(self, config, architecture, names):
        bottleneck = config.get("layer_type") != "basic"
        return {"num_classes": num_labels(config, architecture), "bottleneck": bottleneck}

    def config(self, model):
        known = not model.preactivation and model.padding == "symmetric"
        if model.norm == "group":
            known = model.bottleneck and model.preactivation == (model.padding == "symmetric")
        if not known or model.stem != "imagenet" or model.epsilon != 1e-5:
            resnets = "ResNets with norm 'batch', padding 'symmetric' and no preactivation"
            bits = "BiTs with norm 'group', bottlenecks, and either preactivation or padding 'same'"
            both = "both with the stem 'imagenet' and epsilon 1e-5"
            raise ValueError(f"`transformers` has only {resnets}, and {bits}, {both}.")
        architectures = [self.architectures[not model.num_classes]]
        kind = "bottleneck" if model.bottleneck else "basic"
        return {"architectures": architectures, **labels(model), "layer_type": kind}


@register("bit")
class BiT(ResNet):
    architectures = ("BitForImageClassification", "BitModel")
    prefix = "bit."
    fields = ResNet.fields | {"num_groups": ("groups", 32)}
    fixed = {"hidden_act": "relu", "output_stride": 32, "width_factor": 1, "drop_path_rate": 0.0}
    kind = {"norm": "group"}

    def backbone(self, model, prefix):
        outer = "norm" if model.preactivation else "embedder.norm"
        table = _conv(f"{prefix}embedder.convolution", "stem_conv") + norm(f"{prefix}{outer}", "outer_norm")
        for name, own, projected in _blocks(model):
            for i in range(3):
                table += _conv(f"{prefix}{name}.conv{i + 1}", f"{own}/conv_{i}")
                table += norm(f"{prefix}{name}.norm{i + 1}", f"{own}/norm_{i}")
            if projected:
                table += _conv(f"{prefix}{name}.downsample.conv", f"{own}/shortcut")
                if not model.preactivation:
                    table += norm(f"{prefix}{name}.downsample.norm", f"{own}/shortcut_norm")
        return table

    def settings(self, config, architecture, names):
        given = {name: config.get(name, default) for name, default in BITS["symmetric"].items()}
        if given not in BITS.values():
            raise ValueError(f"BiT with {given} is not supported: it must have one of {list(BITS.values())}.")
        padding = next(padding for padding, fields in BITS.items() if fields == given)
        settings = {"preactivation": padding == "symmetric", "padding": padding}
        return super().settings(config, architecture, names) | settings

    def config(self, model):
        config = super().config(model)
        # The reference rounds the widths within blocks to multiples of 8, and always projects the input of the first.
        if any(width % 32 for width in model.widths) or model.widths[0] == model.stem_width:
            given = f"widths is {model.widths} and stem_width {model.stem_width}"
            needed = "multiples of 32 as the widths of a BiT, and a first width other than stem_width"
            raise ValueError(f"{given}: `transformers` needs {needed}.")
        return config | BITS[model.padding]
