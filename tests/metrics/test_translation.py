import pytest
import sacrebleu

from metrics.translation import bleu, bleu_by_length

REFERENCES = ["a man rides a red bicycle .", "two dogs play", "a woman reads a book in the park", "a house"]
OUTPUTS = ["a man rides a bicycle .", "two dogs run", "a woman reads a book in a park", "a tree"]


def test_bleu_is_sacrebleus_and_says_how():
    score, signature = bleu(OUTPUTS, REFERENCES)
    assert score == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES]).score
    assert 40 < score < 80
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")


def test_groups_by_length_have_every_input_once_and_their_own_bleu():
    lengths = [7, 3, 8, 2]
    rows = bleu_by_length(OUTPUTS, REFERENCES, lengths, groups=2)
    assert [row[:3] for row in rows] == [(2, 3, 2), (7, 8, 2)]
    short, long = ([OUTPUTS[i] for i in group] for group in ((1, 3), (0, 2)))
    assert rows[0][3] == sacrebleu.corpus_bleu(short, [[REFERENCES[1], REFERENCES[3]]]).score
    assert rows[1][3] == sacrebleu.corpus_bleu(long, [[REFERENCES[0], REFERENCES[2]]]).score


def test_inputs_of_one_length_stay_together():
    rows = bleu_by_length(OUTPUTS * 3, REFERENCES * 3, [5] * 11 + [9], groups=4)
    assert [row[:3] for row in rows] == [(5, 5, 11), (9, 9, 1)]


@pytest.mark.parametrize(("outputs", "references"), [([], []), (["a"], ["a", "b"])])
def test_what_cannot_be_compared(outputs, references):
    with pytest.raises(ValueError, match=r"outputs and \d references: as many of each"):
        bleu(outputs, references)
