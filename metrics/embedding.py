"""Similarity of texts by contextual token embeddings: BERTScore (arXiv 1904.09675), MoverScore (arXiv 1909.02622).

Both take `embed`, a function from texts to `Embedded` such as `evaluation.encoder.Encoder`; each text is embedded once.
"""

import csv
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lineage.metrics.summary import grouped


class Embedded(NamedTuple):
    """Token ids and vectors of a text; the first and the last token are special ([CLS], [SEP])."""

    ids: Int[np.ndarray, "T"]
    vectors: Float[np.ndarray, "T D"]


Embed = Callable[[Sequence[str]], Sequence[Embedded]]


class BERTScore(NamedTuple):
    """Precision, recall and F1 of each text, at most 1."""

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
) -> BERTScore:
    """Return BERTScore as in `bert-score`: mean cosine similarities of greedily matched tokens.

    Special tokens have weight 0, but can be matched. With several references, precision, recall and F1 are maximized
    separately. A text that is empty or has a total weight of 0 scores 0. Padding has no influence, whereas `bert-score`
    lets padding match with similarity 0, so that a token with only negative similarities scores 0.

    Args:
        references: one or several texts per candidate.
        idf: whether to weight tokens by their inverse document frequency in the references, of which there must be two.
        baseline: precision, recall and F1 that are rescaled to 0, see `read_baseline`.
    """
    pairs, first, known = _paired(candidates, references, embed)
    rarity = _idf([known[reference] for _, reference in pairs]) if idf else None
    weights = {text: _weights(embedded, rarity) for text, embedded in known.items()}
    scores = [_bert_score(*(known[text] for text in pair), *(weights[text] for text in pair)) for pair in pairs]
    scores = np.maximum.reduceat(np.array(scores), first)
    if baseline is not None:
        scores = (scores - baseline) / (1 - np.array(baseline))
    return BERTScore(*scores.T)


def read_baseline(path: str | os.PathLike, layer: int) -> tuple[float, float, float]:
    """Read the precision, recall and F1 of a layer from a baseline file of `bert-score` (CSV: LAYER,P,R,F)."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = csv.DictReader(file)
            rows = {int(row["LAYER"]): (float(row["P"]), float(row["R"]), float(row["F"])) for row in lines}
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not a baseline file: it must be CSV with the header LAYER,P,R,F.") from None
    if layer not in rows:
        raise ValueError(f"{path} has no layer {layer}: it has {', '.join(map(str, rows))}.")
    return rows[layer]


def power_means(layers: Float[Array, "L B T D"]) -> Float[Array, "B T E"]:
    """Concatenate the minimum, mean and maximum over layers of unit vectors, E = 3 D (arXiv 1909.02622, 3.2)."""
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
    """Return MoverScore: a similarity from the earth mover's distance between the n-grams of two texts.

    Version 1 is 1 - distance (which can be negative) with squared Euclidean costs between the `power_means` of the last
    five layers. Version 2 is 1 / (1 + distance) with Euclidean costs between single tokens of the last layer. With
    several references, the scores are averaged. A text with a total weight of 0 scores 0.

    Args:
        references: one or several texts per candidate.
        version: version of the authors' program.
        size: n of the n-grams; ignored by version 2.
        idf: whether to weight tokens by inverse document frequency, separately in candidates and references.
        skip: ids of tokens to ignore, such as punctuation and stop words.
        entropy: entropic regularization (Sinkhorn distance); 0: the exact distance.
    """
    if version not in (1, 2) or size < 1 or entropy < 0:
        raise ValueError(f"{version=}, {size=} and {entropy=}: they must be 1 or 2, at least 1, and at least 0.")
    pairs, first, known = _paired(candidates, references, embed)
    # A candidate counts once in the document frequencies, whatever the number of its references.
    grams = []
    for side in (candidates, [reference for _, reference in pairs]):
        rarity = _idf([known[text] for text in side]) if idf else None
        grams.append({text: _ngrams(known[text], rarity, skip, size if version == 1 else 1) for text in set(side)})
    scores = [_mover_score(grams[0][text], grams[1][reference], version, entropy) for text, reference in pairs]
    return np.add.reduceat(scores, first) / np.diff([*first, len(pairs)])


def _paired(candidates, references, embed):
    """Return all (text, reference) pairs, the index of the first pair of each text, and text -> `Embedded`."""
    groups = grouped(candidates, references)
    pairs = [(text, reference) for text, group in zip(candidates, groups) for reference in group]
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    return pairs, np.cumsum([0, *map(len, groups)])[:-1], dict(zip(texts, embed(texts), strict=True))


def _idf(texts):
    """Return id -> log((N + 1) / (document frequency + 1)); the key None is for unseen tokens."""
    if len(texts) < 2:
        raise ValueError("idf needs at least 2 texts, as it is 0 for all tokens of a single one; set idf=False.")
    counts = Counter(id for text in texts for id in set(text.ids.tolist()))
    return {None: math.log(len(texts) + 1)} | {id: math.log((len(texts) + 1) / (n + 1)) for id, n in counts.items()}


def _weights(text: Embedded, rarity: Mapping[int | None, float] | None):
    """Return the weights of the tokens; without idf, 1 for all but the special ones."""
    if rarity is not None:
        return np.array([rarity.get(id, rarity[None]) for id in text.ids.tolist()], np.float32)
    weights = np.ones(len(text.ids), np.float32)
    weights[[0, -1]] = 0
    return weights


def _bert_score(candidate: Embedded, reference: Embedded, weights, reference_weights):
    """Return precision, recall and F1 of a pair of texts (arXiv 1904.09675, section 3)."""
    if min(len(candidate.ids), len(reference.ids)) <= 2:
        return 0.0, 0.0, 0.0
    a, b = (text.vectors / np.linalg.norm(text.vectors, axis=-1, keepdims=True) for text in (candidate, reference))
    similarity = a @ b.T
    sides = (similarity.max(axis=1), weights), (similarity.max(axis=0), reference_weights)
    precision, recall = ((best * weight).sum() / (weight.sum() or 1) for best, weight in sides)
    total = precision + recall
    return precision, recall, 2 * precision * recall / total if total else 0.0


def _ngrams(text, rarity, skip, size):
    """Return the unit vectors [N, D] and the weights [N] of n-grams, whose vectors are weighted means."""
    kept = np.array([id not in skip for id in text.ids.tolist()])
    weights = np.ones(kept.sum()) if rarity is None else _weights(text, rarity)[kept].astype(float)
    vectors = text.vectors[kept].astype(float)
    starts = np.arange(max(len(vectors) - size + 1, min(len(vectors), 1)))
    runs = starts[:, None] + np.arange(min(size, len(vectors)))
    total = weights[runs].sum(axis=1)
    vectors = (weights[runs][..., None] * vectors[runs]).sum(axis=1)[total > 0]
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), total[total > 0]


def _mover_score(candidate, reference, version, entropy):
    """Return the score of the n-grams (see `_ngrams`) of a candidate against those of a reference."""
    import ot

    (vectors, weights), (reference_vectors, reference_weights) = candidate, reference
    if not len(vectors) or not len(reference_vectors):
        return 0.0
    costs = np.clip(2 - 2 * vectors @ reference_vectors.T, 0, None)
    costs = costs if version == 1 else costs**0.5
    masses = weights / weights.sum(), reference_weights / reference_weights.sum()
    distance = ot.sinkhorn2(*masses, costs, entropy, "sinkhorn_log") if entropy else ot.emd2(*masses, costs)
    return 1 - float(distance) if version == 1 else 1 / (1 + float(distance))
