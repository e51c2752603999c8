"""The architectures, by name."""

import dataclasses
import difflib
from typing import Literal, get_args, get_origin

import flax.linen as nn

from lineage.models import (
    albert,
    bart,
    bert,
    bigbird,
    deit,
    detr,
    distilbert,
    electra,
    elmo,
    gpt,
    llama,
    mae,
    resnet,
    roberta,
    seq2seq,
    swin,
    t5,
    transformer,
    transformer_xl,
    vit,
)
from lineage.models.layers.mlp import ACTIVATIONS

# name -> (class, variants)
MODELS = {
    "albert": (albert.ALBERT, albert.VARIANTS),
    "bart": (bart.BART, bart.VARIANTS),
    "bert": (bert.BERT, bert.VARIANTS),
    "bigbird": (bigbird.BigBird, bigbird.VARIANTS),
    "deit": (deit.DeiT, deit.VARIANTS),
    "detr": (detr.DETR, detr.VARIANTS),
    "distilbert": (distilbert.DistilBERT, distilbert.VARIANTS),
    "electra": (electra.ELECTRA, electra.VARIANTS),
    "elmo": (elmo.ELMo, elmo.VARIANTS),
    "gpt": (gpt.GPT, gpt.VARIANTS),
    "llama": (llama.Llama, llama.VARIANTS),
    "mae": (mae.MAE, mae.VARIANTS),
    "resnet": (resnet.ResNet, resnet.VARIANTS),
    "roberta": (roberta.RoBERTa, roberta.VARIANTS),
    "seq2seq": (seq2seq.Seq2Seq, seq2seq.VARIANTS),
    "swin": (swin.Swin, swin.VARIANTS),
    "t5": (t5.T5, t5.VARIANTS),
    "transformer": (transformer.Transformer, transformer.VARIANTS),
    "transformer_xl": (transformer_xl.TransformerXL, transformer_xl.VARIANTS),
    "vit": (vit.ViT, vit.VARIANTS),
    "xlmr": (roberta.XLMR, roberta.VARIANTS),
}


def build(name: str, variant: str | None = None, **kwargs) -> nn.Module:
    """A model by its name; `variant` (a row of its file's `VARIANTS`) gives what `kwargs` do not.

    A keyword whose value is None counts as not given; one that is a dictionary is a model of its own.

    Raises:
        ValueError: the name, the variant, a keyword or one of its choices is unknown (the message names the nearest),
            or a keyword is missing.
    """
    model, variants = MODELS[_known(name, MODELS, "model")]
    settings = dict(variants[_known(variant, variants, f"variant of {name}")]) if variant else {}
    fields = {field.name: field.type for field in dataclasses.fields(model) if field.name not in ("parent", "name")}
    for key, value in kwargs.items():
        if isinstance(value, dict):
            value = settings.get(key, {}) | {k: v for k, v in value.items() if v is not None}
        if value is not None:
            settings[_known(key, fields, f"setting of {name}")] = value
    settings = {key: build(**value) if isinstance(value, dict) else value for key, value in settings.items()}
    for key, value in settings.items():
        choices = ACTIVATIONS if key == "activation" else _choices(fields[key])
        if choices:
            _known(value, choices, key)
    # Without a default both are MISSING.
    optional = {field.name for field in dataclasses.fields(model) if field.default is not field.default_factory}
    if missing := [key for key in fields if key not in settings and key not in optional]:
        raise ValueError(f"{name} needs {', '.join(missing)}: give it, or a variant of {', '.join(variants)}.")
    return model(**settings)


def _choices(kind):
    """What a type such as `Literal["dots", "full"] | None` allows; nothing where it is not of that sort."""
    return [choice for part in (kind, *get_args(kind)) if get_origin(part) is Literal for choice in get_args(part)]


def _known(value, allowed, what):
    if value in allowed:
        return value
    nearest = difflib.get_close_matches(str(value), list(allowed), n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown {what} {value!r}: it is one of {', '.join(allowed)}.{hint}")
