"""Exact match and F1 match a reimplementation of the official SQuAD definition on random answers."""

import collections
import re
import string

import numpy as np
import pytest

from lineage.metrics.answers import exact_match, f1, normalize

WORDS = ["a", "An", "THE", "theatre", "anna", "cat", "cat's", "U.S.", "don't", "1,000", "—", "«x»", "x-y", ".", "", "é"]


def official(answer, references):
    """Return exact match and F1 as computed by the evaluation script of SQuAD 2.0."""

    def clean(text):
        text = "".join(c for c in text.lower() if c not in set(string.punctuation))
        return " ".join(re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", text).split())

    def overlap(gold, predicted):
        gold, predicted = clean(gold).split() if gold else [], clean(predicted).split() if predicted else []
        same = sum((collections.Counter(gold) & collections.Counter(predicted)).values())
        if len(gold) == 0 or len(predicted) == 0:
            return int(gold == predicted)
        if same == 0:
            return 0
        precision, recall = 1.0 * same / len(predicted), 1.0 * same / len(gold)
        return (2 * precision * recall) / (precision + recall)

    golds = [gold for gold in references if clean(gold)] or [""]
    return max(int(clean(gold) == clean(answer)) for gold in golds), max(overlap(gold, answer) for gold in golds)


def test_random_answers_match_the_official_script():
    random = np.random.default_rng(0)

    def text():
        return random.choice([" ", "  ", "\t"]).join(random.choice(WORDS, random.integers(0, 6)))

    scores = []
    for _ in range(5000):
        answer, references = text(), [text() for _ in range(random.integers(0, 4))]
        ours, theirs = (exact_match(answer, references), f1(answer, references)), official(answer, references)
        assert ours == pytest.approx(theirs), (answer, references)
        scores.append(theirs)
    exact, overlaps = np.array(scores).T
    assert 0.02 < exact.mean() < 0.5  # both outcomes occur
    assert ((overlaps > 0) & (overlaps < 1)).sum() > 500


def test_worked_examples():
    assert normalize("The  U.S., a theatre") == "us theatre"
    assert f1("the cat sat", ["a cat", "dog"]) == pytest.approx(2 / 3)
    assert exact_match("", []) == 1
    assert exact_match("x", []) == 0
    assert exact_match("The cat.", ["dog", "cat"]) == 1


def test_single_reference_is_one_text():
    """Check a reference that is not in a list, of which each character would be a reference."""
    assert exact_match("The cat.", "cat") == f1("The cat.", "cat") == 1
    assert exact_match("c", "cat") == f1("c", "cat") == 0
