"""Bidirectional language modeling."""

from dataclasses import dataclass
from typing import ClassVar

from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result
from lineage.tasks.causal_lm import CausalLM
from lineage.tasks.losses import token_loss


@TASKS.register("bidirectional_lm")
@dataclass(frozen=True)
class BidirectionalLM(CausalLM):
    """Predict each token from those before it, and with a second model from those after it (ELMo, arXiv 1802.05365)."""

    needs = ("both_directions",)
    label_smoothing: ClassVar[float] = 0.0  # not an option

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the sum of the forward and backward language modeling losses, where `mask` [B, T] is True.

        The backward model does not predict the last token, because none follows it.
        """
        tokens, mask = batch["tokens"], batch["mask"]
        forward, backward = model(tokens, mask=mask)
        before = {"targets": tokens[:, :-1], "mask": mask[:, :-1] & mask[:, 1:]}
        (loss, weight, aux), (loss_before, weight_before, aux_before) = (
            token_loss(model, logits, part) for logits, part in ((forward, batch), (backward[:, 1:], before))
        )
        aux = {name: aux[name].merge(aux_before[name]) for name in aux} | {"backward_loss": aux_before["loss"]}
        return loss + loss_before, weight + weight_before, aux
