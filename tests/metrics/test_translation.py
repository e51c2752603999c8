"""Scores match sacreBLEU, and the BLEU of Dive into Deep Learning matches its definition."""

import math

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.significance import PairedTest

from lineage.metrics.summary import corpus_rouge
from lineage.metrics.translation import (
    SACREBLEU,
    bleu,
    bleu_by_length,
    compare,
    corpus_score,
    d2l_bleu,
    options,
    sentence_scores,
)

REFERENCES = ["a man rides a red bicycle .", "two dogs play", "a woman reads a book in the park", "a house"]
OUTPUTS = ["a man rides a bicycle .", "two dogs run", "a woman reads a book in a park", "a tree"]


def test_bleu_matches_sacrebleu_and_has_its_signature():
    score, signature = bleu(OUTPUTS, REFERENCES)
    assert score == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES]).score
    assert 40 < score < 80
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")


def test_groups_by_length_contain_every_input_once_with_their_own_bleu():
    lengths = [7, 3, 8, 2]
    rows = bleu_by_length(OUTPUTS, REFERENCES, lengths, groups=2)
    assert [row[:3] for row in rows] == [(2, 3, 2), (7, 8, 2)]
    short, long = ([OUTPUTS[i] for i in group] for group in ((1, 3), (0, 2)))
    assert rows[0][3] == sacrebleu.corpus_bleu(short, [[REFERENCES[1], REFERENCES[3]]]).score
    assert rows[1][3] == sacrebleu.corpus_bleu(long, [[REFERENCES[0], REFERENCES[2]]]).score


def test_inputs_of_equal_length_are_in_one_group():
    rows = bleu_by_length(OUTPUTS * 3, REFERENCES * 3, [5] * 11 + [9], groups=4)
    assert [row[:3] for row in rows] == [(5, 5, 11), (9, 9, 1)]


@pytest.mark.parametrize(("outputs", "references"), [([], []), (["a"], ["a", "b"])])
def test_incomparable_corpora_raise(outputs, references):
    with pytest.raises(ValueError, match=r"outputs and \d references: the numbers must be equal"):
        bleu(outputs, references)


TEXT = st.lists(st.sampled_from(["a", "b", "The", "cat,", "3.5", "\u732b", "\u00e9"]), max_size=7).map(" ".join)
SETTINGS = st.one_of(
    st.fixed_dictionaries(
        {
            "tokenize": st.sampled_from(["13a", "intl", "zh", "char", "none"]),
            "smooth_method": st.sampled_from(["exp", "floor", "add-k", "none"]),
            "lowercase": st.booleans(),
        }
    ).map(lambda some: ("bleu", some)),
    st.sampled_from([0, 2]).map(lambda order: ("chrf", {"word_order": order})),
    st.booleans().map(lambda case: ("ter", {"case_sensitive": case})),
)


@settings(max_examples=100)
@given(SETTINGS, st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=4))
def test_corpus_and_sentence_scores_match_sacrebleu(setting, rows):
    (name, some), outputs = setting, [row[0] for row in rows]
    theirs = SACREBLEU[name](**some)
    expected = theirs.corpus_score(outputs, [list(column) for column in zip(*rows)][1:])
    ours = corpus_score(name, outputs, [row[1:] for row in rows], **some)
    assert ours[:2] == (expected.score, str(theirs.get_signature()))
    alone = SACREBLEU[name](**some, **({"effective_order": True} if name == "bleu" else {}))
    expected = [alone.sentence_score(output, references).score for output, *references in rows]
    assert sentence_scores(name, outputs, [row[1:] for row in rows], **some) == expected


def test_bleu_of_a_text_that_is_shorter_than_its_longest_n_grams():
    assert sentence_scores("bleu", ["a b"], ["a b"]) == pytest.approx([100])
    assert sentence_scores("bleu", ["a b"], ["a b"], effective_order=False) == [0]


def test_varying_number_of_references():
    score = corpus_score("bleu", OUTPUTS, [[REFERENCES[0], OUTPUTS[0]], *REFERENCES[1:]])
    assert score.score == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES, [OUTPUTS[0], None, None, None]]).score
    assert score.signature.startswith("nrefs:var")
    alone = sentence_scores("ter", OUTPUTS[:2], [[REFERENCES[0], OUTPUTS[0]], REFERENCES[1]])
    assert alone == [0, sacrebleu.sentence_ter(OUTPUTS[1], [REFERENCES[1]]).score]


def test_confidence_intervals_match_sacrebleu():
    score = corpus_score("bleu", OUTPUTS, REFERENCES, samples=100)
    theirs = sacrebleu.BLEU().corpus_score(OUTPUTS, [REFERENCES], 100)
    assert (score.mean, score.interval) == (theirs._mean, theirs._ci)
    assert 0 < score.interval < score.mean < 100
    assert "|bs:100|seed:12345|" in score.signature
    assert corpus_score("bleu", OUTPUTS, REFERENCES, samples=1).interval is None
    assert corpus_score("bleu", OUTPUTS, REFERENCES, samples=2).interval is not None


@pytest.mark.parametrize("test", ["bs", "ar"])
def test_significance_matches_sacrebleu(test):
    outputs = [*OUTPUTS[:2], *REFERENCES[2:]]
    ours, signature = compare("chrf", {"old": OUTPUTS, "new": outputs}, REFERENCES, test=test, samples=200, beta=1)
    pairs = [("old", OUTPUTS), ("new", outputs)]
    signatures, theirs = PairedTest(pairs, {"chrf": sacrebleu.CHRF(beta=1)}, [REFERENCES], test, 200)()
    (name,) = signatures
    assert signature == str(signatures[name])
    assert ours["old"] == (theirs[name][0].score, None)
    assert ours["new"] == (theirs[name][1].score, theirs[name][1].p_value)
    assert 0 < ours["new"].p_value < 1


def test_d2l_bleu_matches_the_book():
    """Check the examples of section 10.7.6: precisions 4/5, 3/4, 1/3, 0; a short output; and outputs of its models."""
    long = math.exp(1 - 6 / 5) * (4 / 5) ** 0.5 * (3 / 4) ** 0.25
    assert d2l_bleu([[*"ABBCD"]], [[*"ABCDEF"]]) == pytest.approx(long)
    assert d2l_bleu([[*"ABBCD"]], [[*"ABCDEF"]], 3) == pytest.approx(long * (1 / 3) ** 0.125)
    assert d2l_bleu([[*"ABBCD"]], [[*"ABCDEF"]], 4) == 0
    assert d2l_bleu([[*"ABBCD"]], [[*"ABCDEF"]], 1) == pytest.approx(math.exp(1 - 6 / 5) * (4 / 5) ** 0.5)
    assert round(d2l_bleu([[*"AB"]], [[*"ABCDEF"]]), 2) == 0.14
    assert d2l_bleu([["i'm", "home"], []], [["i'm", "home"], ["."]]) == 0.5
    with pytest.raises(ValueError, match="'at home' is a text: it must be a list of tokens"):
        d2l_bleu(["at home"], ["at home"])


@settings(max_examples=200)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_d2l_bleu_matches_direct_implementation(output, reference):
    expected = math.exp(min(0, 1 - len(reference) / len(output)))
    for n in range(1, min(3, len(output)) + 1):
        left = [tuple(reference[i : i + n]) for i in range(len(reference) - n + 1)]
        found = 0
        for i in range(len(output) - n + 1):
            if (gram := tuple(output[i : i + n])) in left:
                left.remove(gram)
                found += 1
        expected *= (found / (len(output) - n + 1)) ** (1 / 2**n)
    np.testing.assert_allclose(d2l_bleu([output], [reference], 3), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: corpus_score("blue", OUTPUTS, REFERENCES), "The metric is 'blue': it must be one of bleu, chrf"),
        (lambda: corpus_score("ter", OUTPUTS, REFERENCES, beta=1), "ter has no option 'beta': it has normalized,"),
        (lambda: corpus_score("bleu", OUTPUTS, REFERENCES, tokenize="x"), "tokenize is 'x': it must be one of none,"),
        (lambda: corpus_score("bleu", OUTPUTS, REFERENCES, max_ngram_order=0), "max_ngram_order is 0: it must be at"),
        (lambda: corpus_score("chrf", OUTPUTS, REFERENCES, char_order=0), "char_order is 0: it must be at least 1"),
        (lambda: corpus_score("chrf", OUTPUTS, REFERENCES, word_order=-1), "word_order is -1: it must be at least 0"),
        (lambda: corpus_score("chrf", OUTPUTS, REFERENCES, beta=float("nan")), "beta is nan: it must be at least 0"),
        (lambda: corpus_score("bleu", OUTPUTS, REFERENCES, smooth_value="x"), "smooth_value is 'x': it must be a num"),
        (lambda: corpus_score("bleu", ["a"], ["b"], smooth_method="x"), "smooth_method is 'x': it must be one of none"),
        (lambda: corpus_score("chrf", ["a", "b"], [["a"], []]), "Output 1 has no reference: at least one is needed"),
        (lambda: sentence_scores("ter", ["a"], []), "Got 1 outputs and 0 references: the numbers must be equal"),
        (lambda: compare("bleu", {"a": OUTPUTS}, REFERENCES), "Got 1 systems and the test 'bs'"),
        (lambda: compare("bleu", {"a": ["a"], "b": []}, ["a"]), "Got 0 outputs and 1 references"),
        (lambda: d2l_bleu([], []), "Got 0 outputs and 0 references"),
        (lambda: d2l_bleu(["a"], ["a"], 0), "order is 0: it must be at least 1"),
    ],
)
def test_invalid_inputs_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_missing_tokenizer_raises(monkeypatch):
    def missing(**settings):
        raise RuntimeError("\nJapanese needs more.\n\n    pip install sacrebleu[ja]\n")

    monkeypatch.setitem(SACREBLEU, "bleu", missing)
    monkeypatch.setattr("lineage.metrics.translation.options", lambda name: {"tokenize": None})
    with pytest.raises(ModuleNotFoundError, match=r"A tokenizer is not installed: Japanese needs more\. pip install"):
        corpus_score("bleu", OUTPUTS, REFERENCES, tokenize="ja-mecab")


def test_options_match_sacrebleu():
    assert options("bleu")["smooth_method"] == "exp"
    assert "references" not in options("chrf")


def test_arrays_of_texts():
    """Check arrays, as a column of a table is read, in place of lists."""
    outputs, references = np.array(OUTPUTS), np.array(REFERENCES)
    assert corpus_score("bleu", outputs, references) == corpus_score("bleu", OUTPUTS, REFERENCES)
    assert corpus_rouge(outputs, references, samples=2) == corpus_rouge(OUTPUTS, REFERENCES, samples=2)
