"""Masked language modeling with a teacher."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from lineage.metrics.classification import correct
from lineage.metrics.likelihood import cross_entropy
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result, Weight
from lineage.tasks.losses import divergence, weighted
from lineage.tasks.masked_lm import MaskedLM


@TASKS.register("masked_lm_distillation")
@dataclass(frozen=True)
class MaskedLMDistillation(MaskedLM):
    """Predict the masked tokens of a text as a teacher does (DistilBERT, arXiv 1910.01108, section 3).

    Attributes:
        temperature: distillation temperature of both models (arXiv 1503.02531); 0: hard distillation, with the most
            probable token of the teacher as the target.
        weights: weights of the distillation loss, of the masked language modeling loss, and of 1 - the cosine
            similarity of the last hidden states of both models.
    """

    needs = ("masked_lm", "pretraining")
    needs_teacher = True
    losses = ("teacher", "masked language modeling", "cosine")
    label_smoothing: ClassVar[float] = 0.0  # not an option

    temperature: Weight = 2.0
    weights: tuple[float, ...] = (5.0, 2.0, 1.0)

    def teach(self, teacher: Model, batch: Batch) -> Batch:
        hidden, logits = hidden_and_logits(teacher, batch)
        return {"teacher_hidden": hidden, "teacher_logits": logits}

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the weighted sum of the three losses, given `teacher_logits` [B, M, V], `teacher_hidden` [B, T, D]."""
        hidden, logits = (x.astype(jnp.float32) for x in hidden_and_logits(model, batch))
        their_hidden, their_logits = (batch[f"teacher_{name}"].astype(jnp.float32) for name in ("hidden", "logits"))
        for ours, theirs, name in ((logits, their_logits, "vocab_size"), (hidden, their_hidden, "width")):
            if ours.shape != theirs.shape:
                raise ValueError(f"model.{name} is {ours.shape[-1]}: the teacher's is {theirs.shape[-1]}.")
        soft = divergence(their_logits, logits, self.temperature)
        hard = cross_entropy(logits, batch["targets"])
        real, mask = batch["tokens_mask"], batch["mask"]
        cosine = (hidden * their_hidden).sum(-1) / jnp.maximum(_norm(hidden) * _norm(their_hidden), 1e-8)
        apart = ((1 - cosine) * real).sum(-1, keepdims=True) / jnp.maximum(real.sum(-1, keepdims=True), 1)
        parts = {"soft_loss": soft, "masked_lm_loss": hard, "cosine_loss": jnp.broadcast_to(apart, soft.shape)}
        return weighted(self.weights, parts, mask, accuracy=correct(logits, batch["targets"]))


def hidden_and_logits(model: Model, batch: Batch) -> tuple[Float[Array, "B T D"], Float[Array, "B M V"]]:
    """Return the last hidden states and the logits of the masked tokens."""
    hidden = model.encode(batch["tokens"], mask=batch["tokens_mask"])
    outputs: Any = model.read(hidden, batch["masked_positions"])
    return hidden, outputs[0] if isinstance(outputs, tuple) else outputs


def _norm(x):
    return jnp.linalg.norm(x, axis=-1)
