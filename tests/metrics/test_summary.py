"""ROUGE-N, L and Lsum match rouge-score; the other variants match Lin's definitions and worked examples."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score import rouge_scorer

from lineage.metrics.summary import Score, corpus_rouge, rouge, tokens, words

KINDS = ("1", "2", "3", "L", "Lsum")
# Few tokens, so that they repeat; line breaks; and difficult cases for tokenizers.
TEXTS = st.one_of(
    st.lists(
        st.sampled_from(["a", "b", "c", "running", "Runs", "\n", "\u00e9", "3.5", "its", "it's", "--"]),
        max_size=25,
    ).map(" ".join),
    st.text(max_size=40),
)


@settings(max_examples=500)
@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=3), st.booleans())
def test_n_l_and_lsum_match_rouge_score(output, references, stem):
    scorer = rouge_scorer.RougeScorer([f"rouge{kind}" for kind in KINDS], use_stemmer=stem)
    theirs = scorer.score_multi(references, output)
    ours = rouge(output, references, KINDS, tokenize=lambda text: tokens(text, stem))
    for kind in KINDS:
        np.testing.assert_allclose(ours[kind], theirs[f"rouge{kind}"], atol=1e-12, err_msg=kind)


@pytest.mark.parametrize(("output", "reference"), [("b a\nb", "b b"), ("b\nb x", "b b a"), ("a x\nb b a", "a b a")])
def test_choice_among_equal_subsequences_matches_rouge_score(output, reference):
    """Check columns without a match, after which rows that add nothing are skipped."""
    theirs = rouge_scorer.RougeScorer(["rougeLsum"]).score(reference, output)["rougeLsum"]
    np.testing.assert_allclose(rouge(output, reference, ["Lsum"])["Lsum"], theirs, atol=1e-12)


def test_long_texts_match_rouge_score():
    random = np.random.default_rng(0)
    text, other = (
        "\n".join(" ".join(f"w{i}" for i in random.integers(0, 60, 25)) for _ in range(12)) for _ in range(2)
    )
    theirs = rouge_scorer.RougeScorer([f"rouge{kind}" for kind in KINDS]).score(other, text)
    for kind, score in rouge(text, other, KINDS).items():
        np.testing.assert_allclose(score, theirs[f"rouge{kind}"], atol=1e-12, err_msg=kind)


def test_examples_of_the_paper():
    """Check the examples of sections 3.1, 3.3 and 4 of the paper."""
    reference = "police killed the gunman"
    one, two, three = "police kill the gunman", "the gunman kill police", "the gunman police killed"
    assert [rouge(text, reference, ["L"])["L"].f for text in (one, two)] == [3 / 4, 2 / 4]
    assert [round(rouge(text, reference, ["S"])["S"].f, 3) for text in (one, two, three)] == [0.5, 0.167, 0.333]
    first, second = "A B C D H I K".lower(), "A H B K C I D".lower()
    scores = [rouge(text, "a b c d e f g", ["W", "L"]) for text in (first, second)]
    assert scores[0]["L"] == scores[1]["L"]
    assert scores[0]["W"].f == pytest.approx(4 / 7)
    assert scores[1]["W"].f < scores[0]["W"].f


SHORT = st.lists(st.sampled_from("abc"), max_size=7)


@settings(max_examples=200)
@given(SHORT, SHORT, st.sampled_from([None, 0, 1, 4]), st.booleans())
def test_skip_bigrams_match_definition(ours, theirs, limit, unigrams):
    def counts(tokens):
        pairs = itertools.combinations(range(len(tokens)), 2)
        near = Counter((tokens[i], tokens[j]) for i, j in pairs if limit is None or j - i - 1 <= limit)
        return near + Counter(tokens) if unigrams else near

    a, b = counts(ours), counts(theirs)
    kind = f"S{'U' if unigrams else ''}{'' if limit is None else limit}"
    score = rouge(" ".join(ours), " ".join(theirs), [kind])[kind]
    shared = sum(min(a[pair], b[pair]) for pair in a)
    assert score.precision == (shared / a.total() if a else 0)
    assert score.recall == (shared / b.total() if b else 0)


@settings(max_examples=200)
@given(SHORT, SHORT)
def test_weighted_subsequences_match_the_dynamic_program(ours, theirs):
    """Compare with a literal implementation of the dynamic program of section 3.4."""
    score, run = np.zeros((2, len(theirs) + 1, len(ours) + 1))
    for i, j in itertools.product(range(1, len(theirs) + 1), range(1, len(ours) + 1)):
        if theirs[i - 1] == ours[j - 1]:
            k = run[i - 1, j - 1]
            score[i, j], run[i, j] = score[i - 1, j - 1] + (k + 1) ** 1.2 - k**1.2, k + 1
        else:
            score[i, j] = max(score[i - 1, j], score[i, j - 1])
    actual = rouge(" ".join(ours), " ".join(theirs), ["W"])["W"]
    if ours and theirs:
        assert actual.recall == pytest.approx((score[-1, -1] / len(theirs) ** 1.2) ** (1 / 1.2))
        assert actual.precision == pytest.approx((score[-1, -1] / len(ours) ** 1.2) ** (1 / 1.2))
    else:
        assert actual == Score(0, 0, 0)


# Precision and recall of ROUGE-W, S4, SU and SU4 by the Perl program ROUGE 1.5.5, for texts and references.
PERL = [
    ("x", "x", [1, 1, 0, 0, 0, 0, 0, 0]),
    ("how are you\ni am-fine", "how do you do\nfine -thanks", [0.41634, 0.32976, 0.2, 0.2, 0.25, 0.25, 0.25, 0.25]),
    ("b a b a c\na b", "a b a\nb c a b", [0.726, 0.56371, 0.9, 0.9, 0.92593, 0.92593, 0.92308, 0.92308]),
    (
        "the cat sat on the mat\nit was a cat",
        "a cat was on the mat\nthe mat was the cat it sat on\nmat",
        [0.66831, 0.30781, 0.68571, 0.4, 0.74074, 0.33613, 0.75, 0.44595],
    ),
    ("a a b b a", "a b a b a b\na a", [0.71272, 0.32744, 1, 0.4, 1, 0.4, 1, 0.4375]),
    (
        "c d e a a e\ne b b e c b",
        "b c d c a a\ne d e c e b\nc d a b a c",
        [0.70346, 0.32773, 0.71111, 0.42667, 0.88312, 0.4, 0.75, 0.45652],
    ),
    (
        "a b c e b c\nb a d a b c\nc a e d e a",
        "b c e b d a\nb e c c b a\nc d c d b d",
        [0.578, 0.40392, 0.70667, 0.70667, 0.64118, 0.64118, 0.72826, 0.72826],
    ),
    (
        "e c a d c e\nc b a c d d\ne b c e b b",
        "c c d c e d\na a c e a d\nd d e a c e",
        [0.63486, 0.44365, 0.57333, 0.57333, 0.58235, 0.58235, 0.6087, 0.6087],
    ),
    ("a c a b e d\ne e e b c d", "e a e d b d", [0.3727, 0.5209, 0.28889, 0.86667, 0.24675, 0.95, 0.32143, 0.9]),
    ("e e b c b d\nd e e e e e", "a c b e d c", [0.33333, 0.46588, 0.17778, 0.53333, 0.15584, 0.6, 0.21429, 0.6]),
]


@pytest.mark.parametrize(("output", "reference", "expected"), PERL)
def test_perl_variants_match_rouge_1_5_5(output, reference, expected):
    kinds = ["W", "S4", "SU", "SU4"]
    scores = rouge(output, reference, kinds, perl=True)
    np.testing.assert_allclose(np.ravel([scores[kind][:2] for kind in kinds]), expected, atol=1.1e-5)
    assert scores["S4"] == rouge(output, reference, ["S4"])["S4"]
    if output == "x":
        assert rouge(output, reference, ["SU"])["SU"].f == 1  # by the paper


def test_beta_weights_recall():
    plain, recall = (rouge("a b", "a c d e", ["1"], beta=beta)["1"] for beta in (1.0, 100.0))
    assert (plain.precision, plain.recall) == (1 / 2, 1 / 4)
    assert plain.f == pytest.approx(1 / 3)
    assert recall.f == pytest.approx(1 / 4, abs=1e-3)


def test_non_latin_scripts():
    assert words("\u4f60\u597d world's \u00c9t\u00e9 \u30c6\u30b9\u30c8 3.5") == [
        *"\u4f60\u597d",
        "world",
        "s",
        "\u00e9t\u00e9",
        *"\u30c6\u30b9\u30c8",
        "3",
        "5",
    ]
    score = rouge("\u6211\u559c\u6b22\u732b", "\u6211\u559c\u6b22\u72d7", ["1", "2"], tokenize=words)
    assert (score["1"].f, score["2"].f) == (3 / 4, 2 / 3)
    assert rouge("\u6211\u559c\u6b22\u732b", "\u6211\u559c\u6b22\u732b", ["1"])["1"].f == 0  # ASCII tokens only


def test_corpus_has_mean_and_confidence_interval():
    random = np.random.default_rng(0)
    outputs, references = ([" ".join(random.choice(list("abcd"), 6)) for _ in range(200)] for _ in range(2))
    actual = corpus_rouge(outputs, references, ["1", "L"])
    each = np.array([[rouge(a, b, ["1", "L"])[kind] for kind in ("1", "L")] for a, b in zip(outputs, references)])
    np.testing.assert_allclose([actual["1"]["mean"], actual["L"]["mean"]], each.mean(axis=0))
    error = each[:, 0, 2].std() / math.sqrt(200)
    assert actual["1"]["high"].f - actual["1"]["mean"].f == pytest.approx(1.96 * error, rel=0.2)
    assert actual["1"]["mean"].f - actual["1"]["low"].f == pytest.approx(1.96 * error, rel=0.2)
    again = corpus_rouge(outputs, references, ["1"])["1"]
    np.testing.assert_allclose([again[end] for end in actual["1"]], list(actual["1"].values()), rtol=1e-12)


def test_invalid_inputs_raise():
    with pytest.raises(ValueError, match="There is no reference"):
        rouge("a", [])
    with pytest.raises(ValueError, match="The kind of ROUGE is 'X': it must be"):
        rouge("a", "a", ["X"])
    with pytest.raises(ValueError, match=r"beta is 0\.0: it must be above 0"):
        rouge("a", "a", beta=0.0)
    with pytest.raises(ValueError, match="2 outputs and 1 references"):
        corpus_rouge(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="samples is 0: it must be at least 1"):
        corpus_rouge(["a"], ["a"], samples=0)
    with pytest.raises(ValueError, match=r"confidence is 95\.0: it must be between 0 and 1"):
        corpus_rouge(["a"], ["a"], confidence=95.0)
    with pytest.raises(ValueError, match="0 outputs and 0 references"):
        corpus_rouge([], [])
