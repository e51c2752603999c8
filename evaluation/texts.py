"""Evaluators of text tasks."""

from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
from jaxtyping import Float

from lineage.data.examples.encoded import Encoded
from lineage.evaluation.base import EVALUATORS, Context, Evaluator, Split
from lineage.evaluation.sampling import Sampler
from lineage.evaluation.score import check, score_texts
from lineage.metrics.answers import exact_match, f1
from lineage.metrics.classification import regression
from lineage.metrics.tagging import Spans, is_chunk
from lineage.metrics.translation import bleu, bleu_by_length
from lineage.tasks.prediction import probabilities_of
from lineage.tasks.token_classification import tags_of


@EVALUATORS.register("generation")
@dataclass(frozen=True)
class Generation(Evaluator):
    """BLEU and exact match of texts generated with the config's `sampling` options.

    `free_running_accuracy` of an encoder-decoder is the fraction of target tokens generated at the correct position.

    Attributes:
        metrics: additional metrics of the command `score`, each with its options, such as "chrf", "rouge kinds=1,2,L"
            and "bert_score model=FOLDER layer=9".
    """

    task_specific = True

    metrics: tuple[str, ...] = ()

    def check(self, context: Context) -> None:
        super().check(context)
        for metric in self.metrics:
            check(metric, "evaluators.generation.metrics")
        new, limit = context.sampling.max_new_tokens, context.model.max_length
        if self.every:
            Sampler(context)  # raises ValueError for options that do not fit together
        if self.every and context.facts.start_token is None and limit and new >= limit:
            given = f"sampling.max_new_tokens is {new} and model.max_length is {limit}"
            raise ValueError(f"{given}: the former must be lower, because the tokens of a prompt count, too.")

    def names(self, context: Context, split: Split) -> tuple[str, ...] | None:
        return None if self.metrics else ("exact_match", "bleu", "free_running_accuracy")

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        sampler, outputs, source = Sampler(context), [], split.batches.source
        right = count = 0
        for batch, generated, texts in sampler.batches(variables, split.batches, split.facts):
            outputs += texts
            if "inputs" in batch:
                right += _in_place(generated, batch["targets"], batch["mask"])
                count += batch["mask"].sum()
        references = source.references
        outputs = outputs[: len(references)]  # without the padding of the last batch
        exact = sum(ours == theirs for ours, theirs in zip(outputs, references)) / len(references)
        score, signature = bleu(outputs, references)
        texts = [context.tokenizer.decode(tokens[tokens != split.facts.begin_token]) for tokens in source.inputs]
        by_length = bleu_by_length(outputs, references, [len(line.split()) for line in texts])
        written = {"bleu": score, "signature": signature, "by_length": by_length}
        context.artifacts[f"written_{split.label}"] = written | {"rows": list(zip(texts, outputs, references))}
        metrics = {"exact_match": exact, "bleu": score}
        if count:
            metrics["free_running_accuracy"] = float(right / count)
        for metric in self.metrics:
            metrics |= score_texts(metric, outputs, references)
        return metrics


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

    returns = ("exact_match", "f1")
    task_specific = True

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        answers = [row["prediction"] for row in predicted(context, variables, split)]
        references = [question.references for question in split.batches.source.questions]
        return {score.__name__: float(np.mean(list(map(score, answers, references)))) for score in (exact_match, f1)}


@EVALUATORS.register("pooled_accuracy")
@dataclass(frozen=True)
class PooledAccuracy(Evaluator):
    """Accuracy of the classes of long texts, by the mean and by the maximum of the probabilities of their windows.

    Splits without texts of several windows are skipped.
    """

    returns = ("mean_pooled_accuracy", "max_pooled_accuracy")
    task_specific = True

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        source = split.batches.source
        return pooled_accuracy(logits(context, variables, split), source, context.task.binary) if source.is_cut else {}


@EVALUATORS.register("regression")
@dataclass(frozen=True)
class Regression(Evaluator):
    """Pearson's and Spearman's correlation of predicted and true values, and their mean squared error.

    All are nan if a predicted value is not finite.
    """

    returns = ("pearson", "spearman", "mse")
    task_specific = True

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        values, source = [row["value"] for row in predicted(context, variables, split)], split.batches.source
        if not np.isfinite(values).all():
            return dict.fromkeys(self.returns, nan)
        return regression(values, source.per_sequence["label"][source.firsts])


@EVALUATORS.register("tagging")
@dataclass(frozen=True)
class Tagging(Evaluator):
    """Precision, recall and F1 of entities, as in the shared tasks of CoNLL; see `metrics.tagging`.

    An entity is correct if its type, first word and last word are. Splits whose tags are not chunk tags, such as B-PER,
    I-PER and O, are skipped.
    """

    returns = ("precision", "recall", "f1")
    task_specific = True

    def measure(self, context: Context, variables: Any, split: Split) -> dict[str, float]:
        names, source = np.array(split.facts.class_names), split.batches.source
        if not all(map(is_chunk, names)) or set(names) == {"O"}:
            return {}
        tags = [row["tags"] for row in predicted(context, variables, split)]
        scores = Spans.empty().update(tags, tags_of(source.per_token["targets"], source, names)).compute()
        return {name: float(value) for name, value in scores._asdict().items()}


def logits(context: Context, variables: Any, split: Split) -> Float[np.ndarray, "N ..."]:
    """Return the outputs of the model for the examples of a split, on the host."""
    return context.rows(context.task.forward, variables, split.batches).astype(np.float32)


def predicted(context: Context, variables: Any, split: Split) -> list[dict[str, Any]]:
    """Return the predictions of the task for the examples of a split."""
    return context.task.predict(logits(context, variables, split), split.batches.source, split.facts)


def pooled_accuracy(logits: Float[np.ndarray, "N V"], source: Encoded, binary: bool = False) -> dict[str, float]:
    """Return the accuracies of `PooledAccuracy`."""
    probabilities, first = probabilities_of(logits, binary), source.firsts
    labels = {"mean": source.means(probabilities), "max": np.maximum.reduceat(probabilities, first)}
    truth = source.per_sequence["label"][first]
    return {f"{name}_pooled_accuracy": float((rows.argmax(axis=-1) == truth).mean()) for name, rows in labels.items()}
