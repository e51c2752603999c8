"""Recurrent networks: a state that every token of a row changes, by one compiled loop over the time.

A state is a tuple of arrays [B, D], of which the first is what comes out. Gates are in PyTorch's order.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lineage.models.layers.linear import Linear

State = tuple[Float[Array, "B _"], ...]
Kind = Literal["rnn", "gru", "lstm"]


def rnn(state: State, x: Float[Array, "B F"], h: Float[Array, "B F"]) -> State:
    """tanh(x + h), where x is the input's and h the state's projection, here and below (Elman 1990)."""
    return (jnp.tanh(x + h),)


def gru(state: State, x: Float[Array, "B F"], h: Float[Array, "B F"]) -> State:
    """A new state and the old one in a proportion that is learned (arXiv 1406.1078, appendix A; 1412.3555).

    The reset gate stands before the state's projection, its bias included, as in cuDNN.
    """
    x, h = jnp.split(x, 3, axis=-1), jnp.split(h, 3, axis=-1)
    reset, update = jax.nn.sigmoid(x[0] + h[0]), jax.nn.sigmoid(x[1] + h[1])
    return ((1 - update) * jnp.tanh(x[2] + reset * h[2]) + update * state[0],)


def lstm(state: State, x: Float[Array, "B F"], h: Float[Array, "B F"]) -> State:
    """A memory that is added to and forgotten from (Hochreiter and Schmidhuber 1997; Gers et al. 2000)."""
    write, forget, new, read = jnp.split(x + h, 4, axis=-1)
    memory = jax.nn.sigmoid(forget) * state[1] + jax.nn.sigmoid(write) * jnp.tanh(new)
    return jax.nn.sigmoid(read) * jnp.tanh(memory), memory


CELLS = {"rnn": (rnn, 1, 1), "gru": (gru, 3, 1), "lstm": (lstm, 4, 2)}  # projections; arrays in a state


class Cell(nn.Module):
    """One token's step: `cell(state, cell.project(x))` is the next state.

    Attributes:
        kind: "rnn", "gru" or "lstm".
        width: D, of the state.
        projection: of an LSTM, what comes out and goes into the next step is the output projected to so few numbers
            (arXiv 1402.1128); None leaves it.
    """

    kind: Kind
    width: int
    projection: int | None = None

    def setup(self):
        self.equations, gates, _ = CELLS[self.kind]
        init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.input = Linear((gates * self.width,))
        self.recurrent = Linear((gates * self.width,), use_bias=self.kind == "gru", kernel_init=init)
        if self.projection:
            self.output = Linear((self.projection,), use_bias=False, kernel_init=init)

    def project(self, x: Float[Array, "*B E"]) -> Float[Array, "*B F"]:
        """What the inputs give to the step, of any number of tokens in one product."""
        return self.input(x)

    def __call__(self, state: State, x: Float[Array, "B F"]) -> State:
        new = self.equations(state, x, self.recurrent(state[0]))
        return (self.output(new[0]), *new[1:]) if self.projection else new

    def zeros(self, like: Float[Array, "B ..."]) -> State:
        """The state before the first token, for the rows and of the dtype of an array."""
        sizes = (self.projection or self.width, self.width)[: CELLS[self.kind][2]]
        return tuple(jnp.zeros((len(like), size), like.dtype) for size in sizes)


def held(mask: Bool[Array, "B"] | None, new, old):
    """The new state in the rows where the mask is True, in the others the old one."""
    if mask is None:
        return new
    return jax.tree.map(lambda new, old: jnp.where(mask[:, None], new, old), new, old)


class Layer(nn.Module):
    """A cell that goes through the tokens, from the last to the first if `reverse`.

    Attributes:
        cell: what makes it, such as `partial(Cell, "gru", 256)`.
        reverse: the direction.
    """

    cell: Callable[..., Cell]
    reverse: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T E"], *, mask: Bool[Array, "B T"] | None = None, state: State | None = None
    ) -> tuple[Float[Array, "B T D"], State]:
        """What comes out after each token, and the state at the end.

        Args:
            x: the inputs.
            mask: True = a real token; the others leave the state as it is.
            state: at the start; None is zeros.
        """
        cell = self.cell(name="cell")

        def step(cell, state, now):
            x, real = now
            state = held(real, cell(state, x), state)
            return state, state[0]

        axes = {"in_axes": 1, "out_axes": 1, "reverse": self.reverse}
        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, **axes)
        state, out = scan(cell, cell.zeros(x) if state is None else state, (cell.project(x), mask))
        return out, state


class Recurrent(nn.Module):
    """Layers of cells, each reading what comes out of the one below, in one direction or in both side by side.

    Attributes:
        kind, width, projection: of each cell.
        depth: L.
        bidirectional: each layer has a second cell, which goes from the last token to the first.
        dropout: rate between layers (arXiv 1409.2329).
    """

    kind: Kind
    width: int
    depth: int = 1
    bidirectional: bool = False
    projection: int | None = None
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self, x: Float[Array, "B S E"], *, mask: Bool[Array, "B S"] | None = None, states: list[State] | None = None
    ) -> tuple[Float[Array, "B S D"], list[State]]:
        """What comes out of the last layer, both directions side by side, and the states at the end.

        Args:
            x: the inputs.
            mask: True = a real token; the others change no state.
            states: at the start: of the first layer's directions, then of the next one's; None is zeros.
        """
        cell = partial(Cell, self.kind, self.width, self.projection)
        directions = ("forward", "backward") if self.bidirectional else ("forward",)
        ends = []
        for i in range(self.depth):
            x = nn.Dropout(self.dropout, deterministic=not (i and self.has_rng("dropout")))(x)
            out = []
            for direction in directions:
                layer = Layer(cell, reverse=direction == "backward", name=f"{direction}_{i}")
                y, end = layer(x, mask=mask, state=states[len(ends)] if states else None)
                out.append(y)
                ends.append(end)
            x = jnp.concatenate(out, axis=-1)
            self.sow("intermediates", "hidden", x)
        return x, ends
