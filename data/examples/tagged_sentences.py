"""Tagged sentences as token ids, with the tag of each word at its first token."""

from collections.abc import Sequence
from itertools import islice

import numpy as np

from lineage.data.content import TaggedSentence
from lineage.data.examples import encoded
from lineage.data.examples.encoded import Encoded
from lineage.data.tokenizers import Tokenizer


def names(splits: dict[str, list[TaggedSentence]]) -> list[str]:
    """Return the tags of all splits in alphabetical order."""
    return sorted({tag for part in splits.values() for sentence in part for tag in sentence.tags})


def encode(sentences: Sequence[TaggedSentence], tags: Sequence[str], tokenizer: Tokenizer, length: int) -> Encoded:
    """Encode sentences; `targets` int32 [T] has the index of each word's tag at its first token, where `mask` is True.

    A sentence that does not fit continues in the next sequence. A word that is longer than a sequence is truncated. A
    word that has no tokens becomes a mask token.
    """
    encoded.check_length(length)
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
            targets[-1][starts] = [number_of[tag] for tag in sentence.tags[first:last]]
            masks.append(np.isin(np.arange(len(targets[-1])), starts))
            first = last
    return encoded.collect(joined, origins, length, tokenizer, per_token={"targets": targets, "mask": masks})
