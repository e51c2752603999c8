"""Recurrent sequence-to-sequence models, without attention (arXiv 1409.3215, 1406.1078) and with it.

Without attention, the decoder starts from the last state of the encoder, which is also an input of every step. With
attention, this input is a weighted mean of the states of the encoder: Bahdanau's weights depend on the previous state
of the decoder (arXiv 1409.0473), Luong's on the current state, which affects the next step (arXiv 1508.04025).
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from lineage.configs.registry import Needs
from lineage.models.base import MODELS, HiddenStates, Layers, Model
from lineage.models.fields import Count, Inputs, InputsMask, Logits, Rate, Size, Tokens, TokensMask
from lineage.models.layers import Additive, Dropout, Embed, Linear, Mask, Rows, States, Weighting, dense, dot_product
from lineage.models.layers.recurrent import CELLS, Cell, Kind, Recurrent, held

SCORES = "additive", "dot", "general", "concat"
LUONG = {"cell": "lstm", "depth": 4, "width": 1000, "bidirectional": False, "dropout": 0.2}


@struct.dataclass
class Annotations(Rows):
    """Memory of the decoder, computed once: the states of the encoder as keys and as values."""

    key: Float[Array, "B S C"]
    value: Float[Array, "B S E"]
    mask: InputsMask
    state: Any  # initial state of the decoder

    BY_ROW: ClassVar = ("key", "value", "state", "mask")


@MODELS.register("seq2seq")
class Seq2Seq(Model):
    """A recurrent encoder-decoder.

    Attributes:
        cell: kind of the recurrent cells.
        width: size of each state, D.
        embed_width: size of the embeddings; None: D.
        bidirectional: whether the encoder also reads backward; the decoder then starts from the backward states.
        attention: "additive" (Bahdanau's), "dot", "general", "concat" (Luong's), or "fixed": none.
        span: tokens that attention covers: "global" all, "monotonic" those around the output token's own position,
            "predictive" those around a predicted position (Luong's local-m and local-p).
        window: half the width of a local span, in tokens.
        dropout: dropout rate of embeddings, between layers and before the logits.
    """

    VARIANTS: ClassVar = {
        "rnnencdec": {"embed_width": 620, "bidirectional": False, "attention": "fixed"},  # the names of arXiv 1409.0473
        "rnnsearch": {"embed_width": 620},
        "luong": {**LUONG, "attention": "dot"},  # the best of arXiv 1508.04025: global dot, local-p general
        "luong_local": {**LUONG, "attention": "general", "span": "predictive"},
    }
    FROM_DATA = ("vocab_size",)

    vocab_size: Count
    cell: Kind = "gru"
    depth: Count = 1
    width: Count = 1000
    embed_width: Size = None
    bidirectional: bool = True
    attention: Literal["fixed", *SCORES] = "additive"
    span: Annotated[Literal["global", "monotonic", "predictive"], Needs("attention", SCORES)] = "global"
    window: Annotated[Count, Needs("span")] = 10
    dropout: Rate = 0.0

    outputs = ("target_tokens",)
    input_parameters = "^encoder_embed/"

    @property
    def layer_groups(self) -> tuple[Layers, ...]:
        """The layers of the encoder, each with both directions, and of the decoder, the last with the attention."""
        encoder, decoder = [], []
        for i in range(self.depth):
            encoder.append(Layers(f"encoder/forward_{i}", 1, stacked=False, first=f"^encoder/backward_{i}/"))
            first = f"^start_{i}_" if i else "^(start_0_|fed/|decoder_embed/)"
            last = "^(key|score|place|attentional|readout)" if i == self.depth - 1 else ""
            decoder.append(Layers(f"cells_{i}", 1, "decoder", stacked=False, first=first, last=last))
        return (*encoder, *decoder)

    def states_from(self, sown: Mapping[str, Any]) -> HiddenStates:
        attention = {"cross": (sown["attention"][0],)} if "attention" in sown else {}
        layers = {"encoder": sown["encoder/hidden"], "decoder": sown["decoder_hidden"][0]}
        embedding = {side: sown[f"{side}_embedding"][0] for side in ("encoder", "decoder")}
        return HiddenStates(embedding, layers, attention)

    def setup(self):
        if self.attention == "dot" and self.bidirectional:
            raise ValueError("attention is 'dot', which requires states of equal width: bidirectional must be False.")
        if self.attention == "fixed" and self.span != "global":
            raise ValueError(f"span is {self.span!r} without attention: it must be 'global'.")
        _, gates, parts = CELLS[self.cell]
        embed = partial(Embed, self.vocab_size, self.embed_width or self.width)
        linear = partial(Linear, use_bias=False)
        self.encoder_embed, self.decoder_embed = embed(), embed()
        self.drop = Dropout(self.dropout)
        self.encoder = Recurrent(self.cell, self.width, self.depth, self.bidirectional, dropout=self.dropout)
        if self.bidirectional:
            self.start = [[Linear((self.width,)) for _ in range(parts)] for _ in range(self.depth)]
        self.cells = [Cell(self.cell, self.width) for _ in range(self.depth)]
        self.fed = linear((gates * self.width,))  # input of the first cell, in addition to the token's vector
        self.key = linear((self.width,)) if self.attention in ("additive", "general", "concat") else None
        self.score = Additive() if self.attention in ("additive", "concat") else dot_product
        if self.span == "predictive":
            self.place = [linear((self.width,)), linear((1,))]
        if self.luong:
            self.attentional = linear((self.width,))
        else:
            self.readout = Linear((self.width // 2, 2))
        self.head = Linear((self.vocab_size,))

    @property
    def luong(self) -> bool:
        return self.attention in ("dot", "general", "concat")

    def __call__(
        self,
        inputs: Inputs,
        tokens: Tokens,
        *,
        inputs_mask: InputsMask | None = None,
        mask: TokensMask | None = None,
        own_rate: Float[Array, ""] | float | None = None,
    ) -> Logits:
        """Return logits of the token after each of `tokens`, given the whole of `inputs`.

        Args:
            inputs, tokens: tokens of the encoder and of the decoder.
            inputs_mask, mask: True for real tokens; padding changes no state and is masked out in attention.
            own_rate: probability of replacing a token of the decoder, except the first, by a sample of its prediction
                (scheduled sampling, arXiv 1506.03099), with the "dropout" rng; None: 0.
        """
        inputs_mask = jnp.ones(inputs.shape, bool) if inputs_mask is None else inputs_mask
        memory = self.encode((inputs, inputs_mask))
        positions = jnp.arange(tokens.shape[1])[None] if mask is None else jnp.cumsum(mask, axis=1) - 1
        given = None
        if own_rate is not None:
            given = jax.random.bernoulli(self.make_rng("dropout"), 1 - own_rate, tokens.shape)
        return self._decode(tokens, jnp.broadcast_to(positions, tokens.shape), memory.state, memory, mask, given)[0]

    def encode(self, inputs: tuple[Inputs, InputsMask]) -> Annotations:
        """Return the decoder's memory of input tokens and their mask, which is True for real tokens."""
        tokens, mask = inputs
        x = self.drop(self.encoder_embed(tokens))
        self.sow("intermediates", "encoder_embedding", x)
        value, ends = self.encoder(x, mask=mask)
        cells = ends
        if self.bidirectional:  # the backward states, which end at the first token
            pairs = (zip(start, end) for start, end in zip(self.start, ends[1::2]))
            cells = [tuple(jnp.tanh(linear(array)) for linear, array in pair) for pair in pairs]
        if self.attention == "fixed":
            last = jnp.concatenate([end[0] for end in ends[-2 if self.bidirectional else -1 :]], axis=-1)
            value, mask = last[:, None], mask[:, :1]
        key = value if self.key is None else self.key(value)
        return Annotations(key, value, mask, self._initial_state(cells))

    def init_cache(self, batch_size: int, max_length: int, rewinds: int | None = None) -> States:
        """Return an empty cache with room for `max_length` tokens of each sequence; `rewinds` has no effect."""
        row = jnp.zeros((batch_size, self.width), self.encoder_embed.table.dtype)
        return States.empty(self._initial_state([cell.zeros(row) for cell in self.cells]), max_length)

    def decode(self, tokens: Tokens, cache: States, memory: Annotations) -> tuple[Logits, States]:
        """Return the logits after each of T more tokens of each sequence, and the cache with these tokens appended."""
        positions = cache.positions(tokens.shape[1])
        logits, states = self._decode(tokens, positions, cache.last(memory.state), memory)
        return logits, cache.append(states)

    def _initial_state(self, cells):
        """Return the decoder's initial state: that of the cells, and in Luong's models a zero attentional state."""
        return cells, jnp.zeros_like(cells[0][0]) if self.luong else None

    def _decode(self, tokens, positions, state, memory, mask=None, given=None):
        """Return logits and the state after each token; tokens that are not `given` are sampled one by one."""

        def step(self, carry, inputs):
            state, sampled = carry
            vector, x, position, real, given = inputs
            if given is not None:
                vector = jnp.where(given[:, None], vector, self.drop(self.decoder_embed(sampled)))
                x = self.cells[0].project(vector)
            new, output, weights = self._step(state, x, position, memory)
            state = held(real, new, state)
            if given is not None:
                logits = jax.lax.stop_gradient(self._logits(output, vector))
                sampled = jax.random.categorical(self.make_rng("dropout"), logits.astype(jnp.float32))
            return (state, sampled), (state, output, vector, weights)

        rngs = {"params": False, "dropout": True}
        scan = nn.scan(step, variable_broadcast="params", split_rngs=rngs, in_axes=1, out_axes=1)
        vectors = self.drop(self.decoder_embed(tokens))
        self.sow("intermediates", "decoder_embedding", vectors)
        inputs = vectors, self.cells[0].project(vectors), positions, mask, given
        # The first token has no preceding prediction, so it is never replaced.
        states, outputs, vectors, weights = scan(self, (state, tokens[:, 0]), inputs)[1]
        self.sow("intermediates", "decoder_hidden", tuple(cell[0] for cell in states[0]))
        if weights is not None:
            self.sow("intermediates", "attention", weights.swapaxes(1, 2))
        return self._logits(outputs, vectors), states

    def _step(self, state, x, position, memory):
        """Return the state after a token with the projection x, the input of the output layer, and the weights."""
        cells, fed = state
        if not self.luong:
            fed, weights = self._attend(cells[-1][0], position, memory)
        x, new = x + self.fed(fed), []
        for i, cell in enumerate(self.cells):
            x = cell.project(self.drop(new[-1][0])) if i else x
            new.append(cell(cells[i], x))
        top = new[-1][0]
        if not self.luong:
            return (new, None), jnp.concatenate([top, fed], axis=-1), weights
        context, weights = self._attend(top, position, memory)
        fed = jnp.tanh(self.attentional(jnp.concatenate([context, top], axis=-1)))
        return (new, fed), fed, weights

    def _attend(self, query, position, memory):
        """Return a query's context, the weighted mean of the encoder's states, and the weights [B, 1, S]."""
        if self.attention == "fixed":
            return memory.value[:, 0], None
        mask, factor = memory.mask, 1.0
        if self.span != "global":
            length = mask.sum(axis=1)
            # Beyond the end of the input, Luong's local-m has no keys; here, the window stays at the end.
            center = jnp.minimum(position, length - 1)
            if self.span == "predictive":
                hidden, score = self.place
                center = length * jax.nn.sigmoid(score(jnp.tanh(hidden(query)))[:, 0].astype(jnp.float32))
            distance = jnp.cumsum(mask, axis=1) - 1 - center[:, None]
            mask = mask & (jnp.abs(distance) <= self.window)
            if self.span == "predictive":  # a Gaussian, whose standard deviation is half of `window`
                factor = jnp.exp(-2 * (distance / self.window) ** 2)[:, None, None]
        recorded = []

        def scale(weights):
            recorded.append((weights * factor).astype(query.dtype))
            return recorded[0]

        key, value = memory.key[:, :, None], memory.value[:, :, None]
        out = dense(query[:, None, None], key, value, Mask(keys=mask), Weighting(self.score, scale))
        return out[:, 0, 0], recorded[0][:, :, 0]

    def _logits(self, x, vectors):
        """Return logits from the attentional state (Luong), or from state, context and token by maxout (1302.4389)."""
        if not self.luong:
            x = self.readout(jnp.concatenate([x, vectors], axis=-1)).max(axis=-1)
        return self.head(self.drop(x))
