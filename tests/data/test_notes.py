"""Notes on data that are likely to be a mistake."""

import gzip
import io

import numpy as np
import pytest
from PIL import Image

from lineage.data import SOURCES, Loader, load
from lineage.data.examples.mixture import Mixed
from lineage.data.notes import check_examples, notes
from lineage.data.tokenizers import Bytes
from lineage.tasks import TASKS

ROWS = [f"text {number}\t{label}" for number in range(8) for label in ("good", "bad")]


@pytest.fixture
def noted(tmp_path):
    def noted(rows, task="text_classification", source="labels", batch_size=4, classes=2, **options):
        path = tmp_path / "train.tsv"
        path.write_text("\n".join(rows))
        source = SOURCES[source](path=str(path))
        built = TASKS[task](**{"sequence_length": 16} | options)
        return list(notes(source, load(source, built, Bytes(), Loader(batch_size=batch_size)), classes))

    return noted


def test_nothing_is_said_about_usual_data(noted):
    assert noted(ROWS) == []
    assert noted(["rare\tonce", *ROWS, "also\ttwice", "also\ttwice"][1:]) == []


def test_missing_parts_of_files(tmp_path):
    """Check files of an incomplete download, beside complete ones."""
    names = ["train-00000-of-00003.csv", "train-00002-of-00003.csv", "test-0-of-2.csv", "test-1-of-2.csv.gz", "dev.csv"]
    for name in names:
        content = b"text,label\na,0\nb,1\n"
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    source = SOURCES["csv"](path=str(tmp_path))
    data = load(source, TASKS["text_classification"](sequence_length=16), Bytes(), Loader(batch_size=4))
    missing = f"only 2 of the 3 files {tmp_path}/train-*-of-00003.csv are read: the rows of the others are missing."
    assert [note for note in notes(source, data, 2) if "several splits" not in note] == [missing]


def test_files_of_no_split(tmp_path):
    for name in ("train.csv", "train_2.csv", "more.csv", "dev_extra.csv", "dev.csv", "README.md"):
        (tmp_path / name).write_text(f"text,label\na {name},0\nb,1\n")
    source = SOURCES["csv"](path=str(tmp_path), validation_path=str(tmp_path / "dev_extra.csv"))
    data = load(source, TASKS["text_classification"](sequence_length=16), Bytes(), Loader(batch_size=4))
    assert list(notes(source, data, 2)) == [
        f"{tmp_path}/more.csv is not read because its path has no split or, for an image, no class (1 such files)."
    ]


@pytest.mark.parametrize(
    ("source", "path", "validation_path"),
    [("csv", "*.csv", "dev.csv"), ("csv", "train.csv", "link.csv"), ("labels", "a.tsv", "a.tsv"), ("csv", ".", "")],
)
def test_files_of_several_splits(tmp_path, source, path, validation_path):
    for name in ("train.csv", "dev.csv"):
        (tmp_path / name).write_text(f"text,label\na {name},0\nb,1\n")
    (tmp_path / "a.tsv").write_text("a\t0\nb\t1\n")
    if "link.csv" in validation_path:
        (tmp_path / "link.csv").symlink_to("train.csv")
    paths = {"validation_path": str(tmp_path / validation_path)} if validation_path else {}
    source = SOURCES[source](path=str(tmp_path / path), **paths)
    data = load(source, TASKS["text_classification"](sequence_length=16), Bytes(), Loader(batch_size=2))
    noted = [note for note in notes(source, data, 2) if "in several splits (1 such files)" in note]
    assert len(noted) == bool(validation_path)


def test_labels_that_are_written_differently(noted):
    assert noted([*ROWS, "a\tgood ", "b\tgood "], classes=None) == []
    assert noted([*ROWS, "a\tgood ", "b\tgood "], classes=3) == ["the labels 'good' and 'good ' are different classes."]
    assert noted([*ROWS, *["a\t1.0", "b\t1"] * 2], classes=4) == ["the labels '1' and '1.0' are different classes."]


def test_held_out_rows_of_one_class(tmp_path):
    (path := tmp_path / "train.csv").write_text("text,label\n" + "a,good\nb,bad\n" * 20)
    noted = {}
    for fraction in (0.1, 0.3):
        source = SOURCES["csv"](path=str(path), validation_fraction=fraction)
        data = load(source, TASKS["text_classification"](sequence_length=16), Bytes(), Loader(batch_size=2))
        noted[fraction] = list(notes(source, data, 2))
    assert noted == {0.1: ["all 4 examples of the split validation have the label 'bad'."], 0.3: []}


def test_a_header_that_became_a_class(noted):
    assert noted(["text\tlabel", *ROWS]) == [
        "only the first example has the label 'label': if it is a header, delete it."
    ]
    assert noted(["rare\tonce", *ROWS, "rare\ttwo"]) == []  # several classes have one example


def test_one_class(noted):
    (note,) = noted([row for row in ROWS if row.endswith("bad")])
    assert note == "all examples have the label 'bad': a classifier needs at least two classes."
    assert noted([row for row in ROWS if row.endswith("bad")], classes=None) == []


def test_fewer_classes_than_those_of_the_model(noted):
    assert noted(ROWS, classes=3) == ["model.num_classes is 3, but the data have 2 classes."]
    assert noted(ROWS, classes=None) == []


def test_a_batch_that_is_larger_than_the_data(noted):
    (note,) = noted(ROWS, batch_size=32)
    assert note.startswith("loader.batch_size is 32, but there are 16 training examples:")


@pytest.mark.parametrize(
    ("task", "source", "options", "fate"),
    [
        ("text_classification", "labels", {"long_text": "tail"}, "are truncated"),
        ("sequence_to_sequence", "pairs", {}, "are left out"),
        ("conditional_lm", "pairs", {}, "are left out"),
    ],
)
def test_long_texts_are_counted(noted, task, source, options, fate):
    rows = [*ROWS, *["a text of many characters\tgood"] * 2]
    (note,) = noted(rows, task, source, **options)
    assert note == f"2 of 18 training examples are longer than task.sequence_length, 16, and {fate}."


def test_windows_of_long_texts_are_not_truncated(noted):
    assert noted([*ROWS, "a text of many characters\tgood"], long_text="segments") == []


def drawn(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damaged_images_are_found_at_the_start(kind, tmp_path, monkeypatch):
    """Check truncated images and other files: all of them are found, and sound images are not decoded."""
    written = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(256, size=(40, 40, 3), dtype=np.uint8)).save(written, kind)
    whole = written.getvalue()
    for number in range(40):
        drawn(tmp_path / f"train/{number % 2}/{number:02}.{kind}", whole)
    drawn(tmp_path / f"test/1/0.{kind}", whole + b"more")  # which decoders ignore

    def check(**options):
        task = TASKS["image_classification"](image_size=8, **options)
        data = load(SOURCES["folder"](path=str(tmp_path)), task, Bytes(), Loader(batch_size=4))
        check_examples(data)
        return data

    train = check().train.source
    monkeypatch.setattr("lineage.data.transforms.pillow.decode", lambda file, *_: pytest.fail(f"{file} is decoded"))
    for index in range(40 * (kind != "WEBP")):
        train.check(index)
    monkeypatch.undo()
    drawn(tmp_path / f"train/0/06.{kind}", whole[:-40])
    drawn(tmp_path / f"train/1/07.{kind}", b"text")
    for options in ({}, {"max_examples": 40}):
        with pytest.raises(
            ValueError, match=r"/0[67]\.\w+ cannot be read as an image: .*\(1 more examples are damaged"
        ):
            check(**options)
    with pytest.raises(ValueError, match=r"/06\.\w+ cannot be read"):
        Mixed([train, train], [1, 1]).check(40 + 3)


def test_check_of_large_data_takes_little_time(tmp_path, monkeypatch):
    drawn(tmp_path / "train/a/0.png", b"")
    Image.new("RGB", (4, 4)).save(tmp_path / "train/a/0.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "train/a/1.png")
    data = load(SOURCES["folder"](path=str(tmp_path)), TASKS["image_classification"](), Bytes(), Loader(batch_size=1))
    checked = []
    monkeypatch.setattr("lineage.data.sources.folder.ImageFiles.check", lambda self, index: checked.append(index))
    check_examples(data, seconds=0)
    assert checked == [0]


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
