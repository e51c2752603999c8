"""Input of encoders: `[CLS] first [SEP]` or `[CLS] first [SEP] second [SEP]`, and padding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from lineage.data.content import Question, padded
from lineage.data.loader import ExampleSource
from lineage.data.tokenizers import Tokenizer

ROLES = ("cls", "sep", "pad", "mask")
MAX_ANSWER = 30  # tokens, as in BERT's recipe (arXiv 1810.04805)
Answers = tuple[list[tuple[float, str]], float]  # scores and texts of the best answers, and the score of no answer


@dataclass(frozen=True)
class Encoded(ExampleSource):
    """Sequences of token ids, padded to T = `length` with `pad`, with further arrays.

    An example has `tokens` int32 [T], `segments` int32 [T] (0 for the first text and 1 for the second, or 0 for both),
    `tokens_mask` bool [T] (True for tokens), and the arrays of `per_sequence` and `per_token`; the latter are padded
    with 0 or False.
    """

    tokens: Sequence[np.ndarray]
    seconds: np.ndarray  # position from which the segment of each sequence is 1
    origins: np.ndarray  # index of the text, sentence or question of each sequence; a long text has several sequences
    length: int
    pad: int
    per_sequence: Mapping[str, np.ndarray] = field(default_factory=dict)  # name -> an entry for each sequence
    per_token: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)  # name -> an array for each sequence
    cut: int = 0  # number of texts that are truncated

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_cut(self) -> bool:
        """True if some text has several sequences."""
        return len(self.firsts) < len(self)

    @property
    def firsts(self) -> np.ndarray:
        """Index of the first sequence of each text."""
        return np.flatnonzero(np.diff(self.origins, prepend=-1))

    def means(self, values: np.ndarray) -> np.ndarray:
        """Return the mean [texts, D] of the values [N, D] of the sequences of each text."""
        return np.add.reduceat(values, self.firsts) / np.diff(self.firsts, append=len(values))[:, None]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sequence, int64 [N]."""
        return np.array([len(ids) for ids in self.tokens])

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = {"tokens": padded([self.tokens[index] for index in indices], self.length, self.pad)}
        batch |= {name: padded([rows[i] for i in indices], self.length) for name, rows in self.per_token.items()}
        mask = np.arange(self.length) < self.lengths[indices, None]
        is_second = np.arange(self.length) >= self.seconds[indices, None]
        batch |= {"tokens_mask": mask, "segments": (is_second & mask).astype(np.int32)}
        return batch | {name: values[indices] for name, values in self.per_sequence.items()}


@dataclass(frozen=True)
class ContextWindows(Encoded):
    """Windows `[CLS] question [SEP] part of the context [SEP]` of questions about contexts.

    Each window has `start` and `end` int32, the positions of the first and last token of the answer, or 0, the position
    of [CLS], if the part does not contain the whole answer. The `offsets` [T, 2] of a window are the character ranges
    of its tokens in the context; -1 for other tokens.
    """

    questions: Sequence[Question] = ()
    offsets: Sequence[np.ndarray] = ()

    def answers(self, start: np.ndarray, end: np.ndarray, count: int = 1) -> list[Answers]:
        """Return the best answers to each question, given the logits [N, T] of first and last tokens in each window.

        The answers are the `count` spans of at most `MAX_ANSWER` tokens with the highest sums of both logits in any
        window, best first, with their sums; of equal texts, only the best is kept. The second value is the lowest sum
        at [CLS], which represents no answer (arXiv 1810.04805, section 4.3).
        """
        text_scores: list[dict[str, float]] = [{} for _ in self.questions]
        no_answer = np.full(len(self.questions), np.inf)
        for row, (question, offsets) in enumerate(zip(self.origins, self.offsets)):
            size = len(offsets)
            scores = start[row, :size, None] + end[row, None, :size]
            real = offsets[:, 0] >= 0
            allowed = np.tri(size, size, MAX_ANSWER - 1, bool) & ~np.tri(size, size, -1, bool)
            inside = np.where(allowed & real & real[:, None], scores, -np.inf).ravel()
            no_answer[question] = min(no_answer[question], scores[0, 0])
            best = np.argpartition(-inside, min(count, inside.size) - 1)[:count]
            for place in best[inside[best] > -np.inf]:
                first, last = np.unravel_index(place, scores.shape)
                text = self.questions[question].context[offsets[first, 0] : offsets[last, 1]].strip()
                text_scores[question][text] = max(text_scores[question].get(text, -np.inf), float(inside[place]))
        pairs = ([(score, text) for text, score in answers.items()] for answers in text_scores)
        ordered = [sorted(answers, key=lambda pair: -pair[0])[:count] for answers in pairs]
        return list(zip(ordered, no_answer.tolist()))


def join(tokenizer: Tokenizer, *texts: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the sequence of one or two texts, and the position at which the second text starts.

    As many separators are between the texts as the tokenizer adds there, see `Tokenizer.separators`.
    """
    between = [tokenizer.sep] * (num_added(tokenizer, len(texts)) - len(texts))
    sequence = [tokenizer.cls, *texts[0], *between, *(token for text in texts[1:] for token in (*text, tokenizer.sep))]
    return np.array(sequence, np.int32), 1 + len(texts[0]) + len(between)


def num_added(tokenizer: Tokenizer, texts: int) -> int:
    """Return the number of special tokens that `join` adds to one or two texts."""
    return 2 if texts == 1 else 2 + tokenizer.separators


def collect(
    joined: Sequence[tuple[np.ndarray, int]],
    origins: Sequence[int],
    length: int,
    tokenizer: Tokenizer,
    kind: type[Encoded] = Encoded,
    /,
    **fields: Any,
) -> Encoded:
    """Return the sequences of `join` as a source of examples of a class with additional `fields`.

    The second text has a segment of its own if it has one in the tokenizer, see `Tokenizer.segments`.
    """
    if not joined:
        raise ValueError("The data set is empty: at least one example is needed.")
    tokens, seconds = zip(*joined)
    if tokenizer.segments == 1:
        seconds = [len(sequence) for sequence in tokens]
    return kind(tokens, np.array(seconds), np.array(origins), length, tokenizer.pad, **fields)


def window_starts(count: int, room: int, stride: int) -> range:
    """Return the starts of windows of `room` tokens over `count` tokens, `stride` apart (0: without overlap)."""
    if not 0 <= stride <= room:
        raise ValueError(f"task.stride is {stride}: it must be from 0 (no overlap) to {room}, the tokens of a window.")
    return range(0, max(count - room, 0) + (stride or room), stride or room)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the truncated lengths of two texts: the longer one is truncated first (arXiv 1810.04805).

    If both exceed half of an odd room, the longer text keeps one token more, or the second one of equal texts, as in
    the library `tokenizers`.
    """
    half = (room + (first > second)) // 2
    first = min(first, max(room - second, half))
    return first, min(second, room - first)
