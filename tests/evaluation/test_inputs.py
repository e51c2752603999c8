"""Inputs of predictions: files, what is refused, and the categories of a file."""

import gzip
import json
import re
import tracemalloc
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ml_collections import ConfigDict
from PIL import Image

from lineage import load
from lineage.data import Facts, Loader, Question
from lineage.data.fingerprint import fingerprint
from lineage.data.inputs import Inputs, from_files, from_memory, is_source
from lineage.data.inputs.images import Readable
from lineage.data.sources.tables import CSV, TSV
from lineage.evaluation.prediction import identity, with_categories
from lineage.train import trained
from lineage.train.experiment import Experiment
from lineage.train.trained import Trained


def test_tasks_without_predictions_are_refused(tiny):
    experiment = Experiment(tiny("gpt", {"model.name": "elmo", "task.name": "bidirectional_lm", "model.width": 8}))
    with pytest.raises(ValueError, match="The task 'bidirectional_lm' has no predictions"):
        experiment.context().inputs(["a"], Loader(batch_size=8))
    with pytest.raises(ValueError, match="The task 'bidirectional_lm' has no predictions"):
        experiment.task.predict([], experiment.data.train.source, experiment.data.facts)


@pytest.mark.usefixtures("no_report")
def test_features_of_a_long_text_are_the_mean_of_its_sequences(trained, tmp_path):
    (tmp_path / "labels.tsv").write_text("ab\tyes\ncd\tno\n")
    changes = {"task.name": "text_classification", "source": f"labels:{tmp_path / 'labels.tsv'}", "model.dropout": 0.0}
    changes |= {"tokenizer": "bytes", "task.sequence_length": 6, "task.long_text": "segments"}
    model = load(trained("bert", changes, steps=1)[0])
    features = model.embed(["ab", "cdefabbacdcd", "cd", "cdef", "abba", "cdcd"])
    np.testing.assert_allclose(features[1], features[3:].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(features[2], model.embed(["cd"])[0], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", "", (), "a.txt is empty: there is no input."),
        ("a.csv", "n,review\n1,good\n", (), "a.csv has no column 'text': its columns are n, review; source.text_key"),
        ("a.jsonl", '{"text": 1}\n', (), "a.jsonl, line 1 has 1: it must be a text."),
        ("a.jsonl", f'{{"text": {[0] * 99}}}\n', (), f"a.jsonl, line 1 has [{'0, ' * 19}0,: it must be a text."),
        ("a.jsonl", "{\n", (), "a.jsonl, line 1 is not JSON: Expecting"),
        ("a.docx", "x", (), "a.docx must be a file of .txt, .parquet, .csv, .tsv, .jsonl, or a source such as NAME:"),
        ("a.txt", "x", ("--columns=a,b",), "a.txt must be a file of .parquet, .csv, .tsv, .jsonl, or a source such"),
        ("a.csv", "a,b,c\n1,2,3\n", ("--columns=a,b,c",), "--columns=a,b,c has 3 entries: it must have 1 or 2."),
        ("b/a.txt", None, (), "There is no file"),
        ("a.csv", "text,text\n1,2\n", (), "a.csv has the column 'text' twice."),
    ],
)
def test_invalid_files_raise(name, content, options, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    columns = options[0].partition("=")[2].split(",") if options else ()
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        from_files(str(tmp_path / name), "labeled_texts", columns)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"caf\xe9\nb\n\xff\xfe\nc\xc3\xa9\n", ["line 1 is not UTF-8", "b", "line 3 is not UTF-8", "c\u00e9"]),
        (
            "a.jsonl",
            b'{"text": "a"}\n{\n{"n": 1}\n\n{"text": null}\n[]\n{"text": "caf\xe9"}\n{"text": "b"}',
            ["a", "line 2 is not JSON", "line 3 has no column", "line 5 has None", "line 6 is", "line 7 is", "b"],
        ),
        (
            "a.csv",
            b'n,text\n1\n\n2,b\n3,caf\xe9\n4,"d\nd"\n5,e,f\n',
            ["line 2 has 1 columns", "b", "line 5 is not UTF-8", "d\nd", "line 8 has 3 columns"],
        ),
        ("a.parquet", [b"a", b"caf\xe9", None, b"b"], ["a", "line 2 is not UTF-8", "line 3 has None", "b"]),
    ],
)
def test_bad_rows_become_errors(name, content, expected, tmp_path):
    """Check the rows in any part of a file, and that as many bad rows as allowed are accepted."""
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"text": pa.array(content, pa.binary())}), path)
    else:
        path.write_bytes(content)
    count = sum("line" in row for row in expected)
    with pytest.raises(ValueError, match=rf"{name}, line .* \(--skip-bad=N continues without N such inputs\.\)"):
        from_files(str(path), "documents", bad=count - 1)
    found = from_files(str(path), "documents", bad=count)
    for start in (0, len(expected) - 1):
        for row, wanted in zip(found.part(start, len(expected)), expected[start:], strict=True):
            assert f"{name}, {wanted}" in str(row) if "line" in wanted else row == wanted


def test_quotes_mean_what_they_mean_in_the_source_of_the_run(tmp_path):
    (path := tmp_path / "a.tsv").write_text('text\n"a\nb"\n')
    about = {"task": SimpleNamespace(reads="documents"), "facts": SimpleNamespace(channels=None)}
    for quotes, rows in ((True, ["a\nb"]), (False, ['"a', 'b"'])):
        run = SimpleNamespace(experiment=SimpleNamespace(source=TSV(str(path), quotes=quotes), **about))
        inputs, _ = Trained.inputs(run, str(path))
        assert list(inputs.part(0, 2)) == rows


def test_columns_are_for_files_and_splits_for_sources(tmp_path):
    (path := tmp_path / "a.csv").write_text("text,review\na,b\n")
    (text := tmp_path / "a.txt").write_text("a\n")
    Image.new("L", (2, 2)).save(image := tmp_path / "a.png")
    about = {"task": SimpleNamespace(reads="documents"), "facts": SimpleNamespace(channels=None)}
    run = SimpleNamespace(experiment=SimpleNamespace(source=CSV(str(path)), **about))
    assert list(Trained.inputs(run, str(path), columns=["review"])[0].part(0, 1)) == ["b"]
    for given in (None, "csv", f"csv:{path}"):
        assert list(Trained.inputs(run, given, "train")[0].rows) == ["a"]
        with pytest.raises(ValueError, match="--columns=review is for files: the inputs are those of the source 'csv'"):
            Trained.inputs(run, given, columns=["review"])
    with pytest.raises(ValueError, match=rf"--split is 'train': {path} is a file or folder, and only sources have"):
        Trained.inputs(run, str(path), "train")
    with pytest.raises(ValueError, match=rf"--columns=review is for tables: {text} has no columns."):
        Trained.inputs(run, str(text), columns=["review"])
    with pytest.raises(ValueError, match=rf"--columns=review is for tables: {image} has no columns."):
        from_files(str(image), "images", ["review"], channels=1)


def test_only_the_images_of_a_folder_are_fingerprinted(tmp_path, monkeypatch):
    """Check a file of predictions in the folder of the images, with which less of each file would be read."""
    monkeypatch.setattr(trained, "fingerprint", partial(fingerprint, limit=10_000))
    (image := tmp_path / "a.png").write_bytes(np.random.default_rng(0).bytes(20_000))
    about = {"source": None, "facts": SimpleNamespace(channels=3)}
    run = SimpleNamespace(experiment=SimpleNamespace(task=SimpleNamespace(reads="images"), **about))
    _, before = Trained.inputs(run, tmp_path)
    (tmp_path / "predictions.jsonl").write_text("{}\n")
    assert Trained.inputs(run, tmp_path)[1] == before
    assert list(before) == [str(image)]


def test_sound_header_is_needed(tmp_path):
    """Check a header that is not UTF-8, and rows whose entries have no name, of which the good ones keep theirs."""
    (tmp_path / "a.csv").write_bytes(b"caf\xe9,text\n1,a\n")
    with pytest.raises(ValueError, match=r"a\.csv, line 1 is not UTF-8 text: byte 0xe9 at offset 3 of the line"):
        from_files(str(tmp_path / "a.csv"), "documents", bad=5)
    (tmp_path / "a.jsonl").write_text('{"words": 5}\n{"words": ["a", "b"]}\n')
    assert from_files(str(tmp_path / "a.jsonl"), "tagged_sentences", bad=1).identifiers == [{}, {"words": ["a", "b"]}]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.csv", "a.parquet"])
def test_texts_are_read_where_they_are_needed(name, tmp_path):
    """Check the parts of a file, that they are not in memory together, and a file that changes meanwhile."""
    path, texts = tmp_path / name, [f"{number} {'x' * 90}" for number in range(20_000)]
    if name == "a.parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)
    elif name == "a.jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))
    else:
        path.write_text("".join(f"{text}\n" for text in ["text"] * (name == "a.csv") + texts))
    tracemalloc.start()
    actual = from_files(str(path), "documents")
    for start in range(0, 20_000, 512):
        assert actual.part(start, start + 512) == texts[start : start + 512]
    assert actual.part(10, 12) == texts[10:12]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6  # all texts have 2 MB
    assert from_files(str(path), "labeled_texts").rows[-1:] == [(texts[-1],)]
    path.write_bytes(b"1\n")
    with pytest.raises(ValueError, match="has changed while it was read" if name == "a.txt" else name):
        actual.part(0, 2)


@pytest.mark.parametrize("words", [5, True, {"a": 1}, [1, 2], [["a"]], ["a", None], [None]])
def test_words_that_are_not_texts_raise(words, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"words": words}))
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1 has .*: it must be a text, or a list of words"):
        from_files(str(tmp_path / "a.jsonl"), "tagged_sentences")


def test_inputs_of_questions_and_images(tmp_path):
    """Check ids, answers that are missing, lists of images, and what is refused."""
    article = {"paragraphs": [{"context": "It is.", "qas": [{"id": "x7", "question": "Is it?"}]}]}
    (tmp_path / "a.json").write_text(json.dumps({"data": [article]}))
    actual = from_files(str(tmp_path / "a.json"), "questions")
    assert actual.rows == [Question("Is it?", "It is.", [], "x7")]
    assert actual.identifiers == [{"id": "x7"}]
    article["paragraphs"][0]["qas"][0]["id"] = None
    (tmp_path / "b.json").write_text(json.dumps({"data": [article]}))
    assert from_files(str(tmp_path / "b.json"), "questions").identifiers == [{"id": "0"}]
    (tmp_path / "a.csv").write_text("question,context\nIs it?,It is.\n")
    actual = from_files(str(tmp_path / "a.csv"), "questions")
    assert (actual.rows[0].text, actual.rows[0].context, actual.identifiers) == ("Is it?", "It is.", [{"id": "0"}])
    Image.new("L", (4, 2)).save(tmp_path / "a.png")
    (tmp_path / "a, b").mkdir()
    Image.new("L", (4, 2)).save(tmp_path / "a, b" / "a.png")
    assert from_files(str(tmp_path / "a, b"), "images", channels=3).identifiers == [{"file": "a.png"}]
    (tmp_path / "a, b" / "a.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"There is no file or folder .*/photos\."):
        from_files(str(tmp_path / "photos"), "images", channels=3)
    (tmp_path / "list.txt").write_text(f"a.png\n{tmp_path / 'a.png'}\n")
    for name in ("list.txt", "a.png", ""):
        actual = from_files(str(tmp_path / name), "images", channels=3)
        assert actual.rows[len(actual.rows) - 1]["image"].shape == (2, 4, 3)
        assert {row["file"] for row in actual.identifiers} == {"a.png"}
        assert len(actual.rows) == (2 if name == "list.txt" else 1)
    (tmp_path / "empty").mkdir()
    for name, message in (("empty", "There is no image in"), ("a.csv", "a.csv must be an image, a folder"),
                          ("a.json", "a.json is not a file in COCO's format: KeyError 'images'")):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            from_files(str(tmp_path / name), "images", channels=3)


def test_folder_with_the_name_of_a_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [*map(is_source, ("digits", "csv:a.csv", "./digits", "a.csv"))] == [True, True, False, False]
    (tmp_path / "digits").mkdir()
    with pytest.raises(ValueError, match=r"--inputs is 'digits', a source and also a file or folder: .* \./digits"):
        is_source("digits")
    assert not is_source("./digits")


def test_model_needs_the_categories_of_a_file():
    facts = Facts(class_names=("cat", "dog"))
    assert with_categories(facts, Inputs([], categories={"dog": 3, "cat": 9})).category_ids == (9, 3)
    labels = replace(facts, class_names=("N/A", "cat", "N/A", "dog"), category_ids=(0, 1, 2, 3))
    assert with_categories(labels, Inputs([])).category_ids == (0, 1, 2, 3)
    assert with_categories(labels, Inputs([], categories={"dog": 3, "cat": 9})).category_ids == (0, 9, 0, 3)
    with pytest.raises(ValueError, match="The inputs have no category 'dog': the model's classes must be among theirs"):
        with_categories(facts, Inputs([], categories={"cat": 9}))


def test_ids_that_occur_twice(tmp_path):
    """Check questions and images: files of predictions have one entry for each id."""
    asked = [{"id": id, "question": "Is it?"} for id in ("x", "y", "x")]
    (tmp_path / "a.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": "It is.", "qas": asked}]}]}))
    with pytest.raises(ValueError, match="Several inputs have the id 'x': their ids must differ"):
        from_files(str(tmp_path / "a.json"), "questions")
    images = [{"id": 7, "file_name": name} for name in ("a.png", "b.png")]
    content = {"images": images, "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "a"}]}
    (tmp_path / "b.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"b\.json has categories with the same `id` or `name`"):
        from_files(str(tmp_path / "b.json"), "images_with_boxes")
    (tmp_path / "b.json").write_text(json.dumps({"images": images}))
    with pytest.raises(ValueError, match="Several inputs have the id 7: their ids must differ"):
        from_files(str(tmp_path / "b.json"), "images_with_boxes")


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ([{"text": "a"}], "labeled_texts", "input 0 is {'text': 'a'}: it must be a text, or a list of texts or words"),
        ([{"question": "a", "context": "b"}], "questions", "input 0 is {'question'"),
        (["a", {"b", "c"}], "labeled_texts", "input 1 is {"),
        (["a", None], "documents", "input 1 is None: it must be a text"),
        (["a", float("nan")], "tagged_sentences", "input 1 is nan: it must be a text"),
        ({"a": 1}, "documents", "The inputs are \"{'a': 1}\": they must be a list"),
        (SimpleNamespace(columns=["text"]), "documents", "they must be a list"),
        (iter(()), "documents", "they must be a list of at least one"),
        ([None], "images", "input 0 is None: it must be a path, an array or a Pillow image"),
        (None, "documents", "The inputs are 'None': they must be a list"),
        (np.array("a"), "documents", "The inputs are 'a': they must be a list"),
        (Path("a.png"), "images", "The inputs are 'a.png': they must be a list"),
        (["a", np.array("b")], "labeled_texts", "input 1 is array('b', dtype='<U1'): it must be a text"),
    ],
)
def test_objects_in_place_of_texts(values, kind, message):
    """Check rows as dictionaries, whose keys would be the texts, and missing values of pandas."""
    with pytest.raises(ValueError, match=re.escape(message)):
        from_memory(values, kind)


def test_series_with_another_index():
    """Check that images are in the order of a Series, not of its index, as in one of pandas."""

    class Series(list):
        def __getitem__(self, index):
            return super().__getitem__(-1 - index)

    rows = from_memory(Series(np.full((2, 2, 3), value, np.uint8) for value in range(3)), "images", 3).rows
    assert [int(rows[index]["image"].max()) for index in range(3)] == [0, 1, 2]
    assert from_memory(iter(["a", "b"]), "documents").rows == ["a", "b"]
    assert from_memory(np.array(["a", "b"]), "documents").rows == ["a", "b"]
    assert from_memory(np.array([["a", "b"]]), "labeled_texts").rows == [("a", "b")]
    assert from_memory([b"a"], "labeled_texts").rows == [("a",)]


def test_arrays_of_jax_are_images():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
    for values in (jnp.asarray(pixels), [*jnp.asarray(pixels)], [pixels[0], jnp.asarray(pixels[1])]):
        images = from_memory(values, "images", 3).rows.take(np.arange(2))["image"]
        np.testing.assert_array_equal(images, pixels)
    with pytest.raises(ValueError, match=r"An image is an array float32 \[2, 2, 3\]: it must be uint8"):
        from_memory([jnp.zeros((2, 2, 3))], "images", 3).rows[0]


def test_pillow_images_that_cannot_be_used_are_named():
    """Check a Pillow image of 16 bits after a sound one."""
    rows = from_memory([Image.new("L", (8, 8)), Image.new("I;16", (8, 8))], "images", 1).rows
    errors = {}
    images = Readable(rows, (8, 8, 1), resized=False, has_boxes=False, note=errors.__setitem__)
    images.take(np.arange(2))
    assert str(errors[1]) == "Image 1: A Pillow image cannot be read as an image: its pixels are I;16, not of 8 bits."
    assert list(errors) == [1]


@pytest.mark.parametrize(
    "image",
    [np.ones((8, 8, 3), np.float32), np.ones((8, 8, 3), bool), np.ones((8, 8), np.uint8), np.ones((8, 8, 0), np.uint8)],
)
def test_arrays_that_are_no_images(image):
    """Check pixels from 0 to 1, which would be black."""
    with pytest.raises(ValueError, match=r"An image is an array \w+ \[8, 8.*\]: it must be uint8 \[h, w, c\]"):
        from_memory([image], "images", 3).rows[0]


def test_checkpoint_that_a_run_in_progress_deletes_is_identified_by_its_step(tmp_path):
    model = SimpleNamespace(step=6, others={}, loader=SimpleNamespace(batch_size=1))
    model.experiment = SimpleNamespace(workdir=tmp_path, config=ConfigDict())
    (tmp_path / "checkpoints" / "6" / "about").mkdir(parents=True)
    (tmp_path / "checkpoints" / "6" / "about" / "metadata").write_text("{}")
    assert identity(model)["checkpoint"] == [6, [2, zlib.crc32(b"{}")]]
    model.step = 4
    assert identity(model)["checkpoint"] == [4]  # other files of the run, which change, are not read


def test_other_models_of_predictions_are_identified_by_their_checkpoints(tmp_path):
    config, expert = ConfigDict({"sampling": {"draft": "", "contrast": f"{tmp_path}/weaker"}}), f"{tmp_path}/expert"
    model, seen = SimpleNamespace(experts=[expert], experiment=SimpleNamespace(config=config)), []
    for name in ("weaker", "weaker", "expert"):
        record = tmp_path / name / "checkpoints" / str(len(seen)) / "about" / "metadata"
        record.parent.mkdir(parents=True)
        record.write_text(f"{{{len(seen)}}}")
        seen.append(Trained.others.fget(model))
    first, second, third = seen
    assert first.keys() == third.keys() == {"sampling.contrast", expert}
    assert first["sampling.contrast"] != second["sampling.contrast"] == third["sampling.contrast"]
    assert first[expert] == second[expert] != third[expert]
