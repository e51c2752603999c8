"""Pairs of texts as token ids, for sequence-to-sequence models and for decoders."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lineage.data.content import PairedTexts, check_length, padded
from lineage.data.loader import ExampleSource
from lineage.data.tokenizers import Tokenizer


@dataclass(frozen=True, eq=False)
class EncodedPairs(ExampleSource):
    """Token ids of inputs and targets, truncated or padded to T = `length`.

    An example has `inputs` int32 [T] and `inputs_mask` bool [T] (True for tokens), and `tokens`, `targets` int32 [T]
    and `mask` bool [T] for the decoder. `tokens` are the targets shifted right by one, after `start`.
    """

    inputs: Sequence[np.ndarray]  # token ids of each text, without an end
    targets: Sequence[np.ndarray]
    references: Sequence[str]  # complete text of each target
    length: int
    end: int  # token that ends inputs and targets, and pads them
    start: int | None  # first token of the decoder; None for `Continuations`
    left_out: int = 0  # number of pairs that do not fit

    def __len__(self) -> int:
        return len(self.inputs)

    @staticmethod
    def size(inputs: np.ndarray, targets: np.ndarray) -> int:
        """Return the number of tokens that a pair needs: those of its longer side and the end."""
        return max(len(inputs), len(targets)) + 1

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each pair (see `size`) after truncation, int64 [N]."""
        return np.minimum(list(map(self.size, self.inputs, self.targets)), self.length)

    @property
    def cut(self) -> int:
        """Number of pairs that are truncated."""
        return sum(size > self.length for size in map(self.size, self.inputs, self.targets))

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        inputs, inputs_mask = with_end([self.inputs[index] for index in indices], self.length, self.end)
        targets, mask = with_end([self.targets[index] for index in indices], self.length, self.end)
        return {"inputs": inputs, "inputs_mask": inputs_mask} | shifted(targets, mask, self.start)


def with_end(texts: Sequence[np.ndarray], length: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids with `end`, truncated or padded to T = `length`, int32 [N, T], and the mask of the tokens."""
    truncated = [tokens[: length - 1] for tokens in texts]
    return padded(truncated, length, end), np.arange(length) <= np.array(list(map(len, truncated)))[:, None]


def shifted(targets: np.ndarray, mask: np.ndarray, start: int) -> dict[str, np.ndarray]:
    """Return targets and their mask, both [N, T], with `tokens`: the targets shifted right, starting with `start`."""
    tokens = np.roll(targets, 1, axis=1)
    tokens[:, 0] = start
    return {"tokens": tokens, "targets": targets, "mask": mask}


class Continuations(EncodedPairs):
    """Pairs for a decoder-only model: each example is the input, `end`, the target and `end` in one sequence.

    An example has `tokens`, `targets` (the next tokens), int32 [T], and `mask` bool [T], True for the tokens of the
    target and its end. Inputs are truncated to make room for the target.
    """

    @staticmethod
    def size(inputs: np.ndarray, targets: np.ndarray) -> int:
        """Return the number of tokens that a pair needs: its sequence without the last token."""
        return len(inputs) + len(targets) + 1

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = np.full((len(indices), self.length + 1), self.end, np.int32)
        mask = np.zeros((len(indices), self.length), bool)
        for row, index in enumerate(indices):
            target = self.targets[index][: self.length - 1]
            source = self.inputs[index][: self.length - 1 - len(target)]
            sequence = [*source, self.end, *target]
            rows[row, : len(sequence)] = sequence
            mask[row, len(source) : len(sequence)] = True
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "mask": mask}


@dataclass(frozen=True, eq=False)
class Prompts(ExampleSource):
    """Token ids of texts to continue: `tokens` int32 [T], padded to a multiple of 16, and `lengths` without padding."""

    texts: Sequence[np.ndarray]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        texts, longest = [self.texts[index] for index in indices], max(map(len, self.texts))
        return {"tokens": padded(texts, -(-longest // 16) * 16), "lengths": np.array(list(map(len, texts)), np.int32)}


def after(begin: int | None, tokens: np.ndarray) -> np.ndarray:
    """Return token ids int32 [N] after the token `begin`, if there is one."""
    return tokens if begin is None else np.append(begin, tokens).astype(np.int32)


def encode_inputs(
    texts: Sequence[np.ndarray], length: int, end: int, start: int | None, kind: type[EncodedPairs] = EncodedPairs
) -> EncodedPairs:
    """Return token ids of inputs, with empty targets."""
    return kind(texts, [np.zeros(0, np.int32)] * len(texts), [""] * len(texts), length, end, start)


def encode(
    texts: PairedTexts,
    tokenizer: Tokenizer,
    length: int,
    drop: bool,
    start: int | None,
    begin: int | None = None,
    kind: type[EncodedPairs] = EncodedPairs,
) -> EncodedPairs:
    """Encode pairs of texts; `drop` omits pairs that do not fit.

    The token `begin`, if any, is before each input, and before each target of an encoder-decoder, after `start`.
    """
    check_length(length, 2, "a token and the end")
    if tokenizer.end_of_text is None:
        raise ValueError("Pairs need a tokenizer with an end of text: this one has none.")
    inputs, targets = (tokenizer.encode_batch(side) for side in texts)
    inputs = [after(begin, tokens) for tokens in inputs]
    targets = targets if start is None else [after(begin, tokens) for tokens in targets]
    kept = [i for i in range(len(inputs)) if not drop or kind.size(inputs[i], targets[i]) <= length]
    if not kept:
        raise ValueError(f"None of {len(inputs)} pairs fits task.sequence_length, which is {length}: increase it.")
    inputs, targets, references = ([side[i] for i in kept] for side in (inputs, targets, texts[1]))
    return kind(inputs, targets, references, length, tokenizer.end_of_text, start, len(texts[0]) - len(kept))
