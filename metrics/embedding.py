"""How alike two texts are by the vectors of their tokens: BERTScore (arXiv 1904.09675), MoverScore (arXiv 1909.02622).

Both are given `embed`, a function that makes `Embedded` of texts; `train.encoder.Encoder` is one. It is asked once for
all texts, of which none comes twice.
"""

import csv
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_ROOM = 16  # lengths are padded to multiples of it, so that few shapes are compiled


class Embedded(NamedTuple):
    """A text's tokens, of which the first and the last are special ([CLS], [SEP]), and their vectors."""

    ids: Int[np.ndarray, "T"]
    vectors: Float[np.ndarray, "T D"]


Embed = Callable[[Sequence[str]], Sequence[Embedded]]


class BERTScore(NamedTuple):
    """Of each text."""

    precision: Float[np.ndarray, "N"]
    recall: Float[np.ndarray, "N"]
    f: Float[np.ndarray, "N"]


def bert_score(
    candidates: Sequence[str],
    references: Sequence[str | Sequence[str]],
    embed: Embed,
    *,
    idf: bool = False,
    baseline: tuple[float, float, float] | None = None,
    batch_size: int = 64,
) -> BERTScore:
    """The mean similarity of each token to the most similar one of the other text, as `bert-score` has it.

    Special tokens do not count, but may be the most similar ones. Of several references the highest precision, recall
    and F1 count, each by itself. 0 where a text is empty, or has no token with a weight. Padding plays no part; in
    `bert-score` a token that is like none of a padded text's has the similarity 0.

    Args:
        candidates, references: texts, and of each its reference or references.
        embed: see the module.
        idf: tokens are weighted by how few references have them.
        baseline: precision, recall and F1 that become 0, see `read_baseline`.
        batch_size: pairs of texts that are compared at once.

    Raises:
        ValueError: there are not as many references as candidates, a text has none, or idf is of one reference.
    """
    pairs, first, known = _paired(candidates, references, embed)
    rarity = _idf([known[text] for _, text in pairs]) if idf else None
    weights = {text: _weights(each, rarity) for text, each in known.items()}
    lengths = [max(len(known[text].ids) for text in pair) for pair in pairs]
    order = sorted(range(len(pairs)), key=lengths.__getitem__)
    scores = np.zeros((len(pairs), 3))
    for start in range(0, len(pairs), batch_size):
        batch = order[start : start + batch_size]
        # A batch that is not full is filled with the last pair.
        texts = zip(*[pairs[i] for i in batch + batch[-1:] * (batch_size - len(batch))])
        room = -(-lengths[batch[-1]] // _ROOM) * _ROOM
        parts = greedy_match(*[_padded(some, known, weights, room) for some in texts])
        scores[batch] = np.stack(parts, axis=1)[: len(batch)]
    scores = np.maximum.reduceat(scores, first)
    if baseline is not None:
        scores = (scores - baseline) / (1 - np.array(baseline))
    return BERTScore(*scores.T)


def read_baseline(path: str | os.PathLike, layer: int) -> tuple[float, float, float]:
    """A layer's precision, recall and F1 from a file of `bert-score`: lines of layer,P,R,F below a head.

    Raises:
        ValueError: the file is none, or has no such layer.
    """
    try:
        with open(path, encoding="utf-8") as file:
            rows = {int(row["LAYER"]): tuple(float(row[name]) for name in "PRF") for row in csv.DictReader(file)}
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is no baseline: it must be lines of LAYER,P,R,F, these names in the first.") from None
    if layer not in rows:
        raise ValueError(f"{path} has no layer {layer}: it has {', '.join(map(str, rows))}.")
    return rows[layer]


class Batch(NamedTuple):
    """Texts, padded: their tokens' vectors and weights, and how many tokens each has."""

    vectors: Float[np.ndarray | Array, "B T D"]
    weights: Float[np.ndarray | Array, "B T"]
    lengths: Int[np.ndarray | Array, "B"]


@jax.jit
def greedy_match(candidates: Batch, references: Batch) -> tuple[Float[Array, "B"], ...]:
    """Precision, recall and F1 of texts (arXiv 1904.09675, section 3)."""
    both = (candidates, references)
    ours, theirs = (each.vectors / jnp.linalg.norm(each.vectors, axis=-1, keepdims=True) for each in both)
    rows, columns = (jnp.arange(each.vectors.shape[1]) < each.lengths[:, None] for each in both)
    similarity = jnp.einsum("BTD,BSD->BTS", ours, theirs, precision="highest")
    similarity = jnp.where(rows[:, :, None] & columns[:, None], similarity, -jnp.inf)
    full = (candidates.lengths > 2) & (references.lengths > 2)

    def mean(best, weights):
        total = weights.sum(axis=1)
        return jnp.where(full, jnp.where(weights > 0, weights * best, 0).sum(axis=1) / jnp.where(total, total, 1), 0)

    precision = mean(similarity.max(axis=2), candidates.weights)
    recall = mean(similarity.max(axis=1), references.weights)
    total = precision + recall
    return precision, recall, jnp.where(total != 0, 2 * precision * recall / jnp.where(total != 0, total, 1), 0)


def power_means(layers: Float[Array, "L B T D"]) -> Float[Array, "B T E"]:
    """Each token's smallest, mean and largest value over layers, of vectors of unit length (MoverScore, section 3.2):
    E = 3 D."""
    layers = layers / jnp.linalg.norm(layers, axis=-1, keepdims=True)
    return jnp.concatenate([layers.min(axis=0), layers.mean(axis=0), layers.max(axis=0)], axis=-1)


def mover_score(
    candidates: Sequence[str],
    references: Sequence[str | Sequence[str]],
    embed: Embed,
    *,
    version: Literal[1, 2] = 1,
    size: int = 1,
    idf: bool = True,
    skip: Collection[int] = frozenset(),
    entropy: float = 0.0,
) -> Float[np.ndarray, "N"]:
    """How little has to be moved how far to make a text's n-grams those of its reference.

    Version 1 is 1 less the earth mover's distance with squared Euclidean costs, which may be negative, of the
    `power_means` of the last five layers. Version 2 is 1 / (1 + distance) with Euclidean costs, of single tokens in the
    last layer. Of several references the mean, as in the authors' example; 0 where a text has no token with a weight.

    Args:
        candidates, references: texts, and of each its reference or references.
        embed: see the module.
        version: of the authors' programs.
        size: n, in version 1.
        idf: tokens are weighted by how few texts have them, candidates and references apart.
        skip: ids of tokens that take no part: punctuation, stop words, those that go on a word.
        entropy: how much the transport's entropy counts (Sinkhorn's distance); 0 is the exact one.

    Raises:
        ValueError: there are not as many references as candidates, a text has none, idf is of one text, or an option is
            out of range.
    """
    if version not in (1, 2) or size < 1 or entropy < 0:
        raise ValueError(f"{version=}, {size=}, {entropy=}: it must be 1 or 2, at least 1, and at least 0.")
    pairs, first, known = _paired(candidates, references, embed)
    # Each text counts once in its own group's weights, a candidate whatever the number of its references.
    sides = [candidates, [reference for _, reference in pairs]]
    rarities = [_idf([known[text] for text in side]) if idf else None for side in sides]
    grams = [
        {text: _ngrams(known[text], rarity, skip, size if version == 1 else 1) for text in set(side)}
        for side, rarity in zip(sides, rarities)
    ]
    scores = [_moved(grams[0][text], grams[1][reference], version, entropy) for text, reference in pairs]
    return np.add.reduceat(scores, first) / np.diff([*first, len(pairs)])


def _paired(candidates, references, embed):
    """Every text beside each of its references, where each text's pairs begin, and what all texts are embedded as."""
    if not candidates or len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} texts and {len(references)} references: as many of each, at least one.")
    groups = [[group] if isinstance(group, str) else list(group) for group in references]
    if not all(groups):
        raise ValueError(f"text {groups.index([])} has no reference: give at least one.")
    pairs = [(text, reference) for text, group in zip(candidates, groups) for reference in group]
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    return pairs, np.cumsum([0, *map(len, groups)])[:-1], dict(zip(texts, embed(texts), strict=True))


def _idf(texts):
    """-log of the part of the texts that have a token, one more text having all; by id."""
    if len(texts) < 2:
        raise ValueError("idf needs at least 2 texts, or all tokens have the weight 0: set idf=False.")
    counts = Counter(id for text in texts for id in set(text.ids.tolist()))
    return {None: math.log(len(texts) + 1)} | {id: math.log((len(texts) + 1) / (n + 1)) for id, n in counts.items()}


def _weights(text: Embedded, rarity: Mapping[int | None, float] | None):
    """Of each token; without idf all but the special ones are alike."""
    if rarity is not None:
        return np.array([rarity.get(id, rarity[None]) for id in text.ids.tolist()], np.float32)
    weights = np.ones(len(text.ids), np.float32)
    weights[[0, -1]] = 0
    return weights


def _padded(texts, known, weights, room):
    some = [known[text] for text in texts]
    lengths = np.array([len(each.ids) for each in some])
    vectors = np.ones((len(some), room, some[0].vectors.shape[1]), np.float32)
    padded = np.zeros((len(some), room), np.float32)
    for row, (text, each) in enumerate(zip(texts, some)):
        vectors[row, : lengths[row]], padded[row, : lengths[row]] = each.vectors, weights[text]
    return Batch(vectors, padded, lengths)


def _ngrams(text, rarity, skip, size):
    """The unit vectors [N, D] and the weights [N] of runs of tokens, whose vectors are means by weight."""
    kept = np.array([id not in skip for id in text.ids.tolist()])
    weights = np.ones(kept.sum()) if rarity is None else _weights(text, rarity)[kept].astype(float)
    vectors = text.vectors[kept].astype(float)
    starts = np.arange(max(len(vectors) - size + 1, min(len(vectors), 1)))
    runs = starts[:, None] + np.arange(min(size, len(vectors)))
    total = weights[runs].sum(axis=1)
    vectors = (weights[runs][..., None] * vectors[runs]).sum(axis=1)[total > 0]
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), total[total > 0]


def _moved(ours, theirs, version, entropy):
    """The score of n-grams beside others."""
    import ot

    (ours, weights), (theirs, other) = ours, theirs
    if not len(ours) or not len(theirs):
        return 0.0
    costs = np.clip(2 - 2 * ours @ theirs.T, 0, None)
    costs = costs if version == 1 else costs**0.5
    masses = weights / weights.sum(), other / other.sum()
    distance = ot.sinkhorn2(*masses, costs, entropy, "sinkhorn_log") if entropy else ot.emd2(*masses, costs)
    return 1 - float(distance) if version == 1 else 1 / (1 + float(distance))
