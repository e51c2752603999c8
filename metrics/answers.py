"""Exact match and F1 of SQuAD (arXiv 1606.05250, section 6.1; arXiv 1806.03822)."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:an?|the)\b")


@lru_cache(1 << 16)  # every score normalizes every text
def normalize(answer: str) -> str:
    """Lower-case the answer, remove ASCII punctuation and English articles, and collapse white space."""
    answer = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", answer).split())


def exact_match(answer: str, references: str | Sequence[str]) -> float:
    """Return 1 if the normalized answer equals the normalized reference, or one of several, else 0."""
    return float(normalize(answer) in _normalized(references))


def f1(answer: str, references: str | Sequence[str]) -> float:
    """Return the word-level F1 of the answer, 0 to 1; the maximum over the references."""
    words = normalize(answer).split()
    return max(_f1(words, reference.split()) for reference in set(_normalized(references)))


def _normalized(references):
    """Return the normalized references that are not empty, or `[""]` (unanswerable) if there are none."""
    references = [references] if isinstance(references, str) else references
    return [reference for reference in map(normalize, references) if reference] or [""]


def _f1(words, reference):
    total = len(words) + len(reference)
    return 2 * (Counter(words) & Counter(reference)).total() / total if total else 1.0
