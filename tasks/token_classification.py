"""Token classification: a tag for each word of a sentence."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Shaped

from lineage.data import Examples, ExampleSource, Facts, TaggedSentence, Tokenizer
from lineage.data.content import check_length
from lineage.data.examples import encoded
from lineage.data.examples.encoded import Encoded
from lineage.tasks.base import TASKS, InputExamples
from lineage.tasks.text import EncoderTask


@TASKS.register("token_classification")
@dataclass(frozen=True)
class TokenClassification(EncoderTask):
    """Predict the tag of each word of a sentence, at the first token of the word.

    Attributes:
        sequence_length: number of tokens of a sequence, special tokens included; longer sentences are split.
    """

    reads = "tagged_sentences"
    needs = ("token_classification",)
    head = "token_classification"
    evaluators = ("loss", "tagging")
    arrays = EncoderTask.arrays | {"targets": "int32 B T", "mask": "bool B T"}

    def texts(self, content: Mapping[str, list[TaggedSentence]]) -> dict[str, Iterable[str]]:
        return {name: ["".join(sentence.words) for sentence in part] for name, part in content.items()}

    def examples(self, content: Mapping[str, list[TaggedSentence]], tokenizer: Tokenizer | None, seed: int) -> Examples:
        tags = sorted({tag for part in content.values() for sentence in part for tag in sentence.tags})
        if self.known:
            if unknown := set(tags) - set(self.known.class_names):
                raise ValueError(f"The tag {min(unknown)!r} is not one of {', '.join(self.known.class_names)}.")
            tags = list(self.known.class_names)
        splits = {name: encode(part, tags, tokenizer, self.sequence_length) for name, part in content.items()}
        facts = self.facts(tokenizer, num_classes=len(tags), class_names=tuple(tags))
        return Examples(splits, facts)

    def input_examples(self, rows: Sequence[TaggedSentence], tokenizer: Tokenizer, facts: Facts) -> InputExamples:
        return InputExamples(encode(rows, (), tokenizer, self.sequence_length))

    def predict(self, outputs: Any, inputs: ExampleSource, facts: Facts) -> list[dict[str, Any]]:
        """Return the tags of the words of each sentence, which may span several sequences."""
        names = np.array(facts.class_names or [*map(str, range(outputs.shape[-1]))])
        chosen = outputs[..., : len(names)].argmax(axis=-1)  # the model may have more classes than the data
        return [{"tags": tags} for tags in tags_of(chosen, inputs, names)]


def tags_of(
    numbers: Sequence[np.ndarray] | np.ndarray, source: Encoded, names: Shaped[np.ndarray, "V"]
) -> list[list[str]]:
    """Return the tags of each sentence, given the index of the tag at each token of each sequence."""
    tags = defaultdict(list)
    for sentence, row, mask in zip(source.origins.tolist(), numbers, source.per_token["mask"]):
        tags[sentence] += names[row[: len(mask)][mask]].tolist()
    return [*tags.values()]


def encode(sentences: Sequence[TaggedSentence], tags: Sequence[str], tokenizer: Tokenizer, length: int) -> Encoded:
    """Encode sentences; `targets` int32 [T] has the index of each word's tag at its first token, where `mask` is True.

    Without `tags`, the targets are 0. A sentence that does not fit continues in the next sequence. A word that is
    longer than a sequence is truncated. A word that has no tokens becomes a mask token.
    """
    check_length(length, 4)
    number_of, room = {tag: number for number, tag in enumerate(tags)}, length - 2
    joined, origins, targets, masks = [], [], [], []
    of_words = iter(tokenizer.encode_batch([word for sentence in sentences for word in sentence.words]))
    for origin, sentence in enumerate(sentences):
        words = [ids[:room] if len(ids) else [tokenizer.mask] for ids in islice(of_words, len(sentence.words))]
        ends = np.cumsum([len(ids) for ids in words])
        first = 0
        while first < len(words):
            before = ends[first - 1] if first else 0
            last = int(np.searchsorted(ends, before + room, side="right"))
            joined.append(encoded.join(tokenizer, np.concatenate(words[first:last])))
            origins.append(origin)
            starts = 1 + np.concatenate([[0], ends[first : last - 1] - before]).astype(int)
            targets.append(np.zeros(len(joined[-1][0]), np.int32))
            targets[-1][starts] = [number_of[tag] for tag in sentence.tags[first:last]] if tags else 0
            masks.append(np.isin(np.arange(len(targets[-1])), starts))
            first = last
    return encoded.collect(joined, origins, length, tokenizer, per_token={"targets": targets, "mask": masks})
