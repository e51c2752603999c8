"""DeiT: `DeiTForImageClassificationWithTeacher` <-> `DeiT`."""

from dataclasses import replace

from models.convert import vit
from models.convert.family import Rule, labels, linear, num_labels
from models.convert.vit import encoder, make_square, refuse_others


def _rules(model):
    return [
        *encoder("deit."),
        Rule("deit.embeddings.distillation_token", "distillation_token", "1 1 D -> D"),
        Rule("deit.embeddings.position_embeddings", "table/table", "1 P D -> P D"),
        *linear("cls_classifier", "classifier"),
        *linear("distillation_classifier", "distillation_classifier"),
    ]


def _settings(config, architecture, names):
    make_square(config)
    return {"num_classes": num_labels(config)}


def _config(model):
    refuse_others(model)
    if not model.num_classes:
        raise ValueError("num_classes is 0: `transformers` has no DeiT with two tokens and no classes.")
    return {
        "architectures": ["DeiTForImageClassificationWithTeacher"],
        **labels(model),
        "intermediate_size": model.hidden or 4 * model.width,
        "encoder_stride": model.patch_size,
    }


FAMILY = replace(
    vit.FAMILY,
    model="deit",
    architectures=("DeiTForImageClassificationWithTeacher",),
    prefix="deit.",
    rules=_rules,
    config=_config,
    settings=_settings,
)
