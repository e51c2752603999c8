import subprocess
import sys
import textwrap

import cloudpickle
import numpy as np
import pytest

from lineage import data
from lineage.data.sources import tfds


def test_images(shapes):
    loaded = data.load("tfds:shapes", data_dir=str(shapes), batch_size=8)
    assert list(loaded.splits) == ["test"]
    assert loaded.info["class_names"] == ["circle", "line", "box"]
    assert loaded.info["image_size"] == (8, 8)
    assert loaded.info["examples"] == {"train": 40, "test": 7}
    (batch,) = loaded.splits["test"]
    assert batch["image"].shape == (8, 8, 8, 1)
    assert batch["mask"].tolist() == [True] * 7 + [False]
    values = np.rint((batch["image"] * 0.5 + 0.5) * 255)
    np.testing.assert_array_equal(values[:7], np.arange(7)[:, None, None, None] * np.ones((1, 8, 8, 1)))
    assert batch["label"][:7].tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_split_syntax(shapes):
    loaded = data.load(
        "tfds:shapes:1.0.0",
        data_dir=str(shapes),
        batch_size=3,
        train_split="train[:75%]",
        validation_split="train[75%:]",
        test_split="test",
    )
    assert loaded.info["examples"] == {"train": 30, "validation": 10, "test": 7}
    first = next(iter(loaded.splits["validation"]))
    assert np.rint((first["image"][:, 0, 0, 0] * 0.5 + 0.5) * 255).tolist() == [30, 31, 32]


def test_in_memory_is_the_same(shapes):
    options = {"data_dir": str(shapes), "batch_size": 8, "augment": "shift(2)"}
    slow, fast = data.load("tfds:shapes", **options), data.load("tfds:shapes", in_memory=True, **options)
    np.testing.assert_array_equal(slow.train[9]["image"], fast.train[9]["image"])
    assert isinstance(fast.train.source, data.sources.images.Arrays)


@pytest.mark.slow
def test_workers(shapes):
    options = {"data_dir": str(shapes), "batch_size": 8, "augment": "flip | randaugment(2, 5)"}
    plain, ahead = data.load("tfds:shapes", **options), data.load("tfds:shapes", workers=2, **options)
    for step, batch in zip(range(3, 6), ahead.train.iterate(3)):
        np.testing.assert_array_equal(batch["image"], plain.train[step]["image"])


def test_texts(prepare, tmp_path):
    texts = {"train": [{"text": f"text {i} ß".encode()} for i in range(10)], "validation": [{"text": b"one"}]}
    prepare(tmp_path, "prose", lambda kinds: {"text": kinds.Text()}, texts)
    options = {"data_dir": str(tmp_path), "batch_size": 2, "sequence_length": 8}
    loaded = data.load("tfds:prose", **options)
    assert loaded.info["tokens"] == {"train": 10 * (9 + 1), "validation": 3}
    stream = np.concatenate([loaded.train.source[i]["tokens"] for i in range(3)])
    assert loaded.tokenizer.decode(stream).startswith("text 0 ß<|endoftext|>text 1 ß<|endoftext|>")
    assert data.load("tfds:prose", max_bytes=30, **options).info["tokens"]["train"] == 3 * 10
    kept = data.load("tfds:prose", cache_dir=str(tmp_path / "cache"), **options)
    np.testing.assert_array_equal(kept.train[5]["tokens"], loaded.train[5]["tokens"])
    with pytest.raises(ValueError, match="has no feature 'image'"):
        data.load("tfds:prose", data_dir=str(tmp_path), batch_size=2)


def test_pairs_of_two_features(prepare, tmp_path):
    rows = [{"de": f"Haus {i}".encode(), "en": f"house {i}".encode()} for i in range(6)]
    features = lambda kinds: kinds.Translation(languages=["de", "en"])  # noqa: E731
    prepare(tmp_path, "wmt", lambda kinds: dict(features(kinds)), {"train": rows, "test": rows[:2]})
    options = {"task": "pairs", "data_dir": str(tmp_path), "batch_size": 2, "sequence_length": 12}
    loaded = data.load("tfds:wmt", text_key="en,de", **options)
    assert loaded.info["examples"] == {"train": 6, "test": 2}
    batch, coder = loaded.splits["test"][0], loaded.tokenizer
    assert coder.decode(batch["inputs"][1][batch["inputs_mask"][1]]) == "house 1<|endoftext|>"
    assert coder.decode(batch["targets"][1][batch["mask"][1]]) == "Haus 1<|endoftext|>"
    assert loaded.splits["test"].source.references == ["Haus 0", "Haus 1"]
    with pytest.raises(ValueError, match="text_key='text' must be two features for pairs"):
        data.load("tfds:wmt", **options)


def test_texts_that_are_not_utf8(prepare, tmp_path):
    prepare(tmp_path, "prose", lambda kinds: {"text": kinds.Text()}, {"train": [{"text": b"a"}, {"text": b"ab\xff"}]})
    with pytest.raises(ValueError, match=r"feature 'text' of example 1 is not UTF-8 at byte 2"):
        data.load("tfds:prose", data_dir=str(tmp_path), batch_size=2, sequence_length=8)


def test_newest_version(prepare, tmp_path):
    for version, count in (("2.0.0", 3), ("10.0.0", 5), ("9.9.9", 4)):
        examples = {"train": [{"text": b"word"}] * count}
        prepare(tmp_path, "prose", lambda kinds: {"text": kinds.Text()}, examples, version)
    assert tfds.builder("prose", str(tmp_path)).info.splits["train"].num_examples == 5
    assert tfds.builder("prose:2.0.0", str(tmp_path)).info.splits["train"].num_examples == 3


def test_not_prepared(shapes, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError) as caught:
        data.load("tfds:imagenet2012", data_dir=str(tmp_path), batch_size=8)
    assert f"`tfds build imagenet2012 --data_dir={tmp_path} --file_format=array_record`" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"'shapes:2\.0\.0' is not prepared"):
        data.load("tfds:shapes:2.0.0", data_dir=str(shapes), batch_size=8)
    (tmp_path / "glue").mkdir()
    (shapes / "shapes").rename(tmp_path / "glue" / "shapes")
    try:
        with pytest.raises(FileNotFoundError, match="prepared are its configs shapes"):
            data.load("tfds:glue", data_dir=str(tmp_path), batch_size=8)
    finally:
        (tmp_path / "glue" / "shapes").rename(shapes / "shapes")
    monkeypatch.setenv("TFDS_DATA_DIR", str(shapes))
    assert data.load("tfds:shapes", batch_size=8).info["num_classes"] == 3


def test_other_formats(prepare, tmp_path):
    prepare(tmp_path, "prose", lambda kinds: {"text": kinds.Text()}, {"train": [{"text": b"a"}]})
    about = tmp_path / "prose" / "1.0.0" / "dataset_info.json"
    about.write_text(about.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(ValueError, match=r"is prepared in .* as tfrecord: prepare it into another data_dir"):
        tfds.builder("prose", str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_split": "tarin"}, "split='tarin' of shapes/1.0.0: Unknown split 'tarin'"),
        ({"train_split": "train[:1000]"}, "incompatible with 40 examples"),
        ({"label_key": "class"}, "shapes/1.0.0 has no feature 'class': it has image, label"),
        ({"label_key": "image"}, "feature 'image' of shapes/1.0.0 is not a class label"),
    ],
)
def test_errors(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        data.load("tfds:shapes", data_dir=str(shapes), batch_size=8, **options)


def test_needs_neither_jax_nor_tensorflow(shapes, tmp_path):
    # As if it were installed, so that an import of it that is only tried shows too.
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise AssertionError('TensorFlow was imported')")
    program = f"""
        import sys
        from lineage import data
        sys.path.append({str(tmp_path)!r})
        loaded = data.load("tfds:shapes", data_dir={str(shapes)!r}, batch_size=8)
        assert loaded.train[0]["image"].shape == (8, 8, 8, 1)
        data.load("digits", batch_size=8).train[0]
        print(sorted({{"jax", "tensorflow", "torch"}} & set(sys.modules)))
        """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_importing_is_light():
    heavy = "{'jax', 'tensorflow', 'grain', 'tensorflow_datasets'}"
    program = f"import sys, lineage.data; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_sources_can_be_sent_to_workers(shapes):
    source = data.load("tfds:shapes", data_dir=str(shapes), batch_size=8).train.source
    received = cloudpickle.loads(cloudpickle.dumps(source))
    np.testing.assert_array_equal(received[3]["image"], source[3]["image"])


def test_labelled_pairs(prepare, tmp_path):
    """As GLUE has them: a test split without labels is none, and so is an example without one."""

    def features(kinds):
        return {"sentence1": kinds.Text(), "sentence2": kinds.Text(), "label": kinds.ClassLabel(names=["no", "yes"])}

    def rows(*labels):
        return [{"sentence1": f"a {i}".encode(), "sentence2": b"b", "label": y} for i, y in enumerate(labels)]

    prepare(tmp_path, "mrpc", features, {"train": rows(1, 0, -1), "validation": rows(1), "test": rows(-1, -1)})
    loaded = data.load(
        "tfds:mrpc",
        data_dir=str(tmp_path),
        batch_size=2,
        task="classification",
        text_key="sentence1,sentence2",
        sequence_length=12,
    )
    assert loaded.info["examples"] == {"train": 2, "validation": 1}
    assert loaded.info["class_names"] == ["no", "yes"]
    (batch,) = loaded.splits["validation"]
    assert batch["label"][0] == 1
    assert loaded.tokenizer.decode(batch["tokens"][0]) == "<s>a 0</s>b</s><pad><pad><pad><pad><pad>"


def test_numbers(prepare, tmp_path):
    def features(kinds):
        return {"sentence": kinds.Text(), "label": kinds.Scalar(np.float32)}

    prepare(tmp_path, "stsb", features, {"train": [{"sentence": b"a", "label": y} for y in (-1.0, 2.5)]})
    loaded = data.load(
        "tfds:stsb",
        data_dir=str(tmp_path),
        batch_size=2,
        task="regression",
        text_key="sentence",
        sequence_length=8,
        tokenizer="words",
    )
    assert sorted(loaded.train[0]["label"].tolist()) == [-1, 2.5]


def test_translations(prepare, tmp_path):
    rows = [{"de": "zwei Bäume".encode(), "en": b"two trees"}]
    prepare(tmp_path, "wmt", lambda kinds: kinds.Translation(["de", "en"]), {"train": rows, "validation": rows})
    options = {"data_dir": str(tmp_path), "batch_size": 1, "task": "pairs", "sequence_length": 16}
    loaded = data.load("tfds:wmt", text_key="de,en", **options)
    batch = loaded.train[0]
    assert loaded.tokenizer.decode(batch["inputs"][0][batch["inputs_mask"][0]]) == "zwei Bäume<|endoftext|>"
    assert loaded.splits["validation"].source.references == ["two trees"]
    with pytest.raises(ValueError, match="text_key='de' must be two features for pairs"):
        data.load("tfds:wmt", text_key="de", **options)
    with pytest.raises(ValueError, match="has no feature 'fr': it has de, en"):
        data.load("tfds:wmt", text_key="de,fr", **options)


def test_questions(prepare, tmp_path):
    def features(kinds):
        answers = kinds.Sequence({"text": kinds.Text(), "answer_start": np.int32})
        return {"question": kinds.Text(), "context": kinds.Text(), "answers": answers}

    rows = [
        {
            "question": b"Who?",
            "context": b"a cat sat",
            "answers/text": np.array([b"cat", b"a cat"], object),
            "answers/answer_start": [2, 0],
        },
        {
            "question": b"Why?",
            "context": b"a cat sat",
            "answers/text": np.array([], object),
            "answers/answer_start": np.array([], int),
        },
    ]
    prepare(tmp_path, "squad", features, {"train": rows, "validation": rows})
    loaded = data.load("tfds:squad", data_dir=str(tmp_path), batch_size=2, task="spans", sequence_length=20)
    source = loaded.splits["validation"].source
    assert [item.references for item in source.questions] == [["cat", "a cat"], []]
    assert source.per_row["start"].tolist() == [8, 0]
