"""Optimizers and learning-rate schedules, from optax, by name."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

Schedule = Callable[[Any], Any]


def make_schedule(
    name: str,
    *,
    learning_rate: float,
    total_steps: int,
    warmup_steps: int = 0,
    end_factor: float = 0.0,
    width: int = 512,
) -> Schedule:
    """The learning rate of each step (0-based): a linear warm-up from 0, then what the name says.

    Args:
        name: "constant"; "cosine" or "linear" fall so that the step after the last would have `end_factor` x
            `learning_rate`; "rsqrt" falls as 1 / sqrt(step) from the end of the warm-up; "transformer" is
            width^-0.5 min(n^-0.5, n warmup^-1.5) x `learning_rate` for n = step + 1 (arXiv 1706.03762, equation 3).
        learning_rate: the peak (a factor for "transformer").
        total_steps: of the run, its warm-up included.
        width: D, for "transformer".

    Raises:
        ValueError: the name is unknown.
    """
    warmup = max(warmup_steps, 1)
    decay_steps = max(total_steps - warmup_steps, 1)
    decays = {
        "constant": optax.constant_schedule(learning_rate),
        "cosine": optax.cosine_decay_schedule(learning_rate, decay_steps, alpha=end_factor),
        "linear": optax.linear_schedule(learning_rate, learning_rate * end_factor, decay_steps),
        "rsqrt": lambda n: learning_rate * jnp.sqrt(warmup / (jnp.maximum(n, 0) + warmup)),
    }
    if name == "transformer":
        return lambda n: learning_rate * width**-0.5 * jnp.minimum((n + 1.0) ** -0.5, (n + 1.0) * warmup**-1.5)
    if name not in decays:
        raise ValueError(f"unknown schedule {name!r}: it is one of {', '.join(decays)}, transformer.")
    if not warmup_steps:
        return decays[name]
    rise = optax.linear_schedule(learning_rate / warmup_steps, learning_rate, warmup_steps - 1 or 1)
    return optax.join_schedules([rise, decays[name]], [warmup_steps])


def make_optimizer(
    name: str,
    schedule: Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    no_decay: Sequence[str] = ("bias$", "scale$"),
    clip_norm: float = 0.0,
    frozen: Sequence[str] = (),
    frozen_layers: int = 0,
    layer_decay: float = 0.0,
    lr_multipliers: Sequence[tuple[str, float]] = (),
) -> optax.GradientTransformation:
    """Gradients in, what to add to the parameters out.

    Args:
        name: "adamw", "sgd" (with momentum `b1`), "adafactor" (factored second moments, arXiv 1804.04235), "lion" or
            "lars" (sgd with steps of matrices in proportion to their norms, arXiv 1708.03888).
        b1, b2, epsilon: decay of the first and the second moment, and what is added to the root of the second.
        weight_decay: this part of a parameter, times the learning rate, is taken from it in each step (decoupled, arXiv
            1711.05101), unless a regular expression of `no_decay` finds something in its path.
        clip_norm: gradients are scaled down to this global norm; 0 leaves them.
        frozen: parameters in whose path one of these finds something stay as they are.
        frozen_layers: so many of the first layers of a stack, and what comes before them, stay as they are.
        layer_decay: each layer of a stack learns at this part of the rate of the next one, the last at this part of the
            heads', and what comes before them as a layer before the first (arXiv 2003.10555); 0 is the same for all.
        lr_multipliers: (regular expression, factor) pairs; the first expression found in a parameter's path scales its
            learning rate.

    Raises:
        ValueError: the name is unknown, or an expression finds no parameter.
    """
    rules = {
        "adamw": lambda: optax.scale_by_adam(b1, b2, epsilon),
        "sgd": lambda: optax.trace(b1) if b1 else optax.identity(),
        "adafactor": lambda: optax.chain(
            optax.scale_by_factored_rms(decay_rate=0.8),
            optax.clip_by_block_rms(1.0),
            optax.ema(b1, debias=False) if b1 else optax.identity(),
        ),
        "lion": lambda: optax.scale_by_lion(b1, b2),
        "lars": lambda: optax.chain(
            optax.masked(optax.scale_by_trust_ratio(trust_coefficient=0.001), partial(jax.tree.map, _is_matrix)),
            optax.trace(b1),
        ),
    }
    if name not in rules:
        raise ValueError(f"unknown optimizer {name!r}: it is one of {', '.join(rules)}.")
    parts = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
    parts.append(rules[name]())
    if weight_decay:
        decayed = lambda params: map_paths(lambda path, _: not _found(no_decay, path), params)  # noqa: E731
        parts.append(optax.add_decayed_weights(weight_decay, decayed))
    if layer_decay or frozen_layers:
        parts.append(_scale_by_layer(layer_decay or 1.0, frozen_layers))
    if lr_multipliers:
        parts.append(_scale_by_path(lr_multipliers))
    parts.append(optax.scale_by_learning_rate(schedule))
    optimizer = optax.chain(*parts)
    if not frozen:
        return optimizer

    def labels(params):
        check_patterns(frozen, params)
        return map_paths(lambda path, _: "frozen" if _found(frozen, path) else "trained", params)

    return optax.partition({"trained": optimizer, "frozen": optax.set_to_zero()}, labels)


def map_paths(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """A tree of function(path, leaf), where a path is like "stack/layers/mlp/up/kernel"."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(jax.tree_util.keystr(path, simple=True, separator="/"), leaf), tree
    )


def check_patterns(patterns: Sequence[str], tree: Any) -> None:
    """Raises ValueError for a regular expression that finds no path of the tree: it is probably misspelt."""
    paths = jax.tree.leaves(map_paths(lambda path, _: path, tree))
    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            raise ValueError(f"the pattern {pattern!r} finds no parameter; a path is like {paths[-1]!r}.")


def _is_matrix(leaf):
    return leaf.ndim > 1


def _found(patterns, path):
    return any(re.search(pattern, path) for pattern in patterns)


# The parameters in front of the layers.
_FRONT = re.compile("^(backbone|class_token|distillation_token|embed|patch_embed|position|registers|segment|table)")


def _scale_by_layer(decay, frozen):
    def update(updates, params=None):
        depths = map_paths(lambda path, leaf: len(leaf) if "layers/" in path else 0, updates)
        depth = max(jax.tree.leaves(depths))

        def scale(path, leaf):
            if "layers/" in path:  # of all layers in one: the factors are a vector along them
                layer = jnp.arange(len(leaf))
                factors = jnp.where(layer < frozen, 0, decay ** (len(leaf) - layer).astype(jnp.float32))
                return leaf * factors.reshape(-1, *[1] * (leaf.ndim - 1))
            return leaf * (0 if frozen else decay ** (depth + 1)) if _FRONT.search(path) else leaf

        return map_paths(scale, updates)

    return optax.stateless(update)


def _scale_by_path(lr_multipliers):
    def scale(path, leaf):
        return leaf * next((factor for pattern, factor in lr_multipliers if re.search(pattern, path)), 1.0)

    return optax.stateless(lambda updates, params: map_paths(scale, updates))
