"""What is learned: functions of a bound model and a batch.

Each returns `(loss_sum, weight, aux)`: the sum of the losses, the sum of their weights, and metric states by name.
Sums, not means, so that the gradients of a batch's parts add up to the whole's: loss = sum of sums / sum of weights.
An objective is called under `flax.linen.apply`; it is in training when the model has a "dropout" rng. The variable
`progress` of the collection "run" is then the part of the run's steps that is done.
"""

import inspect
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


def bidirectional_lm(model: nn.Module, batch: Batch) -> Result:
    """Cross-entropy of `targets` [B, T] given the `tokens` [B, T] up to each, and of the tokens given those after each.

    Counted where `mask` [B, T] is True, both directions alike; the last of the tokens is not guessed: none follows it.
    """
    tokens, mask = batch["tokens"], batch["mask"]
    forward, backward = model(tokens, mask=mask)
    before = {"targets": tokens[:, :-1], "mask": mask[:, :-1] & mask[:, 1:]}
    (loss, weight, aux), (loss_before, weight_before, aux_before) = (
        _of_tokens(model, logits, part, 0.0) for logits, part in ((forward, batch), (backward[:, 1:], before))
    )
    aux = {name: aux[name].merge(aux_before[name]) for name in aux} | {"backward_loss": aux_before["loss"]}
    return loss + loss_before, weight + weight_before, aux


def sequence_to_sequence(
    model: nn.Module,
    batch: Batch,
    *,
    label_smoothing: float = 0.0,
    scheduled_sampling: float = 0.0,
    decay: str = "linear",
) -> Result:
    """Cross-entropy of `targets` [B, T], each given all `inputs` [B, S] and the `tokens` [B, T] up to its own.

    Counted where `mask` [B, T] is True; of the inputs, those where `inputs_mask` [B, S] is True are seen.

    Args:
        label_smoothing: see `cross_entropy`; in training only.
        scheduled_sampling: in training, the part of the tokens in whose place the model reads its own prediction at the
            end of the run (arXiv 1506.03099); it begins at 0.
        decay: a name of `DECAYS`: how the part of the tokens that it is given falls meanwhile.

    Raises:
        ValueError: the decay is unknown, or the model cannot read its own predictions in training.
    """
    options = {}
    if scheduled_sampling:
        if decay not in DECAYS:
            raise ValueError(f"objective.decay is {decay!r}: it must be one of {', '.join(DECAYS)}.")
        if "own_rate" not in inspect.signature(type(model).__call__).parameters:
            raise ValueError(f"scheduled sampling is for seq2seq: {type(model).__name__} is given all tokens at once.")
        if model.has_rng("dropout"):
            progress = model.get_variable("run", "progress", 0.0)
            options["own_rate"] = 1 - DECAYS[decay](progress, 1 - scheduled_sampling)
    logits = model(batch["inputs"], batch["tokens"], inputs_mask=batch["inputs_mask"], **options)
    return _of_tokens(model, logits, batch, label_smoothing)


# From (about) 1 at progress 0 to `end` at progress 1 (arXiv 1506.03099, section 2.4); 100 is the sigmoid's k.
DECAYS = {
    "linear": lambda progress, end: 1 - (1 - end) * progress,
    "exponential": lambda progress, end: end**progress,
    "inverse_sigmoid": lambda progress, end: 100 / (100 + (100 * (1 - end) / end) ** progress),
}


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
    "bidirectional_lm": bidirectional_lm,
    "sequence_to_sequence": sequence_to_sequence,
}
