import json
import os
import subprocess
import sys
import textwrap
from contextlib import closing
from functools import partial

import cloudpickle
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from lineage.data.content import Arrays
from lineage.data.facts import evaluating
from lineage.data.sources.tfds import TFDS, find_builder
from lineage.data.tokenizers.kinds import Words
from lineage.data.transforms.pillow import png
from lineage.tasks.causal_lm import CausalLM
from lineage.tasks.image_classification import ImageClassification
from lineage.tasks.object_detection import ObjectDetection
from lineage.tasks.question_answering import QuestionAnswering
from lineage.tasks.sequence_to_sequence import SequenceToSequence
from lineage.tasks.text_classification import TextClassification, TextRegression
from tests.data.conftest import load


def test_images(shapes):
    loaded = load(TFDS("shapes", str(shapes)), ImageClassification(), batch_size=8)
    assert list(loaded.splits) == ["test"]
    assert loaded.facts.class_names == ("circle", "line", "box")
    assert loaded.facts.image_size == (8, 8)
    assert loaded.facts.examples == {"train": 40, "test": 7}
    (batch,) = loaded.splits["test"]
    assert batch["image"].shape == (8, 8, 8, 1)
    assert batch["mask"].tolist() == [True] * 7 + [False]
    values = np.rint((batch["image"] * 0.5 + 0.5) * 255)
    np.testing.assert_array_equal(values[:7], np.arange(7)[:, None, None, None] * np.ones((1, 8, 8, 1)))
    assert batch["label"][:7].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert list(evaluating(TFDS("shapes", str(shapes)), loaded.facts).images().splits) == ["test"]


def test_split_syntax(shapes):
    splits = {"train_split": "train[:75%]", "validation_split": "train[75%:]", "test_split": "test"}
    source = TFDS("shapes:1.0.0", str(shapes), **splits)
    assert source.files() == [str(shapes / "shapes" / "1.0.0")]
    loaded = load(source, ImageClassification(), batch_size=3)
    assert loaded.facts.examples == {"train": 30, "validation": 10, "test": 7}
    first = next(iter(loaded.splits["validation"]))
    assert np.rint((first["image"][:, 0, 0, 0] * 0.5 + 0.5) * 255).tolist() == [30, 31, 32]
    assert source.shared() == []
    (shared,) = TFDS("shapes", str(shapes), validation_split="train[75%:]").shared()
    assert shared.endswith("shapes-train.array_record-00000-of-00001")


def test_in_memory_is_the_same(shapes):
    tasks = (ImageClassification(augment="shift(2)", in_memory=kept) for kept in (False, True))
    slow, fast = (load(TFDS("shapes", str(shapes)), task, batch_size=8) for task in tasks)
    np.testing.assert_array_equal(slow.train[9]["image"], fast.train[9]["image"])
    assert isinstance(fast.train.source, Arrays)


@pytest.mark.slow
def test_workers(shapes):
    what = TFDS("shapes", str(shapes)), ImageClassification(augment="flip | randaugment(2, 5)")
    plain, ahead = load(*what, batch_size=8), load(*what, batch_size=8, workers=2)
    for step, batch in zip(range(3, 6), ahead.train.iterate(3)):
        np.testing.assert_array_equal(batch["image"], plain.train[step]["image"])


def test_texts(prepare, tmp_path):
    texts = {"train": [{"text": f"text {i} ß".encode()} for i in range(10)], "validation": [{"text": b"one"}]}
    prepare(tmp_path, "prose", lambda kinds: {"text": kinds.Text()}, texts)
    source, task = TFDS("prose", str(tmp_path)), CausalLM(sequence_length=8)
    loaded = load(source, task, batch_size=2)
    assert loaded.facts.tokens == {"train": 10 * (9 + 1), "validation": 3}
    stream = np.concatenate([loaded.train.source[i]["tokens"] for i in range(3)])
    assert loaded.tokenizer.decode(stream).startswith("text 0 ß<|endoftext|>text 1 ß<|endoftext|>")
    assert load(TFDS("prose", str(tmp_path), max_bytes=30), task).facts.tokens["train"] == 3 * 10
    kept = load(source, CausalLM(sequence_length=8, cache_dir=str(tmp_path / "cache")), batch_size=2)
    np.testing.assert_array_equal(kept.train[5]["tokens"], loaded.train[5]["tokens"])
    with pytest.raises(ValueError, match="has no feature 'image'"):
        load(source, ImageClassification())


def test_pairs_of_two_features(prepare, tmp_path):
    rows = [{"de": f"Bäume {i}".encode(), "en": f"house {i}".encode()} for i in range(6)]
    splits = {"train": rows, "validation": rows[:1], "test": rows[:2]}
    prepare(tmp_path, "wmt", lambda kinds: kinds.Translation(["de", "en"]), splits)
    task = SequenceToSequence(sequence_length=12)
    loaded = load(TFDS("wmt", str(tmp_path), text_key="en,de"), task, batch_size=2)
    assert loaded.facts.examples == {"train": 6, "validation": 1, "test": 2}
    batch, coder = loaded.splits["test"][0], loaded.tokenizer
    assert coder.decode(batch["inputs"][1][batch["inputs_mask"][1]]) == "house 1<|endoftext|>"
    assert coder.decode(batch["targets"][1][batch["mask"][1]]) == "Bäume 1<|endoftext|>"
    assert loaded.splits["test"].source.references == ["Bäume 0", "Bäume 1"]
    with pytest.raises(ValueError, match=r"source.text_key is 'text': pairs need two features"):
        load(TFDS("wmt", str(tmp_path)), task)
    with pytest.raises(ValueError, match="has no feature 'fr': it has de, en"):
        load(TFDS("wmt", str(tmp_path), text_key="de,fr"), task)


def test_splits_without_labels_or_examples_are_omitted(prepare, tmp_path):
    """Check a test split whose labels are -1, as in ImageNet, and an empty validation split."""

    def features(kinds):
        return {"image": kinds.Image(shape=(8, 8, 1)), "label": kinds.ClassLabel(names=["a", "b"])}

    def rows(*labels):
        return [{"image": png(np.zeros((8, 8, 1), np.uint8)), "label": label} for label in labels]

    prepare(tmp_path, "some", features, {"train": rows(0, 1, 1), "validation": [], "test": rows(-1, -1)})
    source = TFDS("some", str(tmp_path))
    assert load(source, ImageClassification(), batch_size=2).facts.examples == {"train": 3}
    assert list(source.images().splits) == ["train", "test"]  # for predictions
    with pytest.raises(ValueError, match=r"'train\[:0\]' of some/1.0.0 cannot be read: it has no examples"):
        load(TFDS("some", str(tmp_path), train_split="train[:0]"), ImageClassification())


def test_documents_of_another_preparation_have_another_fingerprint(prepare, tmp_path):
    def features(kinds):
        return {"text": kinds.Text()}

    found = []
    for folder, text in (("a", b"One"), ("b", b"one"), ("c", b"One")):
        prepare(tmp_path / folder, "texts", features, {"train": [{"text": text}]})
        found.append(TFDS("texts", str(tmp_path / folder)).documents()["train"].fingerprint())
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("text_key", ["texts", "number"])
@pytest.mark.parametrize("task", [CausalLM, TextClassification])
def test_a_feature_without_texts_raises(task, text_key, prepare, tmp_path):
    def features(kinds):
        return {"texts": kinds.Sequence(kinds.Text()), "number": np.int64, "label": kinds.ClassLabel(names=["a"])}

    row = {"texts": np.array([b"a", b"b"], object), "number": 1, "label": 0}
    prepare(tmp_path, "some", features, {"train": [row]})
    with pytest.raises(ValueError, match=f"feature '{text_key}' of example 0 is .*: it must be a text"):
        load(TFDS("some", str(tmp_path), text_key=text_key), task(sequence_length=8))


def test_features_of_unsupported_shapes_raise(prepare, tmp_path):
    def features(kinds):
        names = ["a", "b"]
        image, depth = kinds.Image(shape=(None, None, None)), kinds.Image(shape=(8, 8, 1), dtype=np.float32)
        several = kinds.Sequence(kinds.ClassLabel(names=names))
        others = {"objects": kinds.Sequence(kinds.BBoxFeature()), "depth": depth}
        return {
            "image": image,
            "label": kinds.ClassLabel(names=names),
            "text": kinds.Text(),
            "labels": several,
        } | others

    row = {"image": png(np.zeros((8, 8, 3), np.uint8)), "label": 0, "text": b"a", "labels": np.array([0, 1])}
    row |= {"objects": np.zeros(4), "depth": png(np.zeros((8, 8, 4), np.uint8))}
    prepare(tmp_path, "some", features, {"train": [row]})
    with pytest.raises(ValueError, match=r"The images 'image' of some/1\.0\.0 have no known number of channels"):
        load(TFDS("some", str(tmp_path)), ImageClassification())
    for key in ("depth", "label"):
        with pytest.raises(ValueError, match=rf"The feature '{key}' of some/1\.0\.0 is not an image of 8 bits"):
            load(TFDS("some", str(tmp_path), image_key=key), ImageClassification())
    with pytest.raises(ValueError, match=r"The feature 'labels' of some/1\.0\.0 is not a class label"):
        load(TFDS("some", str(tmp_path), label_key="labels"), ImageClassification())
    with pytest.raises(ValueError, match=r"The feature 'objects' of some/1\.0\.0 has no 'bbox' and 'label'"):
        load(TFDS("some", str(tmp_path)), ObjectDetection())
    with pytest.raises(ValueError, match=r"The feature 'labels' of some/1\.0\.0 is not a single label"):
        load(TFDS("some", str(tmp_path), label_key="labels"), TextClassification(sequence_length=8))


def test_unreadable_images_are_named(prepare, tmp_path):
    def features(channels, kinds):
        return {"image": kinds.Image(shape=(8, 8, channels)), "label": kinds.ClassLabel(names=["a"])}

    rows = [{"image": content, "label": 0} for content in (png(np.zeros((8, 8, 1), np.uint8)), b"damaged")]
    prepare(tmp_path, "some", partial(features, 1), {"train": rows})
    with pytest.raises(ValueError, match=r"Example 1 of the split 'train' of some/1\.0\.0 cannot be read as an image"):
        load(TFDS("some", str(tmp_path)), ImageClassification(), batch_size=2).train[0]
    prepare(tmp_path, "two", partial(features, 2), {"train": rows})
    with pytest.raises(ValueError, match=r"The images 'image' of two/1\.0\.0 have 2 channels: they must have 1, 3"):
        load(TFDS("two", str(tmp_path)), ImageClassification())


def test_invalid_utf8_raises(prepare, tmp_path):
    prepare(tmp_path, "prose", lambda kinds: {"text": kinds.Text()}, {"train": [{"text": b"a"}, {"text": b"ab\xff"}]})
    with pytest.raises(ValueError, match=r"prose/1\.0\.0 .*feature 'text' of example 1 is not UTF-8 at byte 2"):
        load(TFDS("prose", str(tmp_path)), CausalLM(sequence_length=8))


@pytest.mark.parametrize(
    ("boxes", "label", "message"),
    [
        ([0.1, 0.2, 0.5, np.nan], 0, "Example 0 has a box that is not finite"),
        ([0.1, 0.2, 0.5, 0.6], 2, "Example 0 has a box with the label 2: labels must be from 0 to 1"),
        ([0.1, 0.2, 0.5, 0.6], -1, "Example 0 has a box with the label -1: labels must be from 0 to 1"),
        ([0.1, 0.2, 0.5, 0.6] * 2, 0, "Example 0 has 2 boxes and 1 labels"),
    ],
)
def test_invalid_boxes_raise(boxes, label, message, prepare, tmp_path):
    def features(kinds):
        objects = {"bbox": kinds.BBoxFeature(), "label": kinds.ClassLabel(names=["a", "b"])}
        return {"image": kinds.Image(shape=(None, None, 3)), "objects": kinds.Sequence(objects)}

    row = {"image": png(np.zeros((8, 8, 3), np.uint8)), "objects/label": np.array([label])}
    prepare(tmp_path, "some", features, {"train": [row | {"objects/bbox": np.array(boxes)}]})
    with pytest.raises(ValueError, match=rf"^The split 'train' of some/1\.0\.0 cannot be read: {message}"):
        load(TFDS("some", str(tmp_path)), ObjectDetection(), batch_size=1).train[0]


def test_damaged_records_raise(prepare, tmp_path):
    def features(kinds):
        return {"text": kinds.Text(), "image": kinds.Image(shape=(8, 8, 1)), "label": kinds.ClassLabel(names=["a"])}

    row = {"text": b"a", "image": png(np.zeros((8, 8, 1), np.uint8)), "label": 0}
    prepare(tmp_path, "some", features, {"train": [row]})
    (path,) = tmp_path.glob("some/1.0.0/*.array_record-*")
    path.write_bytes(path.read_bytes()[:1000])
    for task in (CausalLM(sequence_length=8), TextClassification(sequence_length=8), ImageClassification()):
        with pytest.raises(ValueError, match=r"The split 'train' of some/1\.0\.0 cannot be read: .*64KB"):
            load(TFDS("some", str(tmp_path)), task)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([b"\xff"] * 3, "some/1\\.0\\.0 cannot be read: Error parsing message"),
        ([b""] * 2, "array_record-00000-of-00001 is damaged, or .*: it has 2 examples instead of 3"),
        ([b""] * 4, "array_record-00000-of-00001 is damaged, or .*: it has 4 examples instead of 3"),
        (None, "array_record-00000-of-00001 does not exist"),
    ],
)
def test_other_records_raise(records, message, prepare, tmp_path):
    prepare(tmp_path, "some", lambda kinds: {"text": kinds.Text()}, {"train": [{"text": b"a"}] * 3})
    (path,) = tmp_path.glob("some/1.0.0/*.array_record-*")
    path.unlink()
    if records:
        with closing(ArrayRecordWriter(str(path), "group_size:1")) as writer:
            _ = [writer.write(record) for record in records]
    with pytest.raises(ValueError, match=message):
        load(TFDS("some", str(tmp_path)), CausalLM(sequence_length=8))


def test_data_set_without_splits_raises(prepare, tmp_path):
    prepare(tmp_path, "some", lambda kinds: {"text": kinds.Text()}, {})
    with pytest.raises(ValueError, match=r"dataset_info\.json has no splits"):
        TFDS("some", str(tmp_path)).documents()


@pytest.mark.parametrize("count", ['"300000000"', "3e8"])
def test_too_many_classes_raise(count, prepare, tmp_path):
    prepare(tmp_path, "some", lambda kinds: {"label": kinds.ClassLabel(names=["a"])}, {"train": [{"label": 0}]})
    path = tmp_path / "some/1.0.0/features.json"
    path.write_text(path.read_text().replace('"numClasses": "1"', f'"numClasses": {count}'))
    with pytest.raises(ValueError, match=r"features\.json has a feature of 300000000.* classes"):
        TFDS("some", str(tmp_path)).labeled_texts()


def test_newest_version(prepare, tmp_path):
    for version, count in (("2.0.0", 3), ("10.0.0", 5), ("9.9.9", 4)):
        examples = {"train": [{"text": b"word"}] * count}
        prepare(tmp_path, "prose", lambda kinds: {"text": kinds.Text()}, examples, version)
    assert find_builder("prose", str(tmp_path)).info.splits["train"].num_examples == 5
    assert find_builder("prose:2.0.0", str(tmp_path)).info.splits["train"].num_examples == 3


def test_unprepared_data_set_raises(shapes, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError) as caught:
        load(TFDS("imagenet2012", str(tmp_path)), ImageClassification())
    assert f"`tfds build imagenet2012 --data_dir={tmp_path} --file_format=array_record`" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"'shapes:2\.0\.0' is not prepared"):
        load(TFDS("shapes:2.0.0", str(shapes)), ImageClassification())
    (tmp_path / "glue").mkdir()
    (shapes / "shapes").rename(tmp_path / "glue" / "shapes")
    try:
        with pytest.raises(FileNotFoundError, match="its prepared configs are shapes"):
            load(TFDS("glue", str(tmp_path)), ImageClassification())
    finally:
        (tmp_path / "glue" / "shapes").rename(shapes / "shapes")
    monkeypatch.setenv("TFDS_DATA_DIR", str(shapes))
    assert load(TFDS("shapes"), ImageClassification()).facts.num_classes == 3


def test_other_formats(prepare, tmp_path):
    prepare(tmp_path, "prose", lambda kinds: {"text": kinds.Text()}, {"train": [{"text": b"a"}]})
    about = tmp_path / "prose" / "1.0.0" / "dataset_info.json"
    about.write_text(about.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(ValueError, match=r"is prepared in .* as tfrecord: prepare it into another data_dir"):
        find_builder("prose", str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_split": "tarin"}, "The split 'tarin' of shapes/1.0.0 cannot be read: Unknown split 'tarin'"),
        ({"train_split": "train[:1000]"}, "incompatible with 40 examples"),
        ({"label_key": "class"}, "shapes/1.0.0 has no feature 'class': it has image, label"),
        ({"label_key": "image"}, "feature 'image' of shapes/1.0.0 is not a class label"),
    ],
)
def test_invalid_options_raise(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        load(TFDS("shapes", str(shapes), **options), ImageClassification())


def test_needs_neither_jax_nor_tensorflow(shapes, tmp_path):
    # A fake package, so that attempts to import TensorFlow also fail if it is not installed.
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise AssertionError('TensorFlow was imported')")
    program = f"""
        import sys
        from lineage import data
        from lineage.data.sources.tfds import TFDS
        from lineage.data.sources.packages import Digits
        from lineage.data.transforms.augmentation import Shift, Transform
        sys.path.append({str(tmp_path)!r})

        class Plain:
            reads = "images"

            def check_loader(self, loader):
                pass

            def texts(self, content):
                return {{}}

            def examples(self, content, tokenizer, seed):
                transform = Transform(None, [Shift(1)], (0.5,), (0.5,))
                return data.Examples(content.splits, data.Facts(), transform, transform)

        for source in (TFDS("shapes", {str(shapes)!r}), Digits()):
            loaded = data.load(source, Plain(), data.Bytes(), data.Loader(batch_size=8))
            assert loaded.train[0]["image"].shape == (8, 8, 8, 1)
        print(sorted({{"jax", "tensorflow", "torch"}} & set(sys.modules)))
        """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_import_loads_no_heavy_packages():
    heavy = "{'jax', 'tensorflow', 'grain', 'tensorflow_datasets', 'pyarrow'}"
    program = f"import sys, lineage.data; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_sources_can_be_pickled_for_workers(shapes):
    source = TFDS("shapes", str(shapes)).images().splits["train"]
    received = cloudpickle.loads(cloudpickle.dumps(source))
    np.testing.assert_array_equal(received[3]["image"], source[3]["image"])


def test_labeled_pairs(prepare, tmp_path):
    """Check the conventions of GLUE: splits and examples without labels (-1) are omitted."""

    def features(kinds):
        return {"sentence1": kinds.Text(), "sentence2": kinds.Text(), "label": kinds.ClassLabel(names=["no", "yes"])}

    def rows(*labels):
        return [{"sentence1": f"a {i}".encode(), "sentence2": b"b", "label": y} for i, y in enumerate(labels)]

    prepare(tmp_path, "mrpc", features, {"train": rows(1, 0, -1), "validation": rows(1), "test": rows(-1, -1)})
    source = TFDS("mrpc", str(tmp_path), text_key="sentence1,sentence2")
    loaded = load(source, TextClassification(sequence_length=12), batch_size=2)
    assert loaded.facts.examples == {"train": 2, "validation": 1}
    assert loaded.facts.class_names == ("no", "yes")
    (batch,) = loaded.splits["validation"]
    assert batch["label"][0] == 1
    assert loaded.tokenizer.decode(batch["tokens"][0]) == "<s>a 0</s>b</s><pad><pad><pad><pad><pad>"
    (tmp_path / "mrpc" / "1.0.0" / "label.labels.txt").write_text("no\n")
    with pytest.raises(ValueError, match=r"'train' of mrpc/1\.0\.0 has the label 1: it must be from 0 to 0"):
        load(TFDS("mrpc", str(tmp_path), text_key="sentence1,sentence2"), TextClassification(sequence_length=12))


def test_regression_targets(prepare, tmp_path):
    def features(kinds):
        return {"sentence": kinds.Text(), "label": kinds.Scalar(np.float32)}

    prepare(tmp_path, "stsb", features, {"train": [{"sentence": b"a", "label": y} for y in (-1.0, 2.5)]})
    source = TFDS("stsb", str(tmp_path), text_key="sentence")
    loaded = load(source, TextRegression(sequence_length=8), Words(), batch_size=2)
    assert sorted(loaded.train[0]["label"].tolist()) == [-1, 2.5]


def test_questions(prepare, tmp_path):
    def features(kinds):
        answers = kinds.Sequence({"text": kinds.Text(), "answer_start": np.int32})
        return {"id": kinds.Text(), "question": kinds.Text(), "context": kinds.Text(), "answers": answers}

    rows = []
    for id, question, texts, starts in ((b"56be", b"Who?", [b"cat", b"a cat"], [2, 0]), (b"7", b"Why?", [], [])):
        answers = {"answers/text": np.array(texts, object), "answers/answer_start": np.array(starts, int)}
        rows.append({"id": id, "question": question, "context": b"a cat sat"} | answers)
    prepare(tmp_path, "squad", features, {"train": rows, "validation": rows})
    loaded = load(TFDS("squad", str(tmp_path)), QuestionAnswering(sequence_length=20), batch_size=2)
    source = loaded.splits["validation"].source
    assert [item.references for item in source.questions] == [["cat", "a cat"], []]
    assert source.per_sequence["start"].tolist() == [8, 0]
    assert [item.id for item in source.questions] == ["56be", "7"]
    impossible = {"train": [row | {"is_impossible": 1} for row in rows]}
    prepare(tmp_path, "squad2", lambda kinds: features(kinds) | {"is_impossible": np.bool_}, impossible)
    source = load(TFDS("squad2", str(tmp_path)), QuestionAnswering(sequence_length=20), batch_size=2).train.source
    assert [item.references for item in source.questions] == [[], []]
    prepare(tmp_path, "uneven", features, {"train": [rows[0] | {"answers/answer_start": np.array([2])}]})
    with pytest.raises(ValueError, match="Example 0 has 2 answers and 1 positions of answers"):
        load(TFDS("uneven", str(tmp_path)), QuestionAnswering(sequence_length=20))


def test_modules_that_a_data_set_names_are_not_imported(prepare, tmp_path, monkeypatch):
    prepare(tmp_path, "prose", lambda kinds: {"text": kinds.Text()}, {"train": [{"text": b"one"}]})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    (path,) = tmp_path.glob("prose/*/features.json")
    for name in ("pythonClassName", "type"):
        path.write_text(json.dumps({name: "stranger.Feature", "content": {}}))
        with pytest.raises(ValueError, match=r"features\.json has a class of the module 'stranger': import it first"):
            find_builder("prose", str(tmp_path))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["features.json", "dataset_info.json", "prose-train.array_record-00000-of-00001"])
def test_pipe_in_a_data_set_is_named(prepare, tmp_path, name):
    prepare(tmp_path, "prose", lambda kinds: {"text": kinds.Text()}, {"train": [{"text": b"one"}]})
    (path,) = tmp_path.glob(f"prose/*/{name}")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=rf"{name} is not a regular file"):
        find_builder("prose", str(tmp_path))


def test_a_file_that_changes_while_images_are_read_raises(prepare, tmp_path):
    """Check other labels in a file of the same size, whose checksums are right."""

    def features(kinds):
        return {"image": kinds.Image(shape=(8, 8, 1)), "label": kinds.ClassLabel(names=["no", "yes"])}

    for label in (0, 1):
        examples = [{"image": png(np.zeros((8, 8, 1), np.uint8)), "label": label}] * 4
        prepare(tmp_path / str(label), "images", features, {"train": examples})
    train = load(TFDS("images", f"{tmp_path}/0"), ImageClassification(), batch_size=2).train
    assert train[0]["label"].tolist() == [0, 0]
    file, other = (next((tmp_path / label).glob("images/1.0.0/*.array_record*")) for label in ("0", "1"))
    file.write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match=rf"^{file} has changed since the data were opened"):
        train[1]
