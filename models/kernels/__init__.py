"""Fast implementations, for some platforms, of what `models.layers` computes everywhere."""

import dataclasses

import flax.linen as nn


def without_kernels(model: nn.Module) -> nn.Module:
    """Return the model with attention that every platform can compute, for programs that are to run on any of them."""
    fields = {field.name for field in dataclasses.fields(model)}
    return model.clone(attend="auto") if "attend" in fields else model
