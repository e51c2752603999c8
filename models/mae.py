"""The masked autoencoder (arXiv 2111.06377): a ViT encodes some patches, and a small decoder predicts the others."""

from typing import ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from lineage.models.base import MODELS, Layers
from lineage.models.fields import Count, Image, Natural, Rate, Size
from lineage.models.layers import patches, sincos_2d
from lineage.models.layers.embed import join
from lineage.models.vit import ViT, tokens_at


@MODELS.register("mae")
class MAE(ViT):
    """A ViT with a decoder. A `ViT` with position "mae" can start from the parameters of its encoder.

    Attributes:
        mask_rate: fraction of the patches that are masked: the encoder gets int(P (1 - mask_rate)) patches.
        normalized: whether the target of a patch is normalized by the mean and standard deviation of its pixels.
        decoder_depth: number of layers of the decoder; 0: there is no decoder.
        decoder_width: size of the hidden states of the decoder.
        decoder_num_heads: number of attention heads of the decoder.
        decoder_mlp_dim: width of the hidden layer of the decoder's MLPs; None: 4 times `decoder_width`.
    """

    VARIANTS: ClassVar = {name: ViT.VARIANTS[name] for name in ("mu", "B", "L", "H")}
    VARIANTS["mu"] = VARIANTS["mu"] | {"decoder_depth": 2, "decoder_width": 32, "decoder_num_heads": 4}
    FROM_DATA = ("image_size", "channels", "mask_rate")

    num_classes: Natural = 0
    position: Literal["none", "1d", "2d", "sincos2d", "mae"] = "mae"
    mask_rate: Rate = 0.75
    normalized: bool = True
    decoder_depth: Natural = 8
    decoder_width: Count = 512
    decoder_num_heads: Count = 16
    decoder_mlp_dim: Size = None

    outputs = ("patches",)

    @property
    def layer_groups(self) -> tuple[Layers, ...]:
        first, last = "^(decoder_embed/|mask_token$)", "^decoder_norm/"
        decoder = Layers("decoder_stack/layers", self.decoder_depth, "decoder", first=first, last=last)
        return (*super().layer_groups, *([decoder] if self.decoder_depth else []))

    def setup(self):
        super().setup()
        if self.decoder_depth:
            sublayers = self._sublayers(self.decoder_width, self.decoder_num_heads, self.decoder_mlp_dim)
            self.decoder_embed = nn.Dense(self.decoder_width)
            self.mask_token = self.param("mask_token", nn.initializers.normal(0.02), (self.decoder_width,))
            self.decoder_stack = self._stack(sublayers, self.decoder_depth)
            self.decoder_norm = sublayers["norm"]()
            self.decoder_head = nn.Dense(self.patch_size**2 * self.channels)

    def __call__(
        self, image: Image, noise: Real[Array, "B P"] | None = None
    ) -> tuple[Float[Array, "B Q F"], Bool[Array, "B P"]] | Float[Array, "B *P V"]:
        """Return the predicted pixels of each patch, and the mask (True for masked patches).

        The patches with the smallest noise are kept; ValueError is raised if there are none. Without a decoder, the
        first result is the encoder's output for the class token and the kept patches, in the order of their noise.
        Without noise, return the output of a `ViT` for all patches.
        """
        if noise is None:
            return super().__call__(image)
        count = int(noise.shape[1] * (1 - self.mask_rate))
        if not count:
            raise ValueError(f"mask_rate is {self.mask_rate}: it must leave at least one of {noise.shape[1]} patches.")
        order = jnp.argsort(noise, axis=1)
        rank = jnp.argsort(order, axis=1)
        x = self.encode(image, order[:, :count])
        if self.decoder_depth:
            x = self.decode(x, rank, tuple(side // self.patch_size for side in image.shape[1:3]))
        return x, rank >= count

    def decode(
        self, tokens: Float[Array, "B S D"], rank: Int[Array, "B P"], grid: tuple[int, int]
    ) -> Float[Array, "B P F"]:
        """Return the predictions for all patches of a grid (rows, columns) from the encoder's output.

        `rank` is the index of each patch among the tokens, without the class token; masked patches have larger ones.
        """
        x = self.decoder_embed(tokens)
        special, side = len(self.special), self.side
        first, kept = x[:, :special], x[:, special:]
        masked = (x.shape[0], rank.shape[1] - kept.shape[1], self.decoder_width)
        x = jnp.concatenate([kept, jnp.broadcast_to(self.mask_token.astype(x.dtype), masked)], axis=1)
        x = tokens_at(x, rank)
        x = x + jnp.asarray(self._resampled(sincos_2d(side, side, self.decoder_width), grid), x.dtype)
        x = jnp.concatenate([first, x], axis=1)
        self.sow("intermediates", "decoder_embedding", x)
        x = self.decoder_norm(self.decoder_stack(x)[0])
        return self.decoder_head(x[:, special:])

    def target(self, image: Image) -> Float[Array, "B P F"]:
        """Return the target of each patch."""
        return self._normalized(image)[0]

    def pictures(
        self, image: Image, noise: Real[Array, "B P"]
    ) -> tuple[Float[Array, "B height width channels"], Float[Array, "B height width channels"]]:
        """Return the image with the masked patches set to 0, and with them replaced by the predictions.

        Normalized predictions get the mean and the standard deviation of the patches in the image.
        """
        predicted, mask = self(image, noise)
        target, mean, deviation = self._normalized(image)
        pixels = target * deviation + mean
        replacements = jnp.zeros_like(pixels), predicted * deviation + mean
        batch, height, width, channels = image.shape
        shape = (batch, height // self.patch_size, width // self.patch_size, *(self.patch_size,) * 2, channels)
        return tuple(join(jnp.where(mask[..., None], x, pixels).reshape(shape)) for x in replacements)

    def _normalized(self, image):
        """Return patches [B P F] in float32, and the mean and standard deviation [B P 1] that normalize them.

        Raise ValueError if there is no decoder to predict them.
        """
        if not self.decoder_depth:
            raise ValueError("model.decoder_depth is 0: it must be at least 1 to reconstruct masked patches.")
        x = patches(image.astype(jnp.float32), self.patch_size)
        x = x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[-1])
        if not self.normalized:
            return x, 0.0, 1.0
        mean, deviation = x.mean(axis=-1, keepdims=True), jnp.sqrt(x.var(axis=-1, ddof=1, keepdims=True) + 1e-6)
        return (x - mean) / deviation, mean, deviation
