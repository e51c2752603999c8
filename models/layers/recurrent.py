"""Recurrent networks: cells that update a state with every token, in one compiled loop over time.

A state is a tuple of arrays [B, D], the first of which is the output. The order of the gates is PyTorch's.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lineage.models.layers.dropout import Dropout
from lineage.models.layers.linear import Linear

State = tuple[Float[Array, "B _"], ...]


def rnn(state: State, x: Float[Array, "B F"], h: Float[Array, "B F"]) -> State:
    """Return tanh(x + h) (Elman 1990); here and below, x and h are the projections of the input and the state."""
    return (jnp.tanh(x + h),)


def gru(state: State, x: Float[Array, "B F"], h: Float[Array, "B F"]) -> State:
    """Return the next state of a gated recurrent unit (arXiv 1406.1078, appendix A; 1412.3555).

    The reset gate multiplies the state's projection, its bias included, as in cuDNN.
    """
    x, h = jnp.split(x, 3, axis=-1), jnp.split(h, 3, axis=-1)
    reset, update = jax.nn.sigmoid(x[0] + h[0]), jax.nn.sigmoid(x[1] + h[1])
    return ((1 - update) * jnp.tanh(x[2] + reset * h[2]) + update * state[0],)


def lstm(state: State, x: Float[Array, "B F"], h: Float[Array, "B F"], clip: float = 0.0) -> State:
    """Return the next output and memory of an LSTM (Hochreiter and Schmidhuber 1997; Gers et al. 2000).

    `clip` limits the absolute values of the memory; 0: no limit.
    """
    input_gate, forget_gate, new, output_gate = jnp.split(x + h, 4, axis=-1)
    memory = jax.nn.sigmoid(forget_gate) * state[1] + jax.nn.sigmoid(input_gate) * jnp.tanh(new)
    memory = clipped(memory, clip)
    return jax.nn.sigmoid(output_gate) * jnp.tanh(memory), memory


def clipped(x: Float[Array, "B D"], limit: float) -> Float[Array, "B D"]:
    """Return x with absolute values of at most `limit`; 0: no limit."""
    return jnp.clip(x, -limit, limit) if limit else x


# function, number of projections, number of arrays in a state
CELLS = {"rnn": (rnn, 1, 1), "gru": (gru, 3, 1), "lstm": (lstm, 4, 2)}
Kind = Literal[*CELLS]


class Cell(nn.Module):
    """Recurrent cell: `cell(state, cell.project(x))` is the state after a token x.

    Attributes:
        kind: "rnn", "gru" or "lstm".
        width: width of the state, D.
        projection: for an LSTM, project the output to this width before it is returned and used in the next step
            (arXiv 1402.1128); None disables it.
        clip: for an LSTM, limit of the absolute values of memories and of projected outputs; 0: no limit.
    """

    kind: Kind
    width: int
    projection: int | None = None
    clip: float = 0.0

    def setup(self):
        equations, gates, _ = CELLS[self.kind]
        self.equations = partial(equations, clip=self.clip) if self.kind == "lstm" else equations
        init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.input = Linear((gates * self.width,))
        self.recurrent = Linear((gates * self.width,), use_bias=self.kind == "gru", kernel_init=init)
        if self.projection:
            self.output = Linear((self.projection,), use_bias=False, kernel_init=init)

    def project(self, x: Float[Array, "*B E"]) -> Float[Array, "*B F"]:
        """Project the inputs of any number of tokens at once."""
        return self.input(x)

    def __call__(self, state: State, x: Float[Array, "B F"]) -> State:
        new = self.equations(state, x, self.recurrent(state[0]))
        return (clipped(self.output(new[0]), self.clip), *new[1:]) if self.projection else new

    def zeros(self, like: Float[Array, "B ..."]) -> State:
        """Return the state before the first token, with the batch size and the dtype of an array."""
        sizes = (self.projection or self.width, self.width)[: CELLS[self.kind][2]]
        return tuple(jnp.zeros((like.shape[0], size), like.dtype) for size in sizes)


def held(mask: Bool[Array, "B"] | None, new, old):
    """Return the new state of sequences where the mask is True, and the old state of the others."""
    if mask is None:
        return new
    return jax.tree.map(lambda new, old: jnp.where(mask[:, None], new, old), new, old)


class Layer(nn.Module):
    """Recurrent layer of one direction; `cell` is a constructor, such as `partial(Cell, "gru", 256)`."""

    cell: Callable[..., Cell]
    reverse: bool = False  # whether to go from the last token to the first

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T E"], *, mask: Bool[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T D"], State]:
        """Return the output after each token, and the final state; tokens where the mask is False do not change it."""
        cell = self.cell(name="cell")

        def step(cell, state, inputs):
            x, real = inputs
            state = held(real, cell(state, x), state)
            return state, state[0]

        axes = {"in_axes": 1, "out_axes": 1, "reverse": self.reverse}
        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, **axes)
        state, out = scan(cell, cell.zeros(x), (cell.project(x), mask))
        return out, state


class Recurrent(nn.Module):
    """Stack of recurrent layers, each of one direction or of both, whose outputs are concatenated.

    Attributes:
        kind, width: see `Cell`.
        depth: number of layers, L.
        bidirectional: whether each layer has a second cell, which goes from the last token to the first.
        dropout: rate between layers (arXiv 1409.2329).
    """

    kind: Kind
    width: int
    depth: int = 1
    bidirectional: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self, x: Float[Array, "B S E"], *, mask: Bool[Array, "B S"] | None = None
    ) -> tuple[Float[Array, "B S D"], list[State]]:
        """Return the last layer's outputs, with the directions concatenated, and the final states.

        States are ordered by layer, then by direction. Tokens where the mask is False do not change them.
        """
        cell = partial(Cell, self.kind, self.width)
        directions = ("forward", "backward") if self.bidirectional else ("forward",)
        ends = []
        for i in range(self.depth):
            x = Dropout(self.dropout if i else 0.0)(x)
            out = []
            for direction in directions:
                y, end = Layer(cell, reverse=direction == "backward", name=f"{direction}_{i}")(x, mask=mask)
                out.append(y)
                ends.append(end)
            x = jnp.concatenate(out, axis=-1)
            self.sow("intermediates", "hidden", x)
        return x, ends
