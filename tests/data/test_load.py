import dataclasses

import numpy as np
import pytest

from lineage import data
from lineage.data import tokenizers

PROSE = "The quick brown fox jumps over the lazy dog.\n" * 40


@pytest.fixture
def prose(tmp_path):
    (tmp_path / "prose.txt").write_text(PROSE)
    return f"text:{tmp_path / 'prose.txt'}"


def test_digits():
    loaded = data.load("digits", batch_size=128, evaluation_batch_size=100, augment="shift(1)", seed=3)
    batch = loaded.train[5]
    assert {name: (value.shape, value.dtype.name) for name, value in batch.items()} == {
        "image": ((128, 8, 8, 1), "float32"),
        "label": ((128,), "int32"),
        "mask": ((128,), "bool"),
    }
    assert loaded.info["examples"] == {"train": 1438, "test": 359}
    assert loaded.info["num_classes"] == 10
    assert loaded.tokenizer is None
    assert len(loaded.splits["test"]) == 4
    assert sum(batch["mask"].sum() for batch in loaded.splits["test"]) == 359
    images = np.concatenate([batch["image"] for batch in loaded.splits["test"]])
    assert (images.min(), images.max()) == (-1, 1)
    assert loaded.train.examples_per_epoch == 1438
    assert loaded.train.batch_size == 128


def test_held_out_images_do_not_depend_on_the_seed_and_training_does():
    first, second = (data.load("digits", batch_size=64, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(first.splits["test"][2]["image"], second.splits["test"][2]["image"])
    assert (first.train[0]["label"] != second.train[0]["label"]).any()


def test_augmentation_is_for_training_only():
    plain, shifted = (data.load("digits", batch_size=64, augment=augment) for augment in ("", "shift(2)"))
    np.testing.assert_array_equal(plain.splits["test"][0]["image"], shifted.splits["test"][0]["image"])
    np.testing.assert_array_equal(plain.train[0]["label"], shifted.train[0]["label"])
    assert (plain.train[0]["image"] != shifted.train[0]["image"]).any()


def test_processes_see_parts_of_the_same_batch():
    whole = data.load("digits", batch_size=64, augment="shift(1)").train[7]
    parts = [
        data.load("digits", batch_size=64, augment="shift(1)", process_index=i, process_count=4).train[7]
        for i in range(4)
    ]
    np.testing.assert_array_equal(np.concatenate([part["image"] for part in parts]), whole["image"])


def test_image_size():
    loaded = data.load("digits", batch_size=4, image_size=16, augment="crop(0.5) | randaugment(1, 5)")
    assert loaded.train[0]["image"].shape == loaded.splits["test"][0]["image"].shape == (4, 16, 16, 1)
    assert loaded.info["image_size"] == (16, 16)
    assert data.load("digits", batch_size=4, image_size=16, augment="flip").train[0]["image"].shape == (4, 16, 16, 1)


def test_text_file(prose):
    loaded = data.load(prose, batch_size=4, sequence_length=16, tokenizer="characters", validation_fraction=0.2)
    cut = int(len(PROSE) * 0.8)
    assert loaded.info["tokens"] == {"train": cut, "validation": len(PROSE) - cut}
    assert loaded.info["vocab_size"] == len(set(PROSE))
    assert loaded.info["characters_per_token"] == {"train": 1, "validation": 1}
    batch = loaded.train[0]
    assert batch["tokens"].shape == batch["targets"].shape == batch["mask"].shape == (4, 16)
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    held = loaded.splits["validation"]
    targets = np.concatenate([batch["targets"][batch["mask"]] for batch in held])
    assert loaded.tokenizer.decode(targets) == PROSE[cut + 1 :]


@pytest.mark.parametrize(("size", "stride"), [(1, 0), (7, 0), (64, 0), (7, 4)])
def test_evaluation_scores_each_target_once_at_any_batch_size_and_stride(prose, size, stride):
    options = {"sequence_length": 10, "stride": 3, "evaluation_stride": stride}
    loaded = data.load(prose, batch_size=1, evaluation_batch_size=size, **options)
    batches = list(loaded.splits["validation"])
    assert sum(int(batch["mask"].sum()) for batch in batches) == loaded.info["tokens"]["validation"] - 1
    text = PROSE[int(len(PROSE) * 0.9) :]
    assert loaded.tokenizer.decode(np.concatenate([batch["targets"][batch["mask"]] for batch in batches])) == text[1:]


def test_files_for_each_split(tmp_path):
    for name, content in {"train/a": "aab", "train/b": "ba", "held": "cab", "test": "abc"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    loaded = data.load(
        f"text:{tmp_path / 'train'}",
        validation_split=str(tmp_path / "held"),
        test_split=str(tmp_path / "test"),
        batch_size=1,
        sequence_length=4,
        tokenizer="characters",
    )
    assert loaded.info["tokens"] == {"train": 7, "validation": 3, "test": 3}
    assert loaded.info["vocab_size"] == 4
    assert list(loaded.splits) == ["validation", "test"]


def test_no_validation(prose):
    loaded = data.load(prose, batch_size=1, sequence_length=4, validation_fraction=0.0)
    assert loaded.splits == {}
    assert loaded.info["tokens"] == {"train": len(PROSE)}


def test_stdlib_is_held_out_by_module():
    loaded = data.load("stdlib", batch_size=2, sequence_length=64, max_bytes=2_000_000)
    tokens = loaded.info["tokens"]
    assert 0.02 < tokens["validation"] / (tokens["train"] + tokens["validation"]) < 0.4
    end = loaded.tokenizer.end_of_text
    assert loaded.train.source.tokens[-1] == loaded.splits["validation"].source.tokens[-1] == end


def test_the_tokenizer_of_the_workdir_is_kept(prose, tmp_path):
    run = tmp_path / "run"
    options = {"batch_size": 2, "sequence_length": 8, "tokenizer": "bpe", "vocab_size": 280, "workdir": run}
    data.load(prose, **options, process_index=1, process_count=2)
    assert not run.exists()
    first = data.load(prose, **options)
    assert (run / "tokenizer.json").is_file()
    (tmp_path / "prose.txt").write_text(PROSE[::-1])
    again = data.load(prose, **options)
    assert again.tokenizer.to_str() == first.tokenizer.to_str()
    assert data.load(prose, **options | {"workdir": None}).tokenizer.to_str() != first.tokenizer.to_str()


def test_a_tokenizer_from_a_file(prose, tmp_path):
    tokenizers.train("bpe", ["fox " * 100], 270).save(tmp_path / "own.json")
    loaded = data.load(prose, batch_size=2, sequence_length=8, tokenizer=str(tmp_path / "own.json"))
    assert loaded.info["vocab_size"] == loaded.tokenizer.vocab_size < 270
    assert loaded.info["characters_per_token"]["train"] > 1


def test_images_from_folders(tmp_path):
    from PIL import Image

    for split in ("train", "validation"):
        for label in ("a", "b"):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(3):
                size = (6 + i, 9)
                Image.new("RGB", size, (i, 0, 0)).save(tmp_path / split / label / f"{i}.png")
    loaded = data.load(f"folder:{tmp_path}", batch_size=4, image_size=8, mean=(0.4, 0.5, 0.6), std=[0.2, 0.3, 0.4])
    assert loaded.train[0]["image"].shape == (4, 8, 8, 3)
    assert loaded.info["class_names"] == ["a", "b"]
    assert loaded.info["mean"] == (0.4, 0.5, 0.6)
    assert list(loaded.splits) == ["validation"]
    unsized = data.load(f"folder:{tmp_path}", batch_size=6)
    with pytest.raises(ValueError, match="image_size must be set"):
        unsized.train[0]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("digit", {}, "source='digit' must be digits, folder:PATH, shapes, idx:PATH, cifar:PATH, stdlib, text:PATH"),
        ("text:", {}, "source='text:' must be"),
        ("digits:8", {}, "source='digits:8' must be"),
        ("digits", {"train_split": "train[:50%]"}, "source='digits' has its own splits"),
        (
            "digits",
            {"sequence_length": 8},
            "sequence_length=8 has no meaning for source='digits', which is read for task='images'",
        ),
        ("digits", {"tokenizer": "bpe"}, "tokenizer='bpe' has no meaning"),
        (
            "stdlib",
            {"augment": "flip"},
            "augment='flip' has no meaning for source='stdlib', which is read for task='next_token'",
        ),
        ("stdlib", {"max_bytes": 10_000, "sequence_length": 0}, "sequence_length=0"),
        (
            "stdlib",
            {"max_bytes": 100_000, "vocab_size": 300},
            "vocab_size=300 is for words and sub-words: tokenizer='bytes'",
        ),
        ("stdlib", {"max_bytes": 1}, "within max_bytes=1"),
        ("text:x", {"train_split": "y"}, "train_split='y': the text to train on is the PATH"),
        ("digits", {"task": "pairs"}, "task='pairs' is for cldr, pairs, labels, tfds, not for source='digits'"),
        ("digits", {"task": "pears"}, "task='pears' must be one of images, masked_images, detection, next_token"),
        ("cldr", {"sequence_length": 20, "buckets": (8, 4)}, r"buckets=\(8, 4\) must be rising"),
        ("digits", {"mean": (0.1, 0.2)}, r"mean=\(0.1, 0.2\) and std=\(0.5,\) need 1 or 1 numbers each"),
        ("digits", {"std": (0.0,)}, "std above 0"),
        ("digits", {"image_size": 8, "evaluation_crop": 0.0}, "evaluation_crop=0.0"),
        (
            "digits",
            {"order": "stream"},
            "order='stream' has no meaning for source='digits', which is read for task='images'",
        ),
        (
            "stdlib",
            {"max_bytes": 100_000, "sequence_length": 8, "evaluation_stride": 4, "order": "stream"},
            "order='stream' needs windows one after the other: evaluation_stride=4 must be 0",
        ),
        (
            "stdlib",
            {"max_bytes": 100_000, "sequence_length": 8, "stride": 4, "order": "stream"},
            "order='stream' needs windows one after the other: stride=4 must be 0",
        ),
        ("digits", {"batch_size": 9, "process_count": 2}, "batch size 9 does not divide over 2 processes"),
    ],
)
def test_errors(source, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        data.load(source, **{"batch_size": 4, **options})
    assert "\n" not in str(caught.value)


def test_empty_and_missing_texts(tmp_path):
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="there is no text in"):
        data.load(f"text:{tmp_path / 'empty'}", batch_size=2, sequence_length=8)
    with pytest.raises(FileNotFoundError, match="there is no text file at"):
        data.load(f"text:{tmp_path / 'missing'}", batch_size=2, sequence_length=8)


def test_data_is_frozen():
    loaded = data.load("digits", batch_size=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.train = None
