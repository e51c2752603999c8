"""Notes on data that are likely to be a mistake."""

import pytest

from lineage.data import SOURCES, Loader, load
from lineage.data.notes import notes
from lineage.data.tokenizers import Bytes
from lineage.tasks import TASKS

ROWS = [f"text {number}\t{label}" for number in range(8) for label in ("good", "bad")]


@pytest.fixture
def said(tmp_path):
    def said(rows, task="text_classification", source="labels", batch_size=4, classified=True, **options):
        path = tmp_path / "train.tsv"
        path.write_text("\n".join(rows))
        source = SOURCES[source](path=str(path))
        made = TASKS[task](**{"sequence_length": 16} | options)
        return list(notes(source, load(source, made, Bytes(), Loader(batch_size=batch_size)), classified))

    return said


def test_nothing_is_said_about_usual_data(said):
    assert said(ROWS) == []
    assert said(["rare\tonce", *ROWS, "also\ttwice", "also\ttwice"][1:]) == []


def test_a_header_that_became_a_class(said):
    assert said(["text\tlabel", *ROWS]) == [
        "only the first example has the label 'label': if it is a header, delete it."
    ]
    assert said(["rare\tonce", *ROWS, "rare\ttwo"]) == []  # several classes have one example


def test_one_class(said):
    (note,) = said([row for row in ROWS if row.endswith("bad")])
    assert note == "all examples have the label 'bad': a classifier needs at least two classes."
    assert said([row for row in ROWS if row.endswith("bad")], classified=False) == []


def test_a_batch_that_is_larger_than_the_data(said):
    (note,) = said(ROWS, batch_size=32)
    assert note.startswith("loader.batch_size is 32, but there are 16 training examples:")


@pytest.mark.parametrize(
    ("task", "source", "options", "fate"),
    [
        ("text_classification", "labels", {"long_text": "tail"}, "are truncated"),
        ("sequence_to_sequence", "pairs", {}, "are left out"),
        ("conditional_lm", "pairs", {}, "are left out"),
    ],
)
def test_long_texts_are_counted(said, task, source, options, fate):
    rows = [*ROWS, *["a text of many characters\tgood"] * 2]
    (note,) = said(rows, task, source, **options)
    assert note == f"2 of 18 training examples are longer than task.sequence_length, 16, and {fate}."


def test_windows_of_long_texts_are_not_truncated(said):
    assert said([*ROWS, "a text of many characters\tgood"], long_text="segments") == []


@pytest.mark.parametrize(("source", "name"), [("labels", "a.tsv"), ("labels", "a.jsonl"), ("pairs", "a.tsv")])
def test_empty_files_are_named(source, name, tmp_path):
    path = tmp_path / name
    path.touch()
    with pytest.raises(ValueError, match=f"^{path} is empty: it must have "):
        SOURCES[source](path=str(path)).pairs()


def test_empty_parallel_files_are_named(tmp_path):
    for name in "ab":
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"/a and .*/b are empty: they must have a text in each line"):
        SOURCES["pairs"](path=f"{tmp_path}/a,{tmp_path}/b").pairs()
