"""Types of the fields of architectures: choices, and numbers with a range."""

from typing import Annotated, Literal

from jaxtyping import Array, Float

from lineage.configs.registry import Range

Image = Float[Array, "B height width channels"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]  # the names of `layers.mlp.ACTIVATIONS`
Implementation = Literal["auto", "portable", "dense"]  # the names of `layers.attention.IMPLEMENTATIONS`
Count = Annotated[int, Range(1)]
Counts = Annotated[tuple[int, ...], Range(1)]
Size = Annotated[int | None, Range(1)]
Natural = Annotated[int, Range(0)]
Rate = Annotated[float, Range(0, below=1)]
