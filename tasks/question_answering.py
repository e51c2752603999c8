"""Extractive question answering: answers are spans of a text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from lineage.configs.registry import Natural
from lineage.data import Examples, ExampleSource, Facts, Question, Tokenizer
from lineage.data.content import check_length
from lineage.data.examples import encoded
from lineage.metrics.classification import correct
from lineage.metrics.likelihood import cross_entropy
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, InputExamples, Result
from lineage.tasks.losses import sums
from lineage.tasks.prediction import TOP
from lineage.tasks.text import EncoderTask

NEVER = -1e9  # logit of padding
MAX_QUESTION = 64  # maximum number of tokens, as in BERT's recipe (arXiv 1810.04805)


@TASKS.register("question_answering")
@dataclass(frozen=True)
class QuestionAnswering(EncoderTask):
    """Find the answer to a question in a text (SQuAD; BERT, arXiv 1810.04805, sections 4.2 and 4.3).

    Attributes:
        stride: distance between the starts of consecutive windows of a long text, in tokens; 0: no overlap, as for
            windows that are shorter because the question is long.
        unanswerable: whether questions may have no answer; None: if some training question has none, which is not known
            of a folder in the layout of `transformers`.
        no_answer_threshold: predict "" if questions may have no answer, and the no-answer score exceeds that of the
            best answer by at least this much.
    """

    reads = "questions"
    needs = ("question_answering",)
    head = "question_answering"
    evaluators = ("loss", "question_answering")
    arrays = EncoderTask.arrays | {"start": "int32 B", "end": "int32 B", "mask": "bool B"}

    label_smoothing: ClassVar[float] = 0.0  # not an option

    stride: Natural = 0
    unanswerable: bool | None = None
    no_answer_threshold: float = 0.0

    def texts(self, content: Mapping[str, list[Question]]) -> dict[str, Iterable[str]]:
        return {name: [text for item in part for text in (item.text, item.context)] for name, part in content.items()}

    def examples(self, content: Mapping[str, list[Question]], tokenizer: Tokenizer | None, seed: int) -> Examples:
        sizes = self.sequence_length, self.stride
        splits = {name: encode(part, tokenizer, *sizes) for name, part in content.items()}
        answered = all(question.answers for question in content.get("train", ()))
        has_unanswerable = self.known.has_unanswerable if self.known else not answered
        return Examples(splits, self.facts(tokenizer, has_unanswerable=has_unanswerable))

    def input_examples(self, rows: Sequence[Question], tokenizer: Tokenizer, facts: Facts) -> InputExamples:
        return InputExamples(encode(rows, tokenizer, self.sequence_length, self.stride))

    def predict(self, outputs: Any, inputs: ExampleSource, facts: Facts) -> list[dict[str, Any]]:
        """Return the best answer to each question, the best answers with their scores, and the no-answer score."""
        predictions, possible = [], facts.has_unanswerable if self.unanswerable is None else self.unanswerable
        for best, no_answer in inputs.answers(*np.moveaxis(outputs.astype(np.float32), -1, 0), TOP):
            scored = [{"text": text, "score": score} for score, text in best]
            has_none = not best or (possible and no_answer - best[0][0] >= self.no_answer_threshold)
            answer = {"prediction": "" if has_none else best[0][1], "n_best": scored}
            predictions.append(answer | ({"no_answer_score": no_answer} if possible else {}))
        return predictions

    def document(self, predictions: Iterable[dict[str, Any]]) -> dict[str, str]:
        """Return the answers by question id, in the format of SQuAD's evaluation; "" for errors."""
        return {row["id"]: row.get("prediction", "") for row in predictions if "id" in row}

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the mean cross-entropy of the positions `start` and `end` [B] of answers, where `mask` [B] is True.

        An answer is correct if both positions are correct. Unlike in BERT's code, padding is masked out.
        """
        logits = self.forward(model, batch).astype(jnp.float32)
        logits = jnp.where(batch["tokens_mask"][..., None], logits, NEVER)
        first, last = logits[..., 0], logits[..., 1]
        loss = (cross_entropy(first, batch["start"]) + cross_entropy(last, batch["end"])) / 2
        both = correct(first, batch["start"]) & correct(last, batch["end"])
        return sums(loss, batch["mask"], {"accuracy": both})


def encode(questions: Sequence[Question], tokenizer: Tokenizer, length: int, stride: int) -> encoded.ContextWindows:
    """Encode questions with windows of their contexts, `stride` tokens apart (0, or above their length: no overlap)."""
    check_length(length, 16)
    added = encoded.num_added(tokenizer, 2)
    encoded.window_starts(0, length - added, stride)  # raises ValueError for a stride above the longest window
    joined, origins, placed, starts, ends = [], [], [], [], []
    contexts = {question.context: None for question in questions}
    contexts = dict(zip(contexts, tokenizer.encode_with_offsets(list(contexts))))
    asked = tokenizer.encode_batch([question.text for question in questions])
    for origin, question in enumerate(questions):
        ids, where = contexts[question.context]
        words = asked[origin][: min(MAX_QUESTION, length // 2)]
        room = length - len(words) - added
        for first in encoded.window_starts(len(ids), room, min(stride, room)):
            part, offsets = ids[first : first + room], where[first : first + room]
            row, second = encoded.join(tokenizer, words, part)
            outside = np.full((second, 2), -1)
            joined.append((row, second))
            origins.append(origin)
            placed.append(np.concatenate([outside, offsets, outside[:1]]))
            span = _span(question, offsets)
            starts.append(span[0] + second if span else 0)
            ends.append(span[1] + second if span else 0)
    per_sequence = {"start": np.array(starts, np.int32), "end": np.array(ends, np.int32)}
    others = {"per_sequence": per_sequence, "questions": questions, "offsets": placed}
    return encoded.collect(joined, origins, length, tokenizer, encoded.ContextWindows, **others)


def _span(question, offsets):
    """Return the first and last token of the first answer, or None if the tokens do not contain it."""
    if not question.answers or not len(offsets):
        return None
    start, text = question.answers[0]
    stop = start + len(text)
    if offsets[0, 0] > start or offsets[-1, 1] < stop:
        return None
    first, last = np.argmax(offsets[:, 1] > start), len(offsets) - 1 - np.argmax(offsets[::-1, 0] < stop)
    return (int(first), int(last)) if first <= last else None
