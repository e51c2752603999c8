import math

import numpy as np
import pytest

from lineage.metrics.diversity import (
    burstiness,
    distinct,
    repetition,
    self_bleu,
    sentence_burstiness,
    sentences,
    word_burstiness,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Dr. Smith paid 3.50 to J. R. Jones. He left.", ["Dr. Smith paid 3.50 to J. R. Jones.", "He left."]),
        ("Wait... what? Well\u2026 No.", ["Wait... what?", "Well\u2026", "No."]),
        ('"Stop!" he said. (Really.) Yes', ['"Stop!"', "he said.", "(Really.)", "Yes"]),
        (
            "\u4eca\u5929\u5f88\u597d\u3002\u4f60\u5462\uff1f\u597d",
            ["\u4eca\u5929\u5f88\u597d\u3002", "\u4f60\u5462\uff1f", "\u597d"],
        ),
        (
            "\u300c\u306f\u3044\u3002\u300d\u3068\u8a00\u3063\u305f\u3002",
            ["\u300c\u306f\u3044\u3002\u300d", "\u3068\u8a00\u3063\u305f\u3002"],
        ),
        ("a line\nanother\n\nend etc.", ["a line", "another", "end etc."]),
        ("Wait... iPhones?", ["Wait... iPhones?"]),
        (" . ... ", []),
        ("", []),
    ],
)
def test_sentences(text, expected):
    assert sentences(text) == expected


def test_burstiness_of_processes_with_known_values():
    assert burstiness([5, 5, 5]) == -1
    gaps = np.random.default_rng(0).exponential(size=200_000)
    assert abs(burstiness(gaps)) < 0.01
    assert burstiness([1] * 999 + [10**6]) > 0.9
    assert burstiness([1, 3]) == pytest.approx((1 - 2) / (1 + 2))
    for values in ([], [0, 0]):
        with pytest.raises(ValueError, match="Burstiness needs at least one value that is not 0"):
            burstiness(values)
    for values in ([1, -2], [1, np.nan]):
        with pytest.raises(ValueError, match=f"A value is {float(values[1])}: burstiness needs"):
            burstiness(values)


def test_burstiness_of_texts():
    assert sentence_burstiness("One two. Three four. Five six.") == -1
    assert sentence_burstiness("One. Two three four.") == pytest.approx((1 - 2) / (1 + 2))
    tokens = ["a", "b", "a", "b", "a", "x", "b"]
    assert word_burstiness(tokens) == {"a": -1.0, "b": pytest.approx((0.5 - 2.5) / (0.5 + 2.5))}
    assert word_burstiness(["a", "x", "a"], least=1) == {"a": -1.0}  # a token that occurs once has no gaps


def test_distinct_and_repetition():
    texts = [["a", "b", "a", "b"], ["a", "b"]]
    assert distinct(texts, 1) == 2 / 6
    assert distinct(texts, 2) == 2 / 4
    assert repetition(texts, 2) == pytest.approx(np.mean([1 / 3, 0]))
    assert math.isnan(distinct(texts, 5))
    assert math.isnan(repetition(texts, 5))
    for score in (distinct, repetition):
        with pytest.raises(ValueError, match="n is 0: it must be at least 1"):
            score(texts, 0)
        with pytest.raises(ValueError, match="'a b a' is a text: it must be a list of tokens"):
            score(["a b a"], 1)


def test_self_bleu():
    assert self_bleu(["a b c d e"] * 3) == pytest.approx(100)
    assert self_bleu(["a b c d e", "f g h i j"]) == 0
    mixed = self_bleu(["a b c d e", "a b c d f", "u v w x y"])
    assert 0 < mixed < 100
    with pytest.raises(ValueError, match="There are 1 texts: self-BLEU needs at least 2"):
        self_bleu(["a"])
    with pytest.raises(ValueError, match="order is 0: it must be at least 1"):
        self_bleu(["a", "b"], 0)
