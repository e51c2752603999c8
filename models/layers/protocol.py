"""What `models.generate` asks of a model, `encode`, `init_cache` and `decode`, from what differs between models."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lineage.models.layers.cache import Cache, Memory


class Decoder(nn.Module):
    """A model that writes: it has `embed`, `depth` (or a `decoder_depth`), `width`, `num_heads` and perhaps a
    `max_length`."""

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, key/value heads and channels of a head."""
        layers = getattr(self, "decoder_depth", None) or self.depth
        return layers, self.num_heads, self.width // self.num_heads

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """An empty cache of the parameters' dtype with room for `max_length` tokens in each row.

        Raises:
            ValueError: `max_length` is beyond the model's.
        """
        self.check_length(max_length)
        layers, heads, size = self.cache_shape
        return Cache.empty(layers, batch_size, max_length, heads, size, self.embed.table.dtype)

    def check_length(self, length: int) -> None:
        """Raises ValueError for more tokens than the model has positions for."""
        if length > (limit := getattr(self, "max_length", length)):
            raise ValueError(f"a sequence of {length} tokens is longer than the model's {limit}.")


class DecoderOnly(Decoder):
    """A model that goes on from what it wrote; `logits(tokens, positions, mask=, cache=)` is its forward pass."""

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        mask: Bool[Array, "B T"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of the token after each one.

        Args:
            tokens: at most `max_length` of them in a row.
            mask: True = a real token; nothing attends to the others (padding on either side).
            positions: of the tokens; 0 to T-1 when None.

        Raises:
            ValueError: the sequence is longer than the model's.
        """
        mask = None if mask is None else mask[:, None, None, :]
        positions = jnp.arange(tokens.shape[1])[None] if positions is None else positions
        return self.logits(tokens, positions, mask=mask)[0]

    def encode(self, inputs: None = None) -> None:
        """A decoder-only model has nothing to encode."""

    def decode(
        self, tokens: Int[Array, "B T"], cache: Cache, memory: None = None
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """Logits after each of T more tokens in every row, and the cache with them in it."""
        return self.logits(tokens, cache.positions(tokens.shape[1]), cache=cache)


class EncoderDecoder(Decoder):
    """A model that writes about what it has read.

    It has a `decoder_stack`; `encoded(tokens, mask)` is its encoder, and its decoder's forward pass
    `logits(tokens, positions, context=, context_mask=, mask=, cache=)`.
    """

    def __call__(
        self,
        inputs: Int[Array, "B S"],
        tokens: Int[Array, "B T"],
        *,
        inputs_mask: Bool[Array, "B S"] | None = None,
        mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of the token after each of `tokens`, given the whole of `inputs`.

        Args:
            inputs: what the encoder reads, at most `max_length` tokens in a row.
            tokens: what the decoder has written so far, at most as many.
            inputs_mask, mask: True = a real token; nothing attends to the others (padding on either side).

        Raises:
            ValueError: a sequence is longer than the model's.
        """
        inputs_mask = jnp.ones(inputs.shape, bool) if inputs_mask is None else inputs_mask
        mask = None if mask is None else mask[:, None, None, :]
        seen = {"context": self.encoded(inputs, inputs_mask), "context_mask": inputs_mask[:, None, None, :]}
        return self.logits(tokens, jnp.arange(tokens.shape[1])[None], mask=mask, **seen)[0]

    def encode(self, inputs: tuple[Int[Array, "B S"], Bool[Array, "B S"]]) -> Memory:
        """What the decoder sees of `inputs`: tokens, and a mask which is True where they are real."""
        tokens, mask = inputs
        return self.decoder_stack.memory(self.encoded(tokens, mask), mask)

    def decode(self, tokens: Int[Array, "B T"], cache: Cache, memory: Memory) -> tuple[Float[Array, "B T V"], Cache]:
        """Logits after each of T more tokens in every row, and the cache with them in it."""
        seen = {"context": memory, "context_mask": memory.mask[:, None, None, :]}
        return self.logits(tokens, cache.positions(tokens.shape[1]), cache=cache, **seen)
