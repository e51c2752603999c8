"""Loss functions shared by several tasks."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Shaped

from lineage.metrics.classification import correct, correct_top_k
from lineage.metrics.likelihood import cross_entropy
from lineage.metrics.states import Mean, State
from lineage.models import Targets
from lineage.tasks.base import Batch, Result


def token_loss(model: nn.Module, logits: Float[Array, "B T V"], batch: Batch, label_smoothing: float = 0.0) -> Result:
    """Return the cross-entropy of `targets` [B, T] where `mask` [B, T] is True, with label smoothing in training."""
    loss = cross_entropy(logits, batch["targets"], label_smoothing if model.has_rng("dropout") else 0.0)
    return sums(loss, batch["mask"], {"accuracy": correct(logits, batch["targets"])})


def fused_loss(model: nn.Module, batch: Batch, label_smoothing: float, *inputs: Array, **options: Array) -> Result:
    """Return the `token_loss` of a model that computes its own loss; `inputs` and `options` are its arguments."""
    targets = Targets(batch["targets"], batch["mask"], label_smoothing if model.has_rng("dropout") else 0.0)
    losses = model(*inputs, targets=targets, **options)
    _, weight, aux = sums(losses.loss, batch["mask"], {"accuracy": losses.correct})
    return losses.total, weight, aux


def class_loss(
    logits: Float[Array, "..."], target: Float[Array, "B V"], label: Int[Array, "B"], binary: bool
) -> tuple[Float[Array, "B"], dict[str, Shaped[Array, "B"]]]:
    """Return the cross-entropy of target probabilities, and accuracies against `label`.

    With `binary`, the loss is the mean of the binary cross-entropies of the classes (arXiv 2110.00476, section 2).
    """
    if logits.shape != target.shape:
        raise ValueError(f"The model returns logits of shape {logits.shape}: it must be {target.shape}.")
    if binary:
        loss = optax.sigmoid_binary_cross_entropy(logits, target).mean(axis=-1)
    else:
        loss = optax.softmax_cross_entropy(logits, target)
    means = {"accuracy": correct(logits, label)}
    if logits.shape[-1] > 10:
        means["top_5_accuracy"] = correct_top_k(logits, label, 5)
    return loss, means


def probabilities(label: Shaped[Array, "B *V"], num_classes: int) -> Float[Array, "B V"]:
    """Return labels [B], or soft labels [B, V], as the probability of each class."""
    return jax.nn.one_hot(label, num_classes) if label.ndim == 1 else label.astype(jnp.float32)


def smoothed(model: nn.Module, target: Float[Array, "B V"], label_smoothing: float) -> Float[Array, "B V"]:
    """Return target probabilities with label smoothing in training."""
    return optax.smooth_labels(target, label_smoothing) if model.has_rng("dropout") else target


def divergence(teacher: Float[Array, "*B V"], student: Float[Array, "*B V"], temperature: float) -> Float[Array, "*B"]:
    """Return the KL divergence between teacher and student distributions, from logits (arXiv 1503.02531).

    Logits are divided by the temperature, and the divergence is multiplied by its square. At temperature 0, the
    result is the cross-entropy of the most probable class of the teacher.
    """
    if not temperature:
        return cross_entropy(student, teacher.argmax(axis=-1))
    target, predicted = (jax.nn.log_softmax(x.astype(jnp.float32) / temperature) for x in (teacher, student))
    return (jnp.exp(target) * (target - predicted)).sum(axis=-1) * temperature**2


def weighted(weights: Sequence[float], losses: Mapping[str, Array], mask: Bool[Array, "..."], **means: Array) -> Result:
    """Return `(loss_sum, weight, metric states)` of a weighted sum of losses, and report each loss."""
    return sums(sum(weight * loss for weight, loss in zip(weights, losses.values())), mask, means | losses)


def sums(
    loss: Float[Array, "..."],
    mask: Bool[Array, "..."],
    means: Mapping[str, Array] = MappingProxyType({}),
    **states: State,
) -> Result:
    """Return `(loss_sum, weight, metric states)` of losses where the mask is True, with the means of other values."""
    if "loss" in {**means, **states}:
        raise ValueError("The metrics of a loss have the key 'loss', which is the loss itself: choose another name.")
    means = {name: Mean.empty().update(value, mask) for name, value in {"loss": loss, **means}.items()}
    return means["loss"].total, means["loss"].weight, means | states
