"""Question answering: files, windows, and mapping answers from tokens back to characters."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lineage.data import Facts, Question
from lineage.data.examples import encoded
from lineage.data.sources.lines import SQuAD, read_questions
from lineage.tasks.question_answering import QuestionAnswering, encode
from tests.data.conftest import load, train

CONTEXT = "In 1066, the Normans — from Normandy — conquered England. Élan vital! 漢字 too."
TEXT = "y" * 64
CODERS = {
    kind: train(kind, [CONTEXT, "Who conquered what and when?"], encoded.ROLES, **options)
    for kind, options in (("bytes", {}), ("bpe", {"vocab_size": 300}), ("words", {}))
}


def squad(path, rows, version="v2.0"):
    """Write a file in the SQuAD layout from (question, context, answers)."""
    content = []
    for number, (question, context, answers) in enumerate(rows):
        asked = {"id": str(number), "question": question} | (
            {"is_impossible": not answers} if version == "v2.0" else {}
        )
        asked["answers"] = [{"text": text, "answer_start": start} for start, text in answers]
        content.append({"context": context, "qas": [asked]})
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        json.dump({"version": version, "data": [{"title": "x", "paragraphs": content}]}, file)
    return str(path)


def oracle_logits(source):
    """Return logits that are maximal at the correct positions ([CLS] for windows without the answer)."""
    start, end = np.zeros((2, len(source), source.length))
    rows = np.arange(len(source))
    start[rows, source.per_sequence["start"]] = end[rows, source.per_sequence["end"]] = 5.0
    return start, end


def best_answers(source, start, end):
    return [found[0][1] for found, _ in source.answers(start, end)]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.parametrize("version", ["1.1", "v2.0"])
def test_files(name, version, tmp_path):
    rows = [("When?", CONTEXT, [(3, "1066"), (0, "In 1066")]), ("Who?", CONTEXT, [(13, "Normans")])]
    rows += [("Why?", CONTEXT, [])] if version == "v2.0" else []
    found = read_questions(squad(tmp_path / name, rows, version))
    assert [(item.text, item.context, list(item.answers)) for item in found] == rows
    assert found[0].references == ["1066", "In 1066"]


@settings(max_examples=200)
@given(st.data())
def test_answers_are_recovered_from_token_positions(draw):
    """Check that answers are recovered from token positions: exactly for byte tokenizers, and up to token
    boundaries otherwise.
    """
    kind = draw.draw(st.sampled_from(sorted(CODERS)))
    start = draw.draw(st.integers(0, len(CONTEXT) - 1))
    stop = draw.draw(st.integers(start + 1, min(len(CONTEXT), start + 8)))
    text = CONTEXT[start:stop]
    stride = draw.draw(st.integers(1, 5))
    source = encode([Question("Who?", CONTEXT, [(start, text)])], CODERS[kind], 32, stride)
    inside = source.per_sequence["start"] > 0
    if not inside.any():  # no token covers the answer, or the answer ends with a space that no token covers
        assert kind == "words"
        return
    logits = np.stack(oracle_logits(source))
    (answer,) = best_answers(source, *np.where(inside[:, None], logits, 0))
    if kind == "bytes":
        assert answer == text.strip()
    assert text.strip() in answer
    assert len(answer) <= len(text) + 18


def test_windows_overlap_and_contain_the_question():
    coder = CODERS["bytes"]
    source = encode([Question("Who?", CONTEXT, [(13, "Normans")])], coder, 32, 10)
    room = 32 - 4 - 3
    texts = [coder.decode(row[6:-1]) for row in source.tokens]
    assert all(row[:6].tolist() == [coder.cls, *b"Who?", coder.sep] and row[-1] == coder.sep for row in source.tokens)
    whole = CONTEXT.encode()
    assert [text.encode("utf-8", "replace")[:3] for text in texts[:2]] == [whole[:3], whole[10:13]]
    assert len(texts) == -(-(len(whole) - room) // 10) + 1
    batch = source.take(np.arange(len(source)))
    assert (batch["segments"].sum(1) == [len(row) - 6 for row in source.tokens]).all()
    has = np.array(["Normans" in text for text in texts])
    np.testing.assert_array_equal(batch["start"] > 0, has)
    for row in np.flatnonzero(has):
        assert coder.decode(batch["tokens"][row, batch["start"][row] : batch["end"][row] + 1]) == "Normans"
    np.testing.assert_array_equal(batch["end"][~has], 0)


def test_answers_match_exhaustive_search_over_windows():
    """Compare with an exhaustive search for random logits."""
    asked = [Question("Who?", CONTEXT, [(13, "Normans")]), Question("A?", CONTEXT[:20], [(0, "In")])]
    source = encode(asked, CODERS["bytes"], 48, 7)
    start, end = np.random.default_rng(0).normal(size=(2, len(source), 48))
    for number, answer in enumerate(best_answers(source, start, end)):
        best = (-np.inf, "")
        for row in np.flatnonzero(source.origins == number):
            offsets = source.offsets[row]
            for first in range(len(offsets)):
                for last in range(first, min(first + 30, len(offsets))):
                    if offsets[first, 0] >= 0 and offsets[last, 0] >= 0:
                        text = asked[number].context[offsets[first, 0] : offsets[last, 1]].strip()
                        best = max(best, (start[row, first] + end[row, last], text))
        assert answer == best[1]


def test_several_answers_match_exhaustive_search():
    """Compare texts, scores and their order, for windows that overlap and a short context."""
    asked = [Question("Who?", CONTEXT, ()), Question("A?", "Yes.", ())]
    source = encode(asked, CODERS["words"], 16, 3)
    start, end = np.random.default_rng(0).normal(size=(2, len(source), 16))
    assert source.is_cut
    for number, (found, nothing) in enumerate(source.answers(start, end, 7)):
        scores, rows = {}, np.flatnonzero(source.origins == number)
        for row in rows:
            offsets = source.offsets[row]
            places = np.flatnonzero(offsets[:, 0] >= 0)
            for first, last in ((first, last) for first in places for last in places if first <= last):
                text = asked[number].context[offsets[first, 0] : offsets[last, 1]]
                scores[text] = max(scores.get(text, -np.inf), start[row, first] + end[row, last])
        expected = sorted(scores.items(), key=lambda item: -item[1])[:7]
        assert [text for _, text in found] == [text for text, _ in expected]
        np.testing.assert_allclose([score for score, _ in found], [score for _, score in expected])
        assert nothing == min(start[row, 0] + end[row, 0] for row in rows)


def test_unanswerable_questions_need_a_null_answer():
    """Check that "" is predicted by the threshold, and only if questions may have no answer."""
    asked = [Question("Who?", CONTEXT, [(13, "Normans")]), Question("Why?", CONTEXT, [])]
    source = encode(asked, CODERS["words"], 64, 0)
    outputs = np.stack(oracle_logits(source), axis=-1)

    def predicted(facts, threshold=0.0, **options):
        found = QuestionAnswering(no_answer_threshold=threshold, **options).predict(outputs, source, facts)
        return [row["prediction"] for row in found]

    assert predicted(Facts(has_unanswerable=True)) == ["Normans", ""]
    assert predicted(Facts(has_unanswerable=True), -10.0) == ["", ""]  # the sums are 10 and 0, or 0 and 10
    assert predicted(Facts(has_unanswerable=True), 10.5)[1] != ""
    assert predicted(Facts())[1] != ""
    assert predicted(Facts(has_unanswerable=True), unanswerable=False)[1] != ""
    assert predicted(Facts(), unanswerable=True) == ["Normans", ""]
    task = QuestionAnswering(sequence_length=64)
    for count in (1, 2):
        facts = task.examples({"train": asked[:count]}, CODERS["words"], 0).facts
        assert facts.has_unanswerable == (count == 2)


def test_loading(tmp_path):
    path = squad(tmp_path / "a.json", [("Who?", CONTEXT, [(13, "Normans")]), ("Why?", CONTEXT, [])])
    task = QuestionAnswering(sequence_length=48, stride=16)
    loaded = load(SQuAD(path, validation_path=path), task, batch_size=4)
    batch = loaded.train[0]
    assert {name: (value.shape, value.dtype.name) for name, value in batch.items()} == {
        "tokens": ((4, 48), "int32"),
        "segments": ((4, 48), "int32"),
        "tokens_mask": ((4, 48), "bool"),
        "start": ((4,), "int32"),
        "end": ((4,), "int32"),
        "mask": ((4,), "bool"),
    }


def test_impossible_questions_have_no_answers(tmp_path):
    """Check the layout of SQuAD 2.0: plausible answers are not answers, wherever they are."""
    path = tmp_path / "a.json"
    squad(path, [("Who?", CONTEXT, [(13, "Normans")]), ("Why?", CONTEXT, []), ("What?", CONTEXT, [])])
    content = json.loads(path.read_text())
    _, why, what = (paragraph["qas"][0] for paragraph in content["data"][0]["paragraphs"])
    plausible = [{"text": "Normandy", "answer_start": 28}]
    why["plausible_answers"] = what["answers"] = plausible
    path.write_text(json.dumps(content))
    assert [item.references for item in read_questions(str(path))] == [["Normans"], [], []]
    batch = load(SQuAD(str(path)), QuestionAnswering(sequence_length=128), batch_size=3).train[0]
    assert sorted((batch["start"] > 0).tolist()) == [False, False, True]
    assert batch["mask"].all()
    what["is_impossible"] = False
    path.write_text(json.dumps(content))
    assert read_questions(str(path))[2].references == ["Normandy"]
    what["is_impossible"] = "false"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"a\.json, question 3: is_impossible is 'false': it must be true or false"):
        read_questions(str(path))
    what |= {"is_impossible": False, "answers": []}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"a\.json, question 3: 'What\?' has no answer and is not marked as"):
        read_questions(str(path))


@pytest.mark.parametrize("row", [("Why \ud800?", CONTEXT, []), ("Why?", f"{CONTEXT}\udfff", [])])
def test_lone_surrogates_are_refused_with_the_number_of_the_question(row, tmp_path):
    path = squad(tmp_path / "a.json", [("When?", CONTEXT, [(3, "1066")]), row])
    with pytest.raises(ValueError, match=r"a\.json, question 2: the question 'Why.*lone surrogate"):
        read_questions(path)


def test_invalid_files_raise(tmp_path):
    path = squad(tmp_path / "a.json", [("Who?", CONTEXT, [(14, "Normans")])])
    with pytest.raises(ValueError, match=r"a\.json, question 1: The answer 'Normans' to 'Who\?' is not at character"):
        read_questions(path)
    (tmp_path / "b.json").write_text('{"data": [{}]}')
    with pytest.raises(ValueError, match=r"b\.json is not a file in SQuAD's format: KeyError 'paragraphs'"):
        read_questions(f"{tmp_path}/b.json")
    with pytest.raises(ValueError, match=r"task.stride is 60: it must be from 0"):
        encode([Question("Who?", CONTEXT, [])], CODERS["bytes"], 32, 60)


def test_windows_that_a_long_question_shortens_follow_each_other():
    """Check questions of 4 and 16 tokens, whose windows have 25 and 13, as in BERT's code: stride min(20, tokens)."""
    source = encode([Question("Who?", TEXT, []), Question("Who " * 9, TEXT, [])], CODERS["bytes"], 32, 20)
    starts = [int(offsets[offsets[:, 0] >= 0][0, 0]) for offsets in source.offsets]
    assert starts == [0, 20, 40, 0, 13, 26, 39, 52]
    assert source.origins.tolist() == [0] * 3 + [1] * 5


def test_files_without_questions_are_named(tmp_path):
    (path := tmp_path / "dev.json").write_text('{"data": []}')
    with pytest.raises(ValueError, match=r"dev\.json has no questions"):
        SQuAD(str(path)).questions()
