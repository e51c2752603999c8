"""Generated texts compared with references."""

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
    """BLEU and exact match of texts generated with the config's `sampling` options.

    `free_running_accuracy` of an encoder-decoder is the fraction of target tokens generated at the correct position.
    """

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        sampler, outputs, source = Sampler(context), [], split.batches.source
        right = count = 0
        for batch in split.batches:
            batch = process_allgather(context.to_mesh(batch), tiled=True)  # of all processes
            request = context.task.requests(batch, split.facts)
            generated = process_allgather(sampler.generate(variables, request), tiled=True)
            outputs += sampler.texts(request, generated)
            if request.inputs is not None:
                right += _in_place(generated, batch["targets"], batch["mask"])
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


def _in_place(generated, targets, mask):
    """Return the number of targets [B, T], where the mask is True, that were generated at their positions."""
    tokens, lengths = np.asarray(generated.tokens)[:, 1:], np.asarray(generated.lengths) - 1
    size = min(tokens.shape[1], targets.shape[1])
    right = (tokens[:, :size] == targets[:, :size]) & (np.arange(size) < lengths[:, None])
    return (right & mask[:, :size]).sum()
