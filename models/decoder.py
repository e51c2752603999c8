"""Base classes of models that generate text, with the methods `encode`, `init_cache` and `decode`."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from lineage.models.base import Layers, StackModel
from lineage.models.fields import Inputs, InputsMask, Logits, Positions, Tokens, TokensMask
from lineage.models.kernels.vocabulary import Targets, TokenLosses
from lineage.models.layers import Cache, Mask, Memory

Decoded = tuple[Logits, Cache | None]  # logits, and the cache with the tokens appended
Hidden = tuple[Float[Array, "B T D"], Cache | None]  # the input of the output layer, and the cache


class Decoder(StackModel):
    """Base class of models that generate text; a subclass has `embed`, `depth`, `width` and `num_heads`.

    Attributes:
        window: number of most recent tokens that a token attends to in all layers, including itself; None: all.
    """

    FROM_DATA = ("vocab_size", "max_length")

    window = None

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Number of layers, of key/value heads, and of channels of a head."""
        return self.decoder_layers, self.num_heads, self.width // self.num_heads

    def init_cache(self, batch_size: int, max_length: int, rewinds: int | None = None) -> Cache:
        """Return an empty cache of the parameters' dtype with room for `max_length` tokens of each sequence.

        `rewinds` is the maximum number of tokens by which the cache is rewound; None: any number. If it is given, the
        cache of a model with a window keeps only the last `window + rewinds` tokens (arXiv 2310.06825, section 2), and
        at most `rewinds + 1` tokens may be appended at once after the first call.
        """
        self.check_length(max_length)
        layers, heads, size = self.cache_shape
        entries, dtype = max_length, self.embed.table.dtype
        if self.window is not None and rewinds is not None:
            entries = min(self.window + rewinds, max_length)
        return Cache.empty(layers, batch_size, entries, heads, size, dtype, rewinds if entries < max_length else None)


class DecoderOnly(Decoder):
    """Base class of language models.

    A subclass has `embed`, `embed_dropout`, a `stack`, a `norm`, and the output layer `unembed`.

    Attributes:
        fused_loss: whether to compute the loss in blocks of tokens, without an array of all logits, which takes less
            memory and is faster for large vocabularies; not in the task `reinforcement`, whose loss needs the logits.
    """

    outputs = ("next_token",)

    fused_loss: bool = False

    @property
    def computes_loss(self) -> bool:
        return self.fused_loss

    @property
    def layer_groups(self) -> tuple[Layers, ...]:
        return (Layers("stack/layers", self.depth, "decoder", last="^norm/"),)

    def __call__(
        self,
        tokens: Tokens,
        *,
        mask: TokensMask | None = None,
        positions: Positions | None = None,
        segments: Tokens | None = None,
        targets: Targets | None = None,
    ) -> Logits | TokenLosses:
        """Return the logits of the token after each of at most `max_length` tokens; raise ValueError if there are more.

        Args:
            mask: True for real tokens, False for padding (on either side), which is masked out in attention.
            positions: positions of the tokens; None: 0 to T-1.
            segments: index of the text of each token, for rows of several texts: a token attends only to its own text.
            targets: next tokens, whose losses are returned instead of logits.
        """
        positions = jnp.arange(tokens.shape[1])[None] if positions is None else positions
        limits = None if mask is None and segments is None else Mask(keys=mask, segments=segments)
        x, _ = self.hidden(tokens, positions, mask=limits)
        return self.unembed.logits(x) if targets is None else self.unembed.losses(x, targets)

    def embedded(self, tokens: Tokens, positions: Positions) -> Float[Array, "B T D"]:
        """Return the vectors of tokens at these positions."""
        return self.embed(tokens)

    def hidden(self, tokens: Tokens, positions: Positions, **kwargs) -> Hidden:
        """Return the last hidden states and the cache; `kwargs` are the mask and the cache of the stack."""
        self.check_length(tokens.shape[1])
        x = self.embed_dropout(self.embedded(tokens, positions))
        self.sow("intermediates", "embedding", x)
        x, cache = self.stack(x, positions=positions, **kwargs)
        return self.norm(x), cache

    def encode(self, inputs: None = None) -> None:
        """Return None: a decoder-only model has no encoder."""

    def decode(self, tokens: Tokens, cache: Cache, memory: None = None) -> Decoded:
        """Return the logits after each of T more tokens of each sequence, and the cache with these tokens appended."""
        x, cache = self.hidden(tokens, cache.positions(tokens.shape[1]), cache=cache)
        return self.unembed.logits(x), cache


class EncoderDecoder(Decoder):
    """Base class of models that generate text from an input text.

    A subclass has `embed`, an `encoder_stack`, a `decoder_stack`, and two methods: `with_positions(side, x, positions)`
    returns the input of the "encoder" or the "decoder", given the vectors of its tokens;
    `logits(tokens, positions, context=, context_mask=, mask=, cache=)` returns the output of the decoder and the cache.
    """

    outputs = ("target_tokens",)
    input_parameters = "^(embed|encoder_)"

    @property
    def layer_groups(self) -> tuple[Layers, ...]:
        ends = {"first": "^decoder_(position|relative)/", "last": "^decoder_norm/"}
        encoder = Layers("encoder_stack/layers", self.depth, last="^encoder_norm/")
        return encoder, Layers("decoder_stack/layers", self.decoder_layers, "decoder", **ends)

    def embedded(
        self, side: Literal["encoder", "decoder"], tokens: Tokens, positions: Positions
    ) -> Float[Array, "B T D"]:
        """Return the input of the encoder or of the decoder."""
        self.check_length(tokens.shape[1])
        x = self.with_positions(side, self.embed(tokens), positions)
        self.sow("intermediates", f"{side}_embedding", x)
        return x

    def encoded(self, tokens: Inputs, mask: InputsMask) -> Float[Array, "B S D"]:
        """Return the output of the encoder for tokens and their mask."""
        x = self.embedded("encoder", tokens, jnp.arange(tokens.shape[1])[None])
        return self.encoder_stack(x, mask=Mask(keys=mask))[0]

    def __call__(
        self, inputs: Inputs, tokens: Tokens, *, inputs_mask: InputsMask | None = None, mask: TokensMask | None = None
    ) -> Logits:
        """Return the logits of the token after each of `tokens`, given the whole of `inputs`.

        Both have at most `max_length` tokens, or ValueError is raised. The masks are True for real tokens, False for
        padding (on either side), which is masked out in attention.
        """
        inputs_mask = jnp.ones(inputs.shape, bool) if inputs_mask is None else inputs_mask
        mask = None if mask is None else Mask(keys=mask)
        context = {"context": self.encoded(inputs, inputs_mask), "context_mask": Mask(keys=inputs_mask)}
        return self.logits(tokens, jnp.arange(tokens.shape[1])[None], mask=mask, **context)[0]

    def encode(self, inputs: tuple[Inputs, InputsMask]) -> Memory:
        """Return the decoder's memory of `inputs`: tokens, and a mask that is True where they are real."""
        tokens, mask = inputs
        return self.decoder_stack.memory(self.encoded(tokens, mask), mask)

    def decode(self, tokens: Tokens, cache: Cache, memory: Memory) -> Decoded:
        """Return the logits after each of T more tokens of each sequence, and the cache with these tokens appended."""
        context = {"context": memory, "context_mask": Mask(keys=memory.mask)}
        return self.logits(tokens, cache.positions(tokens.shape[1]), cache=cache, **context)
