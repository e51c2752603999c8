"""How well answers agree with references: SQuAD's exact match and F1 (arXiv 1606.05250, section 6.1; 1806.03822)."""

import re
import string
from collections.abc import Sequence
from functools import lru_cache

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:an?|the)\b")


@lru_cache(1 << 16)  # each score asks for each text
def normalize(answer: str) -> str:
    """The answer in lower case, without ASCII punctuation and articles, with single spaces."""
    answer = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", answer).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer is one of the references but for what `normalize` takes away, else 0."""
    return float(normalize(answer) in _known(references))


def f1(answer: str, references: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of the answer's words; of several references the best counts."""
    words = normalize(answer).split()
    return max(_f1(words, reference.split()) for reference in set(_known(references)))


def _known(references):
    """Normalised; "" is right where there is no answer. A reference of which nothing is left does not count."""
    return [reference for reference in map(normalize, references) if reference] or [""]


def _f1(words, reference):
    if not words or not reference:
        return float(words == reference)
    common = sum(min(words.count(word), reference.count(word)) for word in {*words} & {*reference})
    return 2 * common / (len(words) + len(reference))
