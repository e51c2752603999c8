"""Images in files of plain bytes: as TFDS has them, and files that are damaged."""

import gzip

import numpy as np
import pytest

import data
from data import raw_images
from tests.data.conftest import png

RANDOM = np.random.default_rng(0)
SIZES = {"train": 50, "test": 9}


def content(array):
    """An idx file of bytes."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def write_idx(folder, image, label):
    for split, prefix in (("train", "train"), ("test", "t10k")):
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content(image[split])))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(content(label[split]))


@pytest.fixture
def drawn():
    image = {split: RANDOM.integers(0, 256, (size, 7, 6)).astype(np.uint8) for split, size in SIZES.items()}
    return image, {split: RANDOM.permutation(np.arange(size) % 4) for split, size in SIZES.items()}


def as_tfds(split, examples):
    """The examples in the order in which TFDS's own writer puts them."""
    hashing = pytest.importorskip("tensorflow_datasets.core.hashing")
    hasher = hashing.Hasher(split)
    return [examples[number] for number in sorted(range(len(examples)), key=hasher.hash_key)]


def test_batches_are_those_of_tfds(prepare, drawn, tmp_path):
    image, label = drawn
    write_idx(tmp_path, image, label)
    examples = {
        split: as_tfds(
            split, [{"image": png(i[..., None]), "label": int(n)} for i, n in zip(image[split], label[split])]
        )
        for split in SIZES
    }
    prepare(
        tmp_path,
        "drawn",
        lambda kinds: {"image": kinds.Image(shape=(7, 6, 1)), "label": kinds.ClassLabel(num_classes=4)},
        examples,
    )
    options = {"batch_size": 16, "augment": "shift(1)", "seed": 3}
    ours = data.load(f"idx:{tmp_path}", **options)
    theirs = data.load("tfds:drawn", data_dir=str(tmp_path), in_memory=True, **options)
    assert ours.info == theirs.info
    for step in (0, 5):
        for name, value in theirs.train[step].items():
            np.testing.assert_array_equal(ours.train[step][name], value)
    for name, value in theirs.splits["test"][0].items():
        np.testing.assert_array_equal(ours.splits["test"][0][name], value)


def test_every_image_keeps_its_label(drawn, tmp_path):
    image, label = drawn
    write_idx(tmp_path, image, label)
    splits, names = raw_images.idx(str(tmp_path))
    assert names == ["0", "1", "2", "3"]
    for split, part in splits.items():
        pairs = {(i.tobytes(), int(n)) for i, n in zip(part.features["image"], part.features["label"])}
        assert pairs == {(i.tobytes(), int(n)) for i, n in zip(image[split], label[split])}
        assert part.features["image"].shape == (SIZES[split], 7, 6, 1)


@pytest.mark.parametrize("kind", [10, 100])
def test_cifar(kind, tmp_path):
    coarse = [] if kind == 10 else [np.uint8(19)]
    files = (
        [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"] if kind == 10 else ["train.bin", "test.bin"]
    )
    (tmp_path / ("batches.meta.txt" if kind == 10 else "fine_label_names.txt")).write_text("cat\ndog\nowl\n\n")
    written = {}
    for file in files:
        image = RANDOM.integers(0, 256, (4, 32, 32, 3)).astype(np.uint8)
        label = RANDOM.integers(0, 3, 4).astype(np.uint8)
        rows = [bytes([*coarse, n]) + i.transpose(2, 0, 1).tobytes() for i, n in zip(image, label)]  # red, green, blue
        (tmp_path / file).write_bytes(b"".join(rows))
        split = "test" if file.startswith("test") else "train"
        written.setdefault(split, set()).update((i.tobytes(), int(n)) for i, n in zip(image, label))
    loaded = data.load(f"cifar:{tmp_path}", batch_size=4)
    assert loaded.info["class_names"] == ["cat", "dog", "owl"]
    assert loaded.info["image_size"] == (32, 32)
    for split, source in (("train", loaded.train.source), ("test", loaded.splits["test"].source)):
        found = {(i.tobytes(), int(n)) for i, n in zip(source.features["image"], source.features["label"])}
        assert found == written[split]
    (tmp_path / files[0]).write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"has \d+ bytes in .*, not a multiple of 307"):
        raw_images.cifar(str(tmp_path))


def test_damaged_files(drawn, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"there is no file .*train-images-idx3-ubyte, and no train-images-.*gz"
    ):
        raw_images.idx(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="the binary version is read, not the one for Python"):
        raw_images.cifar(str(tmp_path))
    image, label = drawn
    write_idx(tmp_path, image, label)
    for bad in (content(label["train"])[:-1], b"\0\0", b"\0\0\x0d\1\0\0\0\0", b"\0\0\x08\3\0\0"):
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(bad)
        with pytest.raises(ValueError, match="train-labels-idx1-ubyte is not an idx file of bytes, or is cut"):
            raw_images.idx(str(tmp_path))
    write_idx(tmp_path, image, label | {"test": label["test"][1:]})
    with pytest.raises(ValueError, match="has 9 images and 8 labels of 't10k'"):
        raw_images.idx(str(tmp_path))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"a")[:-3])
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte\.gz cannot be unpacked"):
        raw_images.idx(str(tmp_path))


def test_subsets():
    whole, some, more = (
        data.load("digits", batch_size=10, max_examples=count, seed=1).train.source for count in (0, 100, 300)
    )
    images = [
        {image.tobytes() for image in source.take(np.arange(len(source)))["image"]} for source in (some, more, whole)
    ]
    assert [len(part) for part in images] == [100, 300, 1438]
    assert images[0] < images[1] < images[2]
    other = data.load("digits", batch_size=10, max_examples=100, seed=2).train.source
    assert {image.tobytes() for image in other.take(np.arange(100))["image"]} != images[0]
    labels = some.take(np.arange(100))["label"]
    assert len(set(labels.tolist())) == 10
    assert some[5]["label"] == labels[5]
    loaded = data.load("digits", batch_size=10, max_examples=100)
    assert (loaded.train.examples_per_epoch, loaded.info["examples"]["test"]) == (100, 359)
    for count in (-1, 1439):
        with pytest.raises(ValueError, match=rf"max_examples={count} must be 0 \(all\), or at most the 1438 examples"):
            data.load("digits", batch_size=10, max_examples=count)
