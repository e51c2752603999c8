"""What is learned: functions of a bound model and a batch.

Each returns `(loss_sum, weight, aux)`: the sum of the losses, the sum of their weights, and metric states by name.
Sums, not means, so that the gradients of a batch's parts add up to the whole's: loss = sum of sums / sum of weights.
An objective is called under `flax.linen.apply`; it is in training when the model has a "dropout" rng.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from metrics.classification import correct, correct_top_k
from metrics.likelihood import cross_entropy
from metrics.states import Mean, State

Batch = dict[str, Array]
Result = tuple[Float[Array, ""], Float[Array, ""], dict[str, State]]
Objective = Callable[[nn.Module, Batch], Result]


def classification(model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0, mixup: float = 0.0) -> Result:
    """Cross-entropy of `label` [B] given `image` [B, h, w, c], over the examples whose `mask` [B] is True.

    Args:
        label_smoothing: see `cross_entropy`; in training only, so that evaluations compare.
        mixup: images and labels are mixed with the next example's in the proportion Beta(mixup, mixup)
            (arXiv 1710.09412), one draw for the whole batch; 0 mixes nothing.

    Raises:
        ValueError: there is nothing to mix one example with.
    """
    image, label, mask = batch["image"], batch["label"], batch["mask"]
    training = model.has_rng("dropout")
    if not (training and mixup):
        logits = model(image)
        loss = cross_entropy(logits, label, label_smoothing if training else 0.0)
    else:
        if len(image) == 1:
            raise ValueError("mixup needs at least 2 examples in a batch, or in each of its accumulated parts.")
        share = jax.random.beta(model.make_rng("dropout"), mixup, mixup).astype(image.dtype)
        share = jnp.maximum(share, 1 - share)
        logits = model(share * image + (1 - share) * jnp.roll(image, 1, axis=0))
        other = cross_entropy(logits, jnp.roll(label, 1), label_smoothing)
        loss = share * cross_entropy(logits, label, label_smoothing) + (1 - share) * other
    aux = {"accuracy": Mean.empty().update(correct(logits, label), mask)}
    if logits.shape[-1] > 10:
        aux["top_5_accuracy"] = Mean.empty().update(correct_top_k(logits, label, 5), mask)
    return _sums(loss, mask, aux)


def causal_lm(model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Result:
    """Cross-entropy of `targets` [B, T], each given the `tokens` [B, T] up to its own, where `mask` [B, T] is True."""
    return _of_tokens(model, model(batch["tokens"]), batch, label_smoothing)


def masked_lm(model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Result:
    """Cross-entropy of `targets` [B, M] at the `places` [B, M] of hidden tokens, given all `tokens` [B, T].

    Counted where `mask` [B, M] is True; tokens are seen where `tokens_mask` [B, T] is True.
    """
    logits = model(batch["tokens"], mask=batch["tokens_mask"], places=batch["places"])
    return _of_tokens(model, logits, batch, label_smoothing)


def pretraining(model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Result:
    """That of `masked_lm`, of two texts that `segments` [B, T] tell apart, and the cross-entropy of their `label` [B],
    which counts as much as M words: their mean losses are added where every text has M."""
    mask, whole = batch["tokens_mask"], batch["tokens_mask"][:, 0]
    logits, scores = model(batch["tokens"], segments=batch["segments"], mask=mask, places=batch["places"])
    words, weight, aux = _of_tokens(model, logits, batch, label_smoothing)
    texts = Mean.empty().update(cross_entropy(scores, batch["label"]), whole)
    aux["sentence_accuracy"] = Mean.empty().update(correct(scores, batch["label"]), whole)
    loss = words + batch["places"].shape[1] * texts.total
    return loss, weight, aux | {"loss": Mean(loss, weight), "masked_lm_loss": aux["loss"], "sentence_loss": texts}


def sequence_to_sequence(model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Result:
    """Cross-entropy of `targets` [B, T], each given all `inputs` [B, S] and the `tokens` [B, T] up to its own.

    Counted where `mask` [B, T] is True; of the inputs, those where `inputs_mask` [B, S] is True are seen.
    """
    logits = model(batch["inputs"], batch["tokens"], inputs_mask=batch["inputs_mask"])
    return _of_tokens(model, logits, batch, label_smoothing)


def _of_tokens(model, logits, batch, label_smoothing):
    loss = cross_entropy(logits, batch["targets"], label_smoothing if model.has_rng("dropout") else 0.0)
    aux = {"accuracy": Mean.empty().update(correct(logits, batch["targets"]), batch["mask"])}
    return _sums(loss, batch["mask"], aux)


def _sums(loss, mask, aux):
    loss = Mean.empty().update(loss, mask)
    return loss.total, loss.weight, {"loss": loss, **aux}


OBJECTIVES = {
    "classification": classification,
    "causal_lm": causal_lm,
    "masked_lm": masked_lm,
    "pretraining": pretraining,
    "sequence_to_sequence": sequence_to_sequence,
}
