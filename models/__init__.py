"""The architectures, by name."""

import dataclasses
import difflib

import flax.linen as nn

from models import gpt, vit

# name -> (class, variants)
MODELS = {
    "gpt": (gpt.GPT, gpt.VARIANTS),
    "vit": (vit.ViT, vit.VARIANTS),
}


def build(name: str, variant: str | None = None, **kwargs) -> nn.Module:
    """A model by its name; `variant` (a row of its file's `VARIANTS`) gives what `kwargs` do not.

    A keyword whose value is None counts as not given.

    Raises:
        ValueError: the name, the variant or a keyword is unknown; the message names the nearest one.
    """
    model, variants = MODELS[_known(name, MODELS, "model")]
    settings = dict(variants[_known(variant, variants, f"variant of {name}")]) if variant else {}
    fields = [field.name for field in dataclasses.fields(model) if field.name not in ("parent", "name")]
    for key, value in kwargs.items():
        if value is not None:
            settings[_known(key, fields, f"setting of {name}")] = value
    return model(**settings)


def _known(value, allowed, what):
    if value in allowed:
        return value
    nearest = difflib.get_close_matches(str(value), list(allowed), n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown {what} {value!r}: it is one of {', '.join(allowed)}.{hint}")
