"""Files that are in several splits, or several times in one, and options of a source without effect on its data."""

import os

import numpy as np
import pytest
from PIL import Image

from lineage.data import SOURCES, Loader, load
from lineage.data.notes import notes
from lineage.data.tokenizers import Bytes
from lineage.tasks import TASKS

SHARED = "in several splits"


def write(path, rows=4):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("text,label\n" + "".join(f"{path.parent.name} {path.stem} {n},{n % 2}\n" for n in range(rows)))


def draw(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(path)


def noted(source, task="text_classification", **options):
    data = load(source, TASKS[task](**options), Bytes(), Loader(batch_size=2))
    return list(notes(source, data, None))


def texts(source):
    return {split: [text for (text,) in part.texts] for split, part in source.labeled_texts().items()}


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_links_to_files_in_the_same_folder_are_not_read_twice(link, tmp_path):
    write(tmp_path / "train.csv", 10)
    link(tmp_path / "train.csv", tmp_path / "train_2.csv")
    for path in (tmp_path, tmp_path / "*.csv"):
        splits = texts(SOURCES["csv"](path=str(path), validation_fraction=0.2))
        assert {split: len(part) for split, part in splits.items()} == {"train": 8, "validation": 2}
        assert not {*splits["train"]} & {*splits["validation"]}


def test_links_to_text_files_are_not_read_twice(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "c.txt").symlink_to("a.txt")
    (tmp_path / "more").mkdir()
    (tmp_path / "again").symlink_to("more")
    (tmp_path / "more" / "d.txt").write_text("d")
    read = SOURCES["text"](path=str(tmp_path), validation_fraction=0).documents()["train"]
    assert sorted(read) == ["a", "b", "d"]


@pytest.mark.parametrize(
    ("links", "sizes"),
    [
        ({"test": "validation"}, {"train": 4, "validation": 3, "test": 3}),
        ({"dev": "train"}, {"train": 4, "validation": 4}),
        ({"train2": "train", "train/loop": "../train", "train/up": ".."}, {"train": 4}),
    ],
)
def test_links_to_folders_of_other_splits(links, sizes, tmp_path):
    """Check that each split is read: before, a folder was read for one split only, the first by name."""
    write(tmp_path / "train" / "a.csv", 4)
    write(tmp_path / "more.csv", 5)
    if "test" in links:
        write(tmp_path / "validation" / "b.csv", 3)
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    source = SOURCES["csv"](path=str(tmp_path))
    assert {split: len(part) for split, part in texts(source).items()} == sizes
    assert any(SHARED in note for note in noted(source, sequence_length=96)) == (len(sizes) > 1)


def test_copies_in_several_splits(tmp_path):
    write(tmp_path / "train.csv")
    (tmp_path / "dev.csv").write_bytes((tmp_path / "train.csv").read_bytes())
    source = SOURCES["csv"](path=str(tmp_path))
    assert source.shared() == [str(tmp_path / "dev.csv")]
    content = (tmp_path / "train.csv").read_bytes()
    (tmp_path / "dev.csv").write_bytes(content.replace(b"train", b"other"))  # of the same size
    assert source.shared() == []


@pytest.mark.parametrize("name", ["folder", "imagenet"])
@pytest.mark.parametrize("options", [{}, {"in_memory": True}, {"max_examples": 3}])
def test_images_in_several_splits(name, options, tmp_path):
    for number in range(4):
        draw(tmp_path / "train" / "ab"[number % 2] / f"{number}.png", number)
    draw(tmp_path / "val" / "a" / "4.png", 4)
    source = SOURCES[name](path=str(tmp_path))
    options |= {"image_size": 8}
    assert noted(source, "image_classification", **options) == []
    (tmp_path / "val" / "a" / "5.png").symlink_to(tmp_path / "train" / "a" / "0.png")
    (note,) = noted(source, "image_classification", **options)
    assert SHARED in note
    assert note.endswith("(1 such files): their metrics do not show generalization.")


def test_mixtures_note_what_their_parts_do(tmp_path):
    for name in ("a/train", "a/dev", "a/more", "b"):
        write(tmp_path / f"{name}.csv")
    table = {"source": f"csv:{tmp_path}/a", "name": "one", "validation_fraction": 0.5}
    other = {"source": f"csv:{tmp_path}/b.csv", "name": "two"}
    reason = f"because {tmp_path}/a has files of the split validation."
    assert noted(SOURCES["mixture"](parts=(table, other)), sequence_length=96) == [
        f"{tmp_path}/a/more.csv is not read because its path has no split or, for an image, no class (1 such files).",
        f"part 'one': source.validation_fraction has no effect, {reason}",
    ]
    (tmp_path / "a" / "more.csv").unlink()
    table.pop("validation_fraction")
    assert noted(SOURCES["mixture"](parts=(table, other)), sequence_length=96) == []
    other |= {"validation_path": f"{tmp_path}/a/train.csv", "validation_fraction": 0.5}  # trained on in the other part
    path = f"{tmp_path}/a/train.csv"
    assert noted(SOURCES["mixture"](parts=(table, other)), sequence_length=96) == [
        f"part 'two': source.validation_fraction has no effect, because source.validation_path is {path!r}.",
        f"{path} is in several splits (1 such files): their metrics do not show generalization.",
    ]


def test_a_fraction_that_is_not_held_out(tmp_path):
    for name in ("train", "valid"):
        write(tmp_path / f"{name}.csv", 9)
    reason = f"because {tmp_path} has files of the split validation."
    source = SOURCES["csv"](path=str(tmp_path), validation_fraction=0.35)
    assert noted(source, sequence_length=96) == [f"source.validation_fraction has no effect, {reason}"]
    assert len(texts(source)["validation"]) == 9
    (tmp_path / "valid.csv").unlink()
    assert noted(source, sequence_length=96) == []
