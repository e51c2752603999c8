"""Questions about contexts (SQuAD, arXiv 1606.05250) as windows of tokens, and answers back from logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lineage.data.content import Question
from lineage.data.examples import encoded
from lineage.data.examples.encoded import Encoded
from lineage.data.tokenizers import Tokenizer

MAX_QUESTION, MAX_ANSWER = 64, 30  # tokens, as in BERT's recipe (arXiv 1810.04805)


@dataclass(frozen=True)
class ContextWindows(Encoded):
    """Windows `[CLS] question [SEP] part of the context [SEP]`.

    Each window has `start` and `end` int32, the positions of the first and last token of the answer, or 0, the position
    of [CLS], if the part does not contain the whole answer. The `offsets` of a window are the characters [T, 2] of the
    context that its tokens stand for; -1 for other tokens.
    """

    questions: Sequence[Question] = ()
    offsets: Sequence[np.ndarray] = ()

    def answers(self, start: np.ndarray, end: np.ndarray) -> list[str]:
        """Return the best answer to each question, given the logits [N, T] of its first and last token in each window.

        It is the span of at most `MAX_ANSWER` tokens with the highest sum of both logits in any window. If some
        questions have no answer, it is "" unless that sum exceeds the lowest sum of [CLS] (arXiv 1810.04805, 4.3).
        """
        best = np.full(len(self.questions), -np.inf)
        nothing = np.full(len(self.questions), np.inf)
        texts = [""] * len(self.questions)
        for row, (question, offsets) in enumerate(zip(self.origins, self.offsets)):
            size = len(offsets)
            scores = start[row, :size, None] + end[row, None, :size]
            real = offsets[:, 0] >= 0
            allowed = np.tri(size, size, MAX_ANSWER - 1, bool) & ~np.tri(size, size, -1, bool)
            inside = np.where(allowed & real & real[:, None], scores, -np.inf)
            first, last = np.unravel_index(inside.argmax(), inside.shape)
            nothing[question] = min(nothing[question], scores[0, 0])
            if inside[first, last] > best[question]:
                best[question] = inside[first, last]
                texts[question] = self.questions[question].context[offsets[first, 0] : offsets[last, 1]].strip()
        if all(question.answers for question in self.questions):
            return texts
        return [text if score > null else "" for text, score, null in zip(texts, best, nothing)]


def encode(questions: Sequence[Question], tokenizer: Tokenizer, length: int, stride: int) -> Encoded:
    """Encode questions in windows over their contexts, `stride` tokens apart (0: without overlap)."""
    encoded.check_length(length, least=16)
    joined, origins, placed, starts, ends = [], [], [], [], []
    contexts = {question.context: None for question in questions}
    contexts = dict(zip(contexts, tokenizer.encode_with_offsets(list(contexts))))
    asked = tokenizer.encode_batch([question.text for question in questions])
    for origin, question in enumerate(questions):
        ids, where = contexts[question.context]
        words = asked[origin][: min(MAX_QUESTION, length // 2)]
        room = length - len(words) - 3
        for first in encoded.window_starts(len(ids), room, stride):
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
    return encoded.collect(joined, origins, length, tokenizer, ContextWindows, **others)


def _span(question, offsets):
    """Return the first and last token of the first answer, or None if the tokens do not contain it."""
    if not question.answers or not len(offsets):
        return None
    start, text = question.answers[0]
    stop = start + len(text)
    if not text or offsets[0, 0] > start or offsets[-1, 1] < stop:
        return None
    first, last = np.argmax(offsets[:, 1] > start), len(offsets) - 1 - np.argmax(offsets[::-1, 0] < stop)
    return (int(first), int(last)) if first <= last else None
