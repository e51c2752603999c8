"""Generated texts beside references."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental.multihost_utils import process_allgather

from lineage.evaluation.base import EVALUATORS, Context, Evaluator, Split
from lineage.evaluation.sampling import Sampler
from lineage.metrics.translation import bleu, bleu_by_length


@EVALUATORS.register("generation")
@dataclass(frozen=True)
class Generation(Evaluator):
    """BLEU and exact match of what a model generates for a split's inputs, as the config's `sampling` says.

    `free_running_accuracy` of an encoder-decoder is the fraction of the target tokens that are generated in place.
    """

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        sampler, outputs, source = Sampler(context), [], split.batches.source
        right = count = 0
        for batch in split.batches:
            batch = process_allgather(context.to_mesh(batch), tiled=True)  # that of all processes
            prompts, lengths, inputs = context.task.requests(batch, split.facts)
            written = process_allgather(sampler.generate(variables, prompts, inputs, lengths), tiled=True)
            outputs += sampler.texts(prompts, written, lengths)
            if inputs is not None:
                right += _in_place(written, batch["targets"], batch["mask"])
                count += batch["mask"].sum()
        references = source.references
        outputs = outputs[: len(references)]  # without the padding of the last batch
        exact = sum(ours == theirs for ours, theirs in zip(outputs, references)) / len(references)
        score, signature = bleu(outputs, references)
        texts = [context.data.tokenizer.decode(tokens) for tokens in source.inputs]
        context.artifacts[f"written_{split.label}"] = {
            "bleu": score,
            "signature": signature,
            "by_length": bleu_by_length(outputs, references, [len(line.split()) for line in texts]),
            "rows": list(zip(texts, outputs, references)),
        }
        free = {"free_running_accuracy": float(right / count)} if count else {}
        return {"exact_match": exact, "bleu": score, **free}


def _in_place(written, targets, mask):
    """Return how many targets [B, T], where the mask is True, were generated at their places."""
    tokens, lengths = np.asarray(written.tokens)[:, 1:], np.asarray(written.lengths) - 1
    size = min(tokens.shape[1], targets.shape[1])
    right = (tokens[:, :size] == targets[:, :size]) & (np.arange(size) < lengths[:, None])
    return (right & mask[:, :size]).sum()
