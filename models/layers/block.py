"""The residual block and the stack of blocks that every Transformer here is."""

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jaxtyping import Array, Bool, Float, Int

from lineage.models.layers.cache import Cache, Memory
from lineage.models.layers.norm import normalise

REMAT = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}

AXES = ("batch", "sequence", None)  # Flax's logical axes of what goes from part to part


class Block(nn.Module):
    """Attention, optional cross-attention and feed-forward layer, each added to the input.

    Attributes:
        attention, mlp, norm: what makes the parts, such as `partial(Attention, num_heads=12)`.
        cross_attention: what makes the attention to `context`; None leaves it out.
        placement: "pre" normalises what goes into a part (arXiv 2002.04745), "post" the sum that comes out
            (arXiv 1706.03762), "branch" what a part adds (arXiv 2111.09883), "none" nothing.
        dropout: rate on what each part adds.
        layer_scale: what each part adds is multiplied by a learned vector of this initial value (arXiv 2103.17239,
            section 2.1); 0 leaves it out.
    """

    attention: Callable[..., nn.Module]
    mlp: Callable[..., nn.Module]
    norm: Callable[..., nn.Module]
    cross_attention: Callable[..., nn.Module] | None = None
    placement: Literal["pre", "post", "branch", "none"] = "pre"
    dropout: float = 0.0
    layer_scale: float = 0.0

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        mask: Bool[Array, "#B #H #T #S"] | None = None,
        bias: Float[Array, "#B #H #T #S"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        cache: Cache | None = None,
        context: Float[Array, "B M E"] | Memory | None = None,
        context_mask: Bool[Array, "#B #H #T M"] | None = None,
        drop_path: Float[Array, ""] | None = None,
        added: Float[Array, "#B T D"] | None = None,
        context_added: Float[Array, "#B M E"] | None = None,
        **inputs: Any,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """Returns the output and the cache with this call appended.

        `drop_path` is the probability that an example skips a part (stochastic depth, arXiv 1603.09382); what is added
        goes to both attentions, see `Attention`; `inputs` are the attention's.
        """
        real = None if mask is None or mask.shape[1:] != (1, 1, x.shape[1]) else mask[:, 0, 0]
        attention = self.attention(name="attention")
        inputs |= {"mask": mask, "bias": bias, "positions": positions, "cache": cache}
        places = {"added": added, "context_added": context_added} if added is not None else {}
        inputs |= {"added": added} if places else {}
        branch, cache = attention(self._before("attention", x, real), **inputs)
        x = self._after("attention", x, real, branch, drop_path)
        if self.cross_attention is not None:
            cross_attention = self.cross_attention(name="cross_attention")
            query = self._before("cross_attention", x, real)
            branch, _ = cross_attention(query, context, mask=context_mask, **places)
            x = self._after("cross_attention", x, real, branch, drop_path)
        x = self._after("mlp", x, real, self.mlp(name="mlp")(self._before("mlp", x, real)), drop_path)
        self.sow("intermediates", "hidden", x)
        return x, cache

    def _before(self, part, x, real):
        return normalise(self.norm(name=f"{part}_norm"), x, real) if self.placement == "pre" else x

    def _after(self, part, x, real, branch, drop_path):
        if self.layer_scale:
            init = nn.initializers.constant(self.layer_scale)
            branch = branch * self.param(f"{part}_scale", init, x.shape[-1:]).astype(branch.dtype)
        branch = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))(branch)
        if self.placement == "branch":
            branch = normalise(self.norm(name=f"{part}_norm"), branch, real)
        if drop_path is not None and self.has_rng("dropout"):
            keep = jax.random.bernoulli(self.make_rng("dropout"), 1 - drop_path, (x.shape[0], 1, 1))
            branch = jnp.where(keep, branch / (1 - drop_path).astype(branch.dtype), 0)
        x = nn.with_logical_constraint(x + branch, AXES)
        return normalise(self.norm(name=f"{part}_norm"), x, real) if self.placement == "post" else x


class Stack(nn.Module):
    """A block repeated `depth` times by one compiled loop; its parameters have a leading layer axis.

    Attributes:
        block: what makes a block, such as `partial(Block, ...)`.
        depth: L, how often it is applied.
        share: every layer has the same parameters (ALBERT, arXiv 1909.11942).
        first_rate, stochastic_depth: the first and the last layer's rate of skipping; those between grow evenly.
        remat: what the backward pass computes again to save memory: None nothing, "dots" all but the matrix products of
            weights, "full" everything inside a block.
        unroll: how many layers each turn of the loop holds: more compile longer and may run faster.
        every: return every layer's output [L, B, T, D].
    """

    block: Callable[..., nn.Module]
    depth: int
    share: bool = False
    first_rate: float = 0.0
    stochastic_depth: float = 0.0
    remat: Literal["dots", "full"] | None = None
    unroll: int = 1
    every: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        cache: Cache | None = None,
        context: Float[Array, "B M E"] | Memory | None = None,
        each: dict[str, Any] | None = None,
        **inputs,
    ) -> tuple[Float[Array, "*L B T D"], Cache | None]:
        """Returns the last block's output and the cache; `inputs` go to all blocks, of `each` its own layer's part."""
        remembered = isinstance(context, Memory)
        x = nn.with_logical_constraint(x, AXES)

        def layer(block, carry, scanned):
            (x, cache), (index, drop_path, kept, own) = carry, scanned
            cache = None if cache is None else cache.at(index)
            seen = context.replace(key=kept[0], value=kept[1]) if remembered else context
            out = block(x, cache=cache, drop_path=drop_path, context=seen, **own, **inputs)
            return out, out[0] if self.every else None

        if self.remat:
            layer = nn.remat(layer, policy=REMAT[self.remat], prevent_cse=False)
        rates = jnp.linspace(self.first_rate, self.stochastic_depth, self.depth) if self.stochastic_depth else None
        kinds = ["intermediates", "memory", "statistics", OVERWRITE_WITH_GRADIENT, *([] if self.share else ["params"])]
        scan = nn.scan(
            layer,
            variable_axes=dict.fromkeys(kinds, 0),
            variable_broadcast="params" if self.share else False,
            split_rngs={"params": not self.share, "dropout": True},
            length=self.depth,
            unroll=self.unroll,
        )
        indices = None if cache is None else jnp.arange(self.depth)
        kept = (context.key, context.value) if remembered else None
        (x, cache), outputs = scan(self.block(name="layers"), (x, cache), (indices, rates, kept, each or {}))
        return outputs if self.every else x, cache

    def memory(self, context: Float[Array, "B S E"], mask: Bool[Array, "B S"]) -> Memory:
        """The keys and values of `context` in every layer's cross-attention, of which `mask` tells the real ones."""
        parts = self.variables["params"]["layers"]["cross_attention"]

        def project(part):
            heads = jnp.einsum("BSE,LEKC->LBKSC", context, part["kernel"])
            return heads + part["bias"][:, None, :, None] if "bias" in part else heads

        return Memory(project(parts["key"]), project(parts["value"]), mask)
