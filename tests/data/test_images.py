import os
import re
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from lineage.data.content import Arrays, Images, in_memory
from lineage.data.sources.base import Source
from lineage.data.sources.folder import Folder, ImageNet
from lineage.data.sources.packages import Digits
from lineage.data.transforms.pillow import decode, stack
from lineage.tasks.image_classification import ImageClassification
from tests.data.conftest import load


def test_digits():
    splits, names = Digits().images()
    assert names == list("0123456789")
    train, test = splits["train"], splits["test"]
    assert (len(train), len(test)) == (1438, 359)
    assert train.take(np.arange(3))["image"].shape == (3, 8, 8, 1)
    # Every example of the original is in exactly one split.
    pixels, labels = load_digits(return_X_y=True)
    got = np.concatenate([part.features["image"].reshape(-1, 64) for part in splits.values()])
    np.testing.assert_array_equal(np.unique(np.rint(got / 255 * 16), axis=0), np.unique(pixels, axis=0))
    assert len(np.unique(got, axis=0)) == 1797
    assert test.features["image"].sum(dtype=int) == 1802577  # The split is fixed.
    # The class distribution is that of the whole.
    whole = np.bincount(labels) / 5
    assert np.abs(np.bincount(test.features["label"]) - whole).max() <= 1
    assert got.min() == 0
    assert got.max() == 255


def write(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 3), ("test", 1)):
        for label, name in enumerate(("cat", "dog")):
            for i in range(count):
                write(tmp_path / split / name / f"{i}.png", np.full((4, 5, 3), 10 * label + i, np.uint8))
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    return tmp_path


def test_images_that_change_after_the_start_are_refused(folder):
    """Check that a file that replaces one of the data of a run is not read, even if it is an image, and older."""
    part = Folder(str(folder)).images().splits["train"]
    changed = part.files[4]
    write(changed, np.full((4, 5, 3), 99, np.uint8))
    os.utime(changed, (1, 1))
    stack(part.take(np.array([0, 1, 2, 3, 5]))["image"])
    for read in (lambda: stack(part.take(np.arange(6))["image"]), lambda: part.check(4)):
        with pytest.raises(ValueError, match=f"{changed} cannot be read as an image: it has changed since the data"):
            read()


def test_folders(folder):
    splits, names = Folder(str(folder)).images()
    assert names == ["cat", "dog"]
    assert {name: len(part) for name, part in splits.items()} == {"train": 6, "test": 2}
    batch = splits["train"].take(np.array([1, 5]))
    assert batch["label"].tolist() == [0, 1]
    assert [int(np.mean(image)) for image in batch["image"]] == [1, 12]
    assert splits["train"][5]["image"].shape == (4, 5, 3)
    memory = in_memory(splits["train"])
    np.testing.assert_array_equal(memory.take(np.array([1, 5]))["image"], np.stack(batch["image"]))
    assert memory[5]["label"] == 1


def test_images_of_different_sizes_in_memory(folder):
    write(folder / "train" / "dog" / "1.png", np.arange(6 * 5 * 3, dtype=np.uint8).reshape(6, 5, 3))
    options = {"augment": "crop | flip", "image_size": 4}
    slow, fast = (
        load(Folder(str(folder)), ImageClassification(in_memory=kept, **options), batch_size=4)
        for kept in (False, True)
    )
    for step in range(3):
        for name, values in slow.train[step].items():
            np.testing.assert_array_equal(fast.train[step][name], values)
    with pytest.raises(ValueError, match=r"set task\.image_size"):
        load(Folder(str(folder)), ImageClassification(in_memory=True), batch_size=6).train[0]


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
def test_folders_of_validation_images(folder, name):
    (folder / "test").rename(folder / name)
    assert list(Folder(str(folder)).images().splits) == ["train", "validation"]
    (folder / "valid").mkdir(exist_ok=True)
    (folder / "dev").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="it must have one folder of validation data"):
        Folder(str(folder)).images()


def test_images_without_a_split_or_class(folder):
    source, image = Folder(str(folder)), np.zeros((4, 5, 3), np.uint8)
    assert source.unread() == []
    files = [folder / name for name in ("Val/cat/a.png", "a.png", "test/b.png", "train/a.png", "unlabeled/a.png")]
    for file in (*files, folder / ".cache" / "a.png", folder / "train" / ".a.png"):
        write(file, image)
    assert source.unread() == sorted(map(str, files))


def test_gray_folders(tmp_path):
    """Check that the first of the images alone does not make the others gray."""
    for number in range(300):
        write(tmp_path / "train" / "a" / f"{number:03}.png", np.full((3, 3), number % 9, np.uint8))
    batch = Folder(str(tmp_path)).images().splits["train"].take(np.arange(2))
    assert [image.shape for image in batch["image"]] == [(3, 3, 1)] * 2
    assert np.max(batch["image"][1]) == 1
    write(tmp_path / "train" / "b" / "1.png", np.full((3, 3, 3), 7, np.uint8))
    assert Folder(str(tmp_path)).images().splits["train"][0]["image"].shape == (3, 3, 3)


def test_images_in_subfolders_of_a_class(folder):
    write(folder / "train" / "dog" / "more" / "a.png", np.full((4, 5, 3), 99, np.uint8))
    write(folder / "train" / "dog" / ".hidden" / "b.png", np.full((4, 5, 3), 98, np.uint8))
    part = Folder(str(folder)).images().splits["train"]
    assert [int(np.max(part[i]["image"])) for i in range(len(part))] == [0, 1, 2, 10, 11, 12, 99]
    assert part.labels.tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_other_names_of_formats_that_can_be_read(folder):
    """Check the formats of portable gray maps and of JPEG files with another suffix."""
    for name in ("a.pgm", "b.pbm", "c.JFIF"):
        kind = "JPEG" if name == "c.JFIF" else "PPM"
        Image.new("1" if name == "b.pbm" else "L", (5, 4), 255).save(folder / "train" / "dog" / name, kind)
    part = Folder(str(folder)).images().splits["train"]
    assert len(part) == 9
    assert [np.asarray(part[i]["image"]).min() for i in range(6, 9)] == [255] * 3


def test_folder_errors(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*/train: images are read from"):
        Folder(str(tmp_path / "cat")).images()
    (folder / "test" / "horse").mkdir()
    with pytest.raises(ValueError, match="has the class 'horse', which"):
        Folder(str(folder)).images()
    (folder / "test" / "horse").rmdir()
    (folder / "train" / "horse").mkdir()
    (folder / "train" / "horse" / "._0.png").touch()
    with pytest.raises(ValueError, match=r"There is no image in .*/train/horse\."):
        Folder(str(folder)).images()
    (folder / "train" / "horse" / "._0.png").rename(folder / "train" / "cat" / "._0.png")
    (folder / "train" / "horse").rmdir()
    assert len(Folder(str(folder)).images().splits["train"]) == 6
    (folder / "train" / "cat" / "0.png").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"0\.png cannot be read as an image"):
        decode(folder / "train" / "cat" / "0.png", 3)


def test_hidden_folders_are_ignored(folder):
    (folder / "train" / ".checkpoints").mkdir()
    (folder / "test" / ".checkpoints").mkdir()
    assert Folder(str(folder)).images().class_names == ["cat", "dog"]


def test_image_without_pixels_is_refused():
    with pytest.raises(ValueError, match="A Pillow image cannot be read as an image: it has no pixels"):
        decode(Image.new("L", (0, 0)), 3, "A Pillow image")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_exif_orientation_of_tiff_files(orientation, mode, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, len(mode)), np.uint8)
    exif = Image.Exif()
    exif[274] = orientation
    Image.fromarray(pixels.squeeze()).save(tmp_path / "a.tif", exif=exif)
    turned = np.rot90(pixels, {3: 2, 4: 2, 5: -1, 6: -1, 7: 1, 8: 1}.get(orientation, 0))
    expected = turned[:, ::-1] if orientation in (2, 4, 5, 7) else turned
    np.testing.assert_array_equal(decode(tmp_path / "a.tif", len(mode)), expected)


def test_16_bit_images_raise(tmp_path):
    Image.fromarray(np.full((4, 5), 1000, np.uint16)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="its pixels are I;16, not of 8 bits"):
        decode(tmp_path / "a.png", 1)


def test_different_image_sizes_raise():
    with pytest.raises(ValueError, match=r"Images differ in size, such as \(2, 2, 1\) and \(3, 2, 1\): .*image_size"):
        stack([np.zeros((2, 2, 1)), np.zeros((3, 2, 1))])


WORDS = {"n01440764": "tench, Tinca tinca", "n02012849": "crane", "n03126707": "crane"}


def imagenet(root, images, separator=" "):
    """Write three training images of each class, and return the path of the folder."""
    for label, name in enumerate(WORDS):
        for i in range(3):
            write(images / "train" / name / f"{name}_{i}.JPEG", np.full((4, 4, 3), 60 * label + 10 * i, np.uint8))
    lines = [f"{name}{separator}{words}" for name, words in {**WORDS, "n9": "other"}.items()]
    (root / "LOC_synset_mapping.txt").write_text("\n".join(lines))
    return str(root)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("inner", ["", "ILSVRC/Data/CLS-LOC"])
def test_imagenet(inner, flat, tmp_path):
    images = tmp_path / inner
    path, solution = imagenet(tmp_path, images), ["ImageId,PredictionString"]
    for number, name in enumerate(["n03126707", "n01440764"]):
        file = images / "val" / ("" if flat else name) / f"ILSVRC2012_val_{number:08}.JPEG"
        write(file, np.full((4, 4, 3), 100 + number, np.uint8))
        solution.append(f"{file.stem},{name} 1 2 3 4 {name} 5 6 7 8 ")
    (tmp_path / "LOC_val_solution.csv").write_text("\n".join(solution) + "\n")
    write(images / "test" / "ILSVRC2012_test_00000001.JPEG", np.zeros((4, 4, 3), np.uint8))
    splits, names = ImageNet(path).images()
    assert names == ["tench, Tinca tinca", "crane (n02012849)", "crane (n03126707)"]
    assert {name: len(part) for name, part in splits.items()} == {"train": 9, "validation": 2}
    found = {int(np.mean(image)): int(label) for image, label in zip(*splits["validation"].take(np.arange(2)).values())}
    assert found == {100: 2, 101: 0}
    splits, _ = ImageNet(path, validation_fraction=0.34).images()
    assert list(splits) == ["train", "validation", "test"]
    assert splits["validation"].labels.tolist() == [0, 1, 2]
    assert splits["train"].labels.tolist() == [0, 0, 1, 1, 2, 2]
    files = {str(file) for name in ("train", "validation") for file in splits[name].files}
    assert len(files) == 9
    assert splits["test"].labels.tolist() == ([2, 0] if flat else [0, 2])


def test_class_names_of_imagenet(tmp_path):
    path = imagenet(tmp_path, tmp_path, "\t")
    (tmp_path / "LOC_synset_mapping.txt").rename(tmp_path / "words.txt")
    assert ImageNet(path).images().class_names[0] == "tench, Tinca tinca"
    (tmp_path / "words.txt").write_text("n01440764 tench")
    with pytest.raises(ValueError, match=r"words\.txt has no words for the class 'n02012849'"):
        ImageNet(path).images()
    (tmp_path / "words.txt").unlink()
    splits, names = ImageNet(path).images()
    assert (list(splits), names) == (["train"], list(WORDS))


def test_imagenet_errors(tmp_path):
    path = imagenet(tmp_path, tmp_path)
    write(tmp_path / "val" / "a.JPEG", np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(FileNotFoundError, match=r"val has no folders of classes, and there is no file"):
        ImageNet(path).images()
    for rows, message in {
        "a,n7 1 2 3 4": r"LOC_val_solution\.csv, line 2 has the class 'n7', which `train` does not have",
        "b,n01440764 1 2 3 4": r"There is no file .*val/b\.JPEG, which .*LOC_val_solution\.csv names",
    }.items():
        (tmp_path / "LOC_val_solution.csv").write_text(f"ImageId,PredictionString\n{rows}\n")
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            ImageNet(path).images()
    with pytest.raises(FileNotFoundError, match=re.escape(f"There is no folder {tmp_path}/val/train")):
        ImageNet(f"{tmp_path}/val").images()
    with pytest.raises(ValueError, match=r"source.validation_fraction is 1: it must be 0 or more and below 1"):
        ImageNet(path, validation_fraction=1)


@dataclass(frozen=True)
class InMemory(Source):
    content: Images

    def images(self):
        return self.content


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"train": [0, -1, 1]}, "Example 1 of the split 'train' has no label"),
        ({"train": [-1, -1]}, "Example [01] of the split 'train' has no label"),
        ({"train": [0, 1], "test": [1, -1]}, "Example 1 of the split 'test' has no label"),
        ({"train": [0, 1], "test": [2, 0]}, "Example 0 of the split 'test' has the label 2: .* from 0 to 1"),
    ],
)
def test_a_label_that_is_not_a_class_raises(labels, message, in_memory):
    """Check splits of which some images have no label, an unlabeled training split, and too large labels."""
    pixels = np.zeros((3, 4, 4, 1), np.uint8)
    splits = {name: Arrays({"image": pixels[: len(part)], "label": np.array(part)}) for name, part in labels.items()}
    task = ImageClassification(in_memory=in_memory)

    def read():
        loaded = load(InMemory(Images(splits, ["a", "b"])), task, batch_size=2)
        return [loaded.train[step] for step in range(2)], [*loaded.splits.get("test", ())]

    with pytest.raises(ValueError, match=message):
        read()
