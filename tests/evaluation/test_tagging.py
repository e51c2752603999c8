"""Entity-level tagging: precision, recall and F1 equal those of seqeval, also of sentences that are split."""

from unittest.mock import Mock

import numpy as np
import pytest
from seqeval.metrics import f1_score, precision_score, recall_score

from lineage.data import EvaluationBatches, Facts, Loader, TaggedSentence
from lineage.data.examples import encoded
from lineage.data.sources.lines import BIO
from lineage.evaluation import EVALUATORS, Context, Split
from lineage.evaluation.texts import Tagging
from lineage.tasks.token_classification import TokenClassification, encode
from tests.data.conftest import train

CHUNKS = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")


def measured(truth, guesses, names, length, unused=0):
    """Return the metrics of guessed tags of sentences whose words have one to three tokens.

    The model has `unused` classes that the data lack, which are the most probable ones.
    """
    coder = train("bytes", [], encoded.ROLES)
    sentences = [TaggedSentence(["abc"[: 1 + i % 3] for i in range(len(tags))], tags) for tags in truth]
    source = encode(sentences, names, coder, length)
    logits = np.zeros((len(source), length, len(names) + unused), np.float32)
    logits[..., len(names) :] = 2
    wanted = iter([names.index(tag) for tags in guesses for tag in tags])
    for row, mask in zip(logits, source.per_token["mask"]):
        for position in np.flatnonzero(mask):
            row[position, next(wanted)] = 1
    context = Mock(spec=Context, task=TokenClassification(), rows=lambda *args: logits)
    split = Split(
        "test", "test", EvaluationBatches(source=source, loader=Loader(batch_size=2)), Facts(class_names=names)
    )
    return Tagging().measure(context, {}, split)


@pytest.mark.parametrize(("length", "unused"), [(6, 0), (64, 3)])
def test_scores_equal_those_of_seqeval(length, unused):
    rng = np.random.default_rng(0)
    truth, guesses = ([rng.choice(CHUNKS, size).tolist() for size in (1, 4, 9, 12, 7)] for _ in range(2))
    for sentence, guess in zip(truth, guesses):
        guess[: len(sentence) // 2] = sentence[: len(sentence) // 2]
    actual = measured(truth, guesses, CHUNKS, length, unused)
    expected = {
        "precision": precision_score(truth, guesses),
        "recall": recall_score(truth, guesses),
        "f1": f1_score(truth, guesses),
    }
    assert 0 < expected["f1"] < 1
    assert actual == pytest.approx(expected)


@pytest.mark.parametrize("names", [("ADJ", "NOUN"), ("B-PER", "I-PER", "NOUN"), ("O",)])
def test_tags_that_are_not_chunks_are_skipped(names):
    assert measured([list(names)], [list(names)], names, 16) == {}


def test_entities_of_a_file_of_words_and_tags(tmp_path):
    """Check the scores of the tags of files of CoNLL-2003's kind, of which one is not valid in IOB2."""
    rows = "U.N. NNP I-NP {}\nofficial NN I-NP O\nEkeus NNP I-NP {}\nheads VBZ I-VP O\n\nPeter NNP I-NP I-PER\n"
    for name, tags in (("train", ("B-ORG", "B-PER")), ("guess", ("B-LOC", "I-PER"))):
        (tmp_path / f"{name}.txt").write_text(rows.format(*tags))
    truth, guesses = (
        [sentence.tags for sentence in BIO(f"{tmp_path}/{name}.txt").tagged_sentences()["train"]]
        for name in ("train", "guess")
    )
    names = tuple(sorted({tag for sentence in truth + guesses for tag in sentence}))
    actual = measured(truth, guesses, names, 16)
    assert actual == pytest.approx({"precision": 2 / 3, "recall": 2 / 3, "f1": f1_score(truth, guesses)})


def test_token_classification_runs_it_by_default():
    assert "tagging" in TokenClassification.evaluators
    assert EVALUATORS["tagging"] is Tagging
