"""Images in binary files: the batches match TFDS, and damaged files raise."""

import gzip
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest

from lineage.data.sources.packages import Digits
from lineage.data.sources.raw_images import CIFAR, IDX
from lineage.data.sources.tfds import TFDS
from lineage.tasks.image_classification import ImageClassification
from tests.data.conftest import load, png

RANDOM = np.random.default_rng(0)
SIZES = {"train": 50, "test": 9}


def content(array):
    """Return the content of an idx file of bytes."""
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
    """Return the examples in the order of the TFDS writer."""
    hashing = pytest.importorskip("tensorflow_datasets.core.hashing")
    hasher = hashing.Hasher(split)
    return [examples[number] for number in sorted(range(len(examples)), key=hasher.hash_key)]


def test_batches_match_tfds(prepare, drawn, tmp_path):
    image, label = drawn
    write_idx(tmp_path, image, label)

    def examples(split):
        return [{"image": png(i[..., None]), "label": int(n)} for i, n in zip(image[split], label[split])]

    def features(kinds):
        return {"image": kinds.Image(shape=(7, 6, 1)), "label": kinds.ClassLabel(num_classes=4)}

    prepare(tmp_path, "drawn", features, {split: as_tfds(split, examples(split)) for split in SIZES})
    options = {"batch_size": 16, "seed": 3}
    ours = load(IDX(str(tmp_path)), ImageClassification(augment="shift(1)"), **options)
    theirs = load(TFDS("drawn", str(tmp_path)), ImageClassification(augment="shift(1)", in_memory=True), **options)
    assert ours.facts == theirs.facts
    for step in (0, 5):
        for name, value in theirs.train[step].items():
            np.testing.assert_array_equal(ours.train[step][name], value)
    for name, value in theirs.splits["test"][0].items():
        np.testing.assert_array_equal(ours.splits["test"][0][name], value)


def test_every_image_keeps_its_label(drawn, tmp_path):
    image, label = drawn
    write_idx(tmp_path, image, label)
    splits, names = IDX(str(tmp_path)).images()
    assert names == ["0", "1", "2", "3"]
    for split, part in splits.items():
        pairs = {(i.tobytes(), int(n)) for i, n in zip(part.features["image"], part.features["label"])}
        assert pairs == {(i.tobytes(), int(n)) for i, n in zip(image[split], label[split])}
        assert part.features["image"].shape == (SIZES[split], 7, 6, 1)


def pickled(image, label, key):
    """Return a pickled CIFAR batch as written by Python 2: rows of pixels, and a list of labels."""
    rows = image.transpose(0, 3, 1, 2).tobytes()
    shape = b"(J" + struct.pack("<i", len(image)) + b"M" + struct.pack("<H", 3072) + b"t"
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01" + shape + dtype
    array += b"I00\nT" + struct.pack("<i", len(rows)) + rows + b"tb"
    labels = b"](" + b"".join(b"K" + bytes([number]) for number in label) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U" + bytes([len(key)]) + key + labels + b"u."


@pytest.mark.parametrize("python", [False, True], ids=["binary", "python"])
@pytest.mark.parametrize("kind", [10, 100])
def test_cifar(kind, python, tmp_path):
    key = b"labels" if kind == 10 else b"fine_labels"
    files = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if kind == 10 else ["train", "test"]
    names = {10: ("batches.meta.txt", "batches.meta"), 100: ("fine_label_names.txt", "meta")}[kind][python]
    named = {f"{'fine_' if kind == 100 else ''}label_names".encode(): [b"cat", b"dog", b"owl"]}
    (tmp_path / names).write_bytes(pickle.dumps(named) if python else b"cat\ndog\nowl\n\n")
    written = {}
    for file in files:
        image = RANDOM.integers(0, 256, (4, 32, 32, 3)).astype(np.uint8)
        label = RANDOM.integers(0, 3, 4).astype(np.uint8)
        coarse = [np.uint8(19)] * (kind == 100)
        rows = [bytes([*coarse, n]) + i.transpose(2, 0, 1).tobytes() for i, n in zip(image, label)]  # red, green, blue
        content = pickled(image, label, key) if python else b"".join(rows)
        (tmp_path / (file if python else f"{file}.bin")).write_bytes(content)
        split = "test" if file.startswith("test") else "train"
        written.setdefault(split, set()).update((i.tobytes(), int(n)) for i, n in zip(image, label))
    loaded = load(CIFAR(str(tmp_path)), ImageClassification(), batch_size=4)
    assert loaded.facts.class_names == ("cat", "dog", "owl")
    assert loaded.facts.image_size == (32, 32)
    for split, source in (("train", loaded.train.source), ("test", loaded.splits["test"].source)):
        examples = source.take(np.arange(len(source)))
        actual = {(i.tobytes(), int(n)) for i, n in zip(examples["image"], examples["label"])}
        assert actual == written[split]
    first = tmp_path / (files[0] if python else f"{files[0]}.bin")
    first.write_bytes(b"1234")
    message = "is not one of CIFAR's files for Python" if python else "has 4 bytes, not a multiple of 307"
    with pytest.raises(ValueError, match=f"{files[0]}.* {message}"):
        CIFAR(str(tmp_path)).images()
    first.write_bytes(b"")
    with pytest.raises(ValueError, match=f"{files[0]}.* (is not one of CIFAR's files|is empty: it must have images)"):
        CIFAR(str(tmp_path)).images()
    if python:
        for bad, message in (
            (pickle.dumps(print), "is not one of CIFAR's files for Python"),
            (pickle.dumps({b"data": 1}), "has no images of 3x32x32 bytes, each with one of"),
        ):
            first.write_bytes(bad)
            with pytest.raises(ValueError, match=message):
                CIFAR(str(tmp_path)).images()


def _array(dtype=b"U\x02u1", shape=b"K\x01M\x00\x0c", data=b"U\x02ab", after=b""):
    """Return a pickled batch of one image with the parts of its array that may be wrong."""
    kind = b"cnumpy\ndtype\n(" + dtype + b"K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01(" + shape + b"t" + kind
    return b"\x80\x02}(U\x04data" + made + b"I00\n" + data + b"tbU\x06labels](K\x01e" + after + b"u."


_PIXELS = b"T\x00\x0c\x00\x00" + bytes(3072)
_NESTED = b"(K\x01K\x02t" + b"\x85" * 3 + b"".join(b"q%ch%c\x86" % (n, n) for n in range(200))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"cos\nsystem\n(U\x0dtouch ownedtR.", "is not one of CIFAR's files for Python"),
        (b"cnumpy\nndarray\n(K\x01K\x02tR(K\x01(J\xff\xff\xff\x7ftb.", "is not one of CIFAR's files for Python"),
        (_array(), "has no images of 3x32x32 bytes"),
        *((_array(dtype=kind, data=_PIXELS), "has no images of 3x32x32 bytes") for kind in (b"U\x01O", b"U\x02u8")),
        (_array(shape=b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f", data=_PIXELS), "has no images of 3x32x32 bytes"),
        (_array(shape=b"K\x01J\x00\xf4\xff\xff", data=_PIXELS), "has no images of 3x32x32 bytes"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "has no images of 3x32x32 bytes"),  # an index of 2**31 - 1
        (b"\x80\x02}" + _NESTED + b"K\x01s.", "a key is neither text nor bytes"),  # takes 2**200 steps to hash
        (b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.", "is not one of CIFAR's files for Python"),  # 2**63 bytes
        (b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".", "is not one of CIFAR's files for Python"),
    ],
)
def test_hostile_pickles_are_refused(tmp_path, bad, message):
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        (tmp_path / name).write_bytes(bad)
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": ["cat", "dog"]}))
    read = f"""
import resource
from lineage.data.sources.raw_images import CIFAR
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    CIFAR({str(tmp_path)!r}).images()
except ValueError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "data_batch_1" in result.stdout
    assert message in result.stdout
    assert not (tmp_path / "owned").exists()


def test_labels_without_a_class_name_are_refused(tmp_path):
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        (tmp_path / name).write_bytes(_array(data=_PIXELS))
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": ["cat", "dog"]}))
    assert CIFAR(str(tmp_path)).images().splits["train"].features["label"].tolist() == [1] * 5
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": ["cat"]}))
    with pytest.raises(ValueError, match=r"has the label 1, but batches\.meta has 1 class names"):
        CIFAR(str(tmp_path)).images()


def test_damaged_files_raise(drawn, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no file .*train-images-idx3-ubyte, and no"):
        IDX(str(tmp_path)).images()
    with pytest.raises(FileNotFoundError, match=r"has none of batches\.meta\.txt, .* not a folder of CIFAR-10"):
        CIFAR(str(tmp_path)).images()
    image, label = drawn
    write_idx(tmp_path, image, label)
    for bad in (content(label["train"])[:-1], b"\0\0", b"\0\0\x0d\1\0\0\0\0", b"\0\0\x08\3\0\0"):
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(bad)
        with pytest.raises(ValueError, match="train-labels-idx1-ubyte is not an idx file of bytes, or is truncated"):
            IDX(str(tmp_path)).images()
    write_idx(tmp_path, image, label | {"test": label["test"][1:]})
    with pytest.raises(ValueError, match="has 9 images and 8 labels of 't10k'"):
        IDX(str(tmp_path)).images()
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"a")[:-3])
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte\.gz is not a complete \.gz file"):
        IDX(str(tmp_path)).images()
    with gzip.open(tmp_path / "t10k-images-idx3-ubyte.gz", "wb") as file:
        file.write(bytes(120_000_000))
    with pytest.raises(
        ValueError, match=r"t10k-images-idx3-ubyte\.gz needs more than 1\d\d,\d+,\d+ bytes: at most 100 MB"
    ):
        IDX(str(tmp_path)).images()
    write_idx(tmp_path, label, label)
    with pytest.raises(ValueError, match=r"has images \(\d+,\) and labels .* of 'train': images must have 3 axes and"):
        IDX(str(tmp_path)).images()


def test_subsets():
    def drawn(count, seed):
        return load(Digits(), ImageClassification(max_examples=count), seed=seed)

    whole, some, more = (drawn(count, 1).train.source for count in (0, 100, 300))
    images = [
        {image.tobytes() for image in source.take(np.arange(len(source)))["image"]} for source in (some, more, whole)
    ]
    assert [len(part) for part in images] == [100, 300, 1438]
    assert images[0] < images[1] < images[2]
    other = drawn(100, 2).train.source
    assert {image.tobytes() for image in other.take(np.arange(100))["image"]} != images[0]
    labels = some.take(np.arange(100))["label"]
    assert len(set(labels.tolist())) == 10
    assert some[5]["label"] == labels[5]
    loaded = drawn(100, 0)
    assert (loaded.train.examples_per_epoch, loaded.facts.examples["test"]) == (100, 359)
    with pytest.raises(ValueError, match=r"task.max_examples is 1439: it must be 0 \(all\) or at most 1438, the"):
        drawn(1439, 0)
    with pytest.raises(ValueError, match=r"task.max_examples is -1: it must be 0 or more"):
        drawn(-1, 0)
