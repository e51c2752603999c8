"""The residual block, and the stack of blocks, which all Transformers share."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jaxtyping import Array, Bool, Float, Int

from lineage.models.kernels.attention import saves_attention
from lineage.models.kernels.compiler import summed_once
from lineage.models.layers.attend import Mask
from lineage.models.layers.cache import Cache, LayerCache, Memory
from lineage.models.layers.dropout import Dropout
from lineage.models.layers.norm import normalize
from lineage.models.layers.quantized import dequantized

REMAT = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, saves_attention
    ),
}

AXES = ("batch", "sequence", None)  # Flax's logical axes of the residual stream


class Block(nn.Module):
    """Attention, optional cross-attention and an MLP, each added to its input.

    Attributes:
        attention, mlp, norm: constructors of the sublayers and their norms, such as `partial(Attention, num_heads=12)`.
        cross_attention: constructor of the attention to `context`; None disables it.
        norm_placement: "pre" normalizes the input of a sublayer (arXiv 2002.04745), "post" the sum of input and output
            (arXiv 1706.03762), "branch" the output before it is added (arXiv 2111.09883).
        dropout: rate on the output of each sublayer.
        layer_scale: initial value of a learned vector that multiplies the output of each sublayer (arXiv 2103.17239,
            section 2.1); 0 disables it.
    """

    attention: Callable[..., nn.Module]
    mlp: Callable[..., nn.Module]
    norm: Callable[..., nn.Module]
    cross_attention: Callable[..., nn.Module] | None = None
    norm_placement: Literal["pre", "post", "branch"] = "pre"
    dropout: float = 0.0
    layer_scale: float = 0.0

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        mask: Mask | None = None,
        positions: Int[Array, "#B T"] | None = None,
        cache: LayerCache | None = None,
        context: Float[Array, "B M E"] | LayerCache | None = None,
        context_mask: Mask | None = None,
        context_inputs: Mapping[str, Any] | None = None,
        drop_path: Float[Array, ""] | None = None,
        **inputs: Any,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Return the output, and the cache with this call's keys and values appended.

        Args:
            context, context_mask: input of the cross-attention, and its mask.
            context_inputs: other arguments of the cross-attention.
            drop_path: probability of skipping a sublayer for an example (stochastic depth, arXiv 1603.09382).
            inputs: other arguments of the self-attention.
        """
        add = partial(self.add, real=None if mask is None or cache is not None else mask.keys, drop_path=drop_path)
        attention = self.attention(name="attention")
        inputs |= {"mask": mask, "positions": positions, "cache": cache}
        x, cache = add("attention", x, partial(attention, **inputs))
        if self.cross_attention is not None:
            cross_attention = self.cross_attention(name="cross_attention")
            context_inputs = {"context": context, "mask": context_mask, **(context_inputs or {})}
            x, _ = add("cross_attention", x, partial(cross_attention, **context_inputs))
        mlp = self.mlp(name="mlp")
        x, _ = add("mlp", x, lambda x: (mlp(x), None))
        self.sow("intermediates", "hidden", x)
        return x, cache

    def add(
        self,
        name: str,
        x: Float[Array, "B T D"],
        function: Callable[[Array], tuple[Array, Any]],
        *,
        real: Bool[Array, "#B T"] | None = None,
        drop_path: Float[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Add the output of a sublayer, which `function` returns first, to x; return the sum and the second result.

        `real` is the mask of real tokens, for norms with statistics over tokens.
        """
        norm = self.norm(name=f"{name}_norm")
        branch, other = function(normalize(norm, x, real) if self.norm_placement == "pre" else x)
        if self.layer_scale:
            init = nn.initializers.constant(self.layer_scale)
            branch = branch * self.param(f"{name}_scale", init, x.shape[-1:]).astype(branch.dtype)
        branch = Dropout(self.dropout)(branch)
        if self.norm_placement == "branch":
            branch = normalize(norm, branch, real)
        if drop_path is not None and self.has_rng("dropout"):
            keep = jax.random.bernoulli(self.make_rng("dropout"), 1 - drop_path, (x.shape[0], 1, 1))
            branch = jnp.where(keep, branch / (1 - drop_path).astype(branch.dtype), 0)
        x = nn.with_logical_constraint(summed_once(x) + branch, AXES)
        return normalize(norm, x, real) if self.norm_placement == "post" else x, other


class Stack(nn.Module):
    """Sequence of `depth` equal blocks, whose parameters have a leading layer axis.

    The layers are a loop (`scan`), which compiles fast. With a cache they are unrolled, which decodes fast.

    Attributes:
        block: constructor of a block, such as `partial(Block, ...)`.
        depth: number of layers, L.
        share: whether all layers have the same parameters (ALBERT, arXiv 1909.11942).
        first_rate, stochastic_depth: `drop_path` of the first and of the last layer; it grows linearly in between.
        remat, unroll: see `StackModel`.
        every: whether to return every layer's output [L, B, T, D].
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
        """Return the last block's output and the cache.

        `each` are arguments that differ between layers, with a leading layer axis; all layers share `inputs`.
        """
        x = nn.with_logical_constraint(x, AXES)
        if cache is not None or isinstance(context, Memory):
            return self._unrolled(x, cache, context, each or {}, inputs)

        def layer(block, x, scanned):
            drop_path, arguments = scanned
            x, _ = block(x, drop_path=drop_path, context=context, **arguments, **inputs)
            return x, x if self.every else None

        if self.remat:
            # Common-subexpression elimination does not reach across the iterations of a loop.
            layer = nn.remat(layer, policy=REMAT[self.remat], prevent_cse=self.unroll >= self.depth)
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
        x, outputs = scan(self.block(name="layers"), x, (rates, each or {}))
        return outputs if self.every else x, None

    def _unrolled(self, x, cache, context, each, inputs):
        """Return the output and the cache, without a loop, which would copy the weights of a layer for every token."""
        block, variables, layers = self.block(parent=None), self.variables, []
        caches = [None] * self.depth if cache is None else cache.layers
        contexts = context.layers if isinstance(context, Memory) else [context] * self.depth
        rngs = {"dropout": self.make_rng("dropout")} if self.has_rng("dropout") else {}
        shared = {"params": variables["params"]["layers"]} if self.share else {}
        for i, layer in enumerate(caches):
            separate = {kind: _layer(tree["layers"], i) for kind, tree in variables.items() if kind not in shared}
            keys = {name: jax.random.fold_in(key, i) for name, key in rngs.items()}
            others = {"cache": layer, "context": contexts[i], **_layer(each, i), **inputs}
            x, layer = block.apply(separate | shared, x, rngs=keys, **others)
            layers.append(layer)
        return x, None if cache is None else cache.with_layers(layers)

    def memory(self, context: Float[Array, "B S E"], mask: Bool[Array, "B S"]) -> Memory:
        """Return the keys and values of `context` in every layer's cross-attention; `mask` is True for real tokens."""
        layers = [_layer(self.variables["params"]["layers"], i)["cross_attention"] for i in range(self.depth)]

        def project(params):
            heads = jnp.einsum("BSE,EKC->BKSC", context, dequantized(params["kernel"]))
            heads = heads + params["bias"][:, None] if "bias" in params else heads
            return heads.reshape(-1, *heads.shape[2:])

        keys, values = (tuple(project(layer[name]) for layer in layers) for name in ("key", "value"))
        return Memory(keys, values, mask)


def _layer(stacked, i):
    """Return layer i of a tree of arrays with a leading layer axis, or of a tuple with a tree of each layer."""
    return stacked[i] if isinstance(stacked, tuple) else jax.tree.map(lambda array: array[i], stacked)
