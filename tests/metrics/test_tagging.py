"""Spans and scores match seqeval on random tags, in its default and its strict mode."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval import scheme as schemes
from seqeval.metrics.sequence_labeling import get_entities, precision_recall_fscore_support
from seqeval.metrics.v1 import precision_recall_fscore_support as strict

from lineage.metrics.tagging import Spans, is_chunk, spans, word_accuracy

LETTERS = {None: "BIES", "IOB1": "BI", "IOB2": "BI", "IOE2": "IE", "IOBES": "BIES", "BILOU": "BILU"}


@st.composite
def corpora(draw, scheme):
    """Generate sentences of random tags and true tags that often agree."""
    tag = st.sampled_from(["O", "O", *(f"{letter}-{kind}" for letter in LETTERS[scheme] for kind in ("X", "Y-Z"))])
    tag |= st.sampled_from(LETTERS[scheme]) if scheme is None else st.nothing()
    truths = draw(st.lists(st.lists(tag, min_size=1, max_size=9), min_size=1, max_size=4))
    return [[word if draw(st.booleans()) else draw(tag) for word in sentence] for sentence in truths], truths


@settings(max_examples=400)
@given(st.sampled_from(list(LETTERS)).flatmap(lambda scheme: st.tuples(st.just(scheme), corpora(scheme))))
def test_scores_match_seqeval(case):
    scheme, (tags, truths) = case
    state = Spans.empty().update(tags, truths, scheme)
    for average in (None, "micro", "macro", "weighted"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mean of an empty list
            if scheme:
                kind = getattr(schemes, scheme)
                theirs = strict(truths, tags, average=average, zero_division=0, scheme=kind)
            else:
                theirs = precision_recall_fscore_support(truths, tags, average=average, zero_division=0)
        if not state.types and average == "macro":
            theirs = (0, 0, 0, 0)  # seqeval returns nan if neither side has a span
        np.testing.assert_allclose(np.array(state.compute(average)), np.array(theirs[:3]), atol=1e-12)
    np.testing.assert_array_equal([state.actual[kind] for kind in state.types], strict_support(truths, tags, scheme))


def strict_support(truths, tags, scheme):
    if scheme:
        return strict(truths, tags, zero_division=0, scheme=getattr(schemes, scheme))[3]
    return precision_recall_fscore_support(truths, tags, zero_division=0)[3]


@settings(max_examples=200)
@given(corpora(None))
def test_spans_match_seqeval(corpus):
    for sentence in corpus[0]:
        assert spans(sentence) == [(kind, start, last + 1) for kind, start, last in get_entities(sentence)]


def test_schemes_encode_the_same_spans():
    """Check two adjacent spans of one type, followed by one of another type."""
    expected = [("X", 1, 2), ("X", 2, 5), ("Y", 5, 6)]
    for scheme, tags in {
        "IOB1": "O I-X B-X I-X I-X I-Y",
        "IOB2": "O B-X B-X I-X I-X B-Y",
        "IOE2": "O E-X I-X I-X E-X E-Y",
        "IOBES": "O S-X B-X I-X E-X S-Y",
        "BILOU": "O U-X B-X I-X L-X U-Y",
    }.items():
        assert spans(tags.split(), scheme) == spans(tags.split()) == expected


def test_result_does_not_depend_on_split_and_order():
    random = np.random.default_rng(0)
    tags, truths = ([list(random.choice(["O", "B-X", "I-X", "B-Y"], 6)) for _ in range(30)] for _ in range(2))
    parts = [Spans.empty().update(tags[p], truths[p]) for p in (slice(0, 3), slice(3, 17), slice(17, 30))]
    assert parts[2].merge(Spans.empty()).merge(parts[0]).merge(parts[1]) == Spans.empty().update(tags, truths)
    assert all(score == 0 for average in ("micro", "macro") for score in Spans.empty().compute(average))


def test_words_and_chunks():
    assert word_accuracy([["O", "X"], ["Y"]], [["O", "Y"], ["Y"]]) == 2 / 3
    assert [is_chunk(tag) for tag in ("O", "B-PER", "L-X", "NOUN", "OB", "A-B", "I")] == [True] * 3 + [False] * 4


def test_invalid_inputs_raise():
    with pytest.raises(ValueError, match=r"The tag 'E-X' is not valid in the scheme IOB2, which has OIB\."):
        spans(["O", "E-X"], "IOB2")
    for tag in ("NOUN", "", "O-X", "Q"):
        with pytest.raises(ValueError, match=f"The tag '{tag}' is not valid in the scheme CoNLL"):
            spans([tag])
    with pytest.raises(ValueError, match=r"scheme is 'IOB': it must be None or one of IOB1, IOB2, IOE2, IOBES, BILOU"):
        spans([], "IOB")
    with pytest.raises(ValueError, match="Sentence 1 has 1 predicted and 2 true tags"):
        Spans.empty().update([["O"], ["O"]], [["O"], ["O", "O"]])
    with pytest.raises(ValueError, match="Got 1 predicted and 2 true sentences"):
        Spans.empty().update([["O"]], [["O"], ["O"]])
    with pytest.raises(ValueError, match="average is 'makro': it must be None, micro, macro or weighted"):
        Spans.empty().compute("makro")
