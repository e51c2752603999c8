"""Evaluators of tasks of texts."""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import Float
from scipy.special import softmax

from lineage.data.examples.encoded import Encoded
from lineage.evaluation.base import EVALUATORS, Context, Evaluator, Split
from lineage.evaluation.sampling import Sampler
from lineage.metrics import classification
from lineage.metrics.answers import exact_match, f1
from lineage.metrics.tagging import Spans
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


@EVALUATORS.register("question_answering")
@dataclass(frozen=True)
class QuestionAnswering(Evaluator):
    """Exact match and F1 of predicted answers (SQuAD, arXiv 1606.05250)."""

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        source = split.batches.source
        answers = source.answers(*np.moveaxis(logits(context, variables, split), -1, 0))
        references = [question.references for question in source.questions]
        return {score.__name__: float(np.mean(list(map(score, answers, references)))) for score in (exact_match, f1)}


@EVALUATORS.register("pooled_accuracy")
@dataclass(frozen=True)
class PooledAccuracy(Evaluator):
    """Accuracy of the classes of long texts, by the mean and by the maximum of the probabilities of their windows.

    Splits without texts of several windows are skipped.
    """

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        source = split.batches.source
        return pooled_accuracy(logits(context, variables, split), source) if source.is_cut else {}


@EVALUATORS.register("spearman")
@dataclass(frozen=True)
class Spearman(Evaluator):
    """Spearman's rank correlation of predicted and true values; 0 if one of them is constant."""

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        values, labels = logits(context, variables, split)[:, 0], split.batches.source.per_sequence["label"]
        return {"spearman": np.nan_to_num(classification.spearman(values, labels)).item()}


@EVALUATORS.register("tagging")
@dataclass(frozen=True)
class Tagging(Evaluator):
    """Precision, recall and F1 of entities, as in the shared tasks of CoNLL; see `metrics.tagging`.

    An entity is correct if its type, first word and last word are. Splits whose tags are not those of chunks, such as
    B-PER, I-PER and O, are skipped.
    """

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        names, source = np.array(split.facts.class_names), split.batches.source
        chunks = all(name == "O" or re.match("[BIESLU]-", name) for name in names)
        if not chunks or set(names) == {"O"}:
            return {}
        guesses = logits(context, variables, split).argmax(axis=-1)
        found, truth = defaultdict(list), defaultdict(list)
        columns = source.origins.tolist(), guesses, source.per_token["targets"], source.per_token["mask"]
        for sentence, guess, targets, mask in zip(*columns):  # a long sentence is several sequences
            found[sentence] += names[guess[: len(mask)][mask]].tolist()
            truth[sentence] += names[targets[mask]].tolist()
        scores = Spans.empty().update([*found.values()], [*truth.values()]).compute()
        return {name: float(value) for name, value in scores._asdict().items()}


def logits(context: Context, variables: Any, split: Split) -> Float[np.ndarray, "N ..."]:
    """Return the outputs of the model for the examples of a split, on the host."""
    return context.rows(context.task.forward, variables, split.batches).astype(np.float32)


def pooled_accuracy(logits: Float[np.ndarray, "N V"], source: Encoded) -> dict[str, float]:
    """Return the accuracies of `PooledAccuracy`."""
    probabilities = softmax(logits, axis=-1)
    first = np.flatnonzero(np.diff(source.origins, prepend=-1))
    pools = {"mean": np.add, "max": np.maximum}
    pooled = {name: pool.reduceat(probabilities, first).argmax(axis=-1) for name, pool in pools.items()}
    return {f"{k}_pooled_accuracy": float((v == source.per_sequence["label"][first]).mean()) for k, v in pooled.items()}
