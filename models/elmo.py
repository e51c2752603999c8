"""ELMo (arXiv 1802.05365) on tokens: language models of both directions, whose layers are all features."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lineage.configs.registry import Range
from lineage.models.base import MODELS, HiddenStates, Layers, Model
from lineage.models.fields import Count, Logits, Rate, Tokens, TokensMask
from lineage.models.layers import Cell, Dropout, Embed, Layer, Linear


@MODELS.register("elmo")
class ELMo(Model):
    """Two stacks of LSTMs over the same tokens' vectors, one reading forward and one backward, with one output layer.

    Attributes:
        depth: number of LSTMs of each direction, L, with residual connections.
        width: size of the embeddings and of the output of each LSTM, D.
        cell_dim: size of the LSTMs' memories, F.
        clip: limit of the absolute values of the LSTMs' memories and outputs, 3 in the published models; 0: no limit.
        dropout: rate on the inputs of each LSTM and of the output layer.
    """

    VARIANTS: ClassVar = {  # sizes as published; there, the first layer was computed from characters
        "small": {"width": 128, "cell_dim": 1024},
        "medium": {"width": 256, "cell_dim": 2048},
        "original": {"width": 512, "cell_dim": 4096},
    }
    FROM_DATA = ("vocab_size",)

    vocab_size: Count
    depth: Count = 2
    width: Count = 512
    cell_dim: Count = 4096
    clip: Annotated[float, Range(0)] = 0.0
    dropout: Rate = 0.1

    outputs = ("both_directions",)

    @property
    def layer_groups(self) -> tuple[Layers, ...]:
        return tuple(Layers(f"forward_{i}", 1, stacked=False, first=f"^backward_{i}/") for i in range(self.depth))

    def states_from(self, sown: Mapping[str, Any]) -> HiddenStates:
        embedding, *layers = sown["layers"][0]
        return HiddenStates({"encoder": embedding}, {"encoder": tuple(layers)}, {})

    def setup(self):
        layer = partial(Layer, partial(Cell, "lstm", self.cell_dim, self.width, self.clip))
        self.embed = Embed(self.vocab_size, self.width)
        self.drop = Dropout(self.dropout)
        self.forward = [layer() for _ in range(self.depth)]
        self.backward = [layer(reverse=True) for _ in range(self.depth)]
        self.head = Linear((self.vocab_size,))

    def __call__(self, tokens: Tokens, *, mask: TokensMask | None = None) -> tuple[Logits, Logits]:
        """Return logits of the token after each one and of the one before, given the tokens on the other side.

        `mask` is True for real tokens; padding changes no state.
        """
        ahead, back = jnp.split(self.features(tokens, mask=mask)[-1], 2, axis=-1)
        return self.head(self.drop(ahead)), self.head(self.drop(back))

    def features(self, tokens: Tokens, *, mask: TokensMask | None = None) -> Float[Array, "layers B T features"]:
        """Return the embeddings and the outputs of the L layers, both directions concatenated."""
        ahead = back = self.embed(tokens)
        layers = [jnp.concatenate([ahead, back], axis=-1)]
        for i, (forward, backward) in enumerate(zip(self.forward, self.backward)):
            ahead, back = self._run(forward, ahead, mask, i), self._run(backward, back, mask, i)
            layers.append(jnp.concatenate([ahead, back], axis=-1))
        layers = jnp.stack(layers)
        self.sow("intermediates", "layers", layers)
        return layers

    def _run(self, layer, x, mask, i):
        out, _ = layer(self.drop(x), mask=mask)
        return x + out if i else out


class ScalarMix(nn.Module):
    """Learned mixture of a model's layers: gamma times their mean with softmax weights (equation 1)."""

    @nn.compact
    def __call__(self, layers: Float[Array, "L *B D"]) -> Float[Array, "*B D"]:
        weights = jax.nn.softmax(self.param("weights", nn.initializers.zeros, (len(layers),)))
        return self.param("gamma", nn.initializers.ones, ()) * jnp.einsum("L,L...->...", weights, layers)
