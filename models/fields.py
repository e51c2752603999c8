"""Types of the fields of architectures (choices, and numbers with a range), and of their inputs and outputs."""

from typing import Annotated, Literal

from jaxtyping import Array, Bool, Float, Int

from lineage.configs.registry import Count, Natural, Positive, Range, Rate  # noqa: F401 (for the architectures)
from lineage.models.layers.attention import IMPLEMENTATIONS
from lineage.models.layers.mlp import ACTIVATIONS

Image = Float[Array, "B height width channels"]
Tokens = Int[Array, "B T"]
Inputs = Int[Array, "B S"]  # tokens of an encoder
Positions = Int[Array, "#B T"]
TokensMask = Bool[Array, "B T"]  # True for real tokens
InputsMask = Bool[Array, "B S"]
Logits = Float[Array, "B T V"]
Activation = Literal[*ACTIVATIONS]
Implementation = Literal[*IMPLEMENTATIONS]
Counts = Annotated[tuple[int, ...], Range(1)]
Size = Annotated[int | None, Range(1)]
Naturals = Annotated[tuple[int, ...], Range(0)]
Epsilon = Annotated[float, Range(0)]
