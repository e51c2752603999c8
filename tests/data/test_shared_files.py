"""Files that are in several splits, or several times in one, and options of a source without effect on its data."""

import os

import pytest

from lineage.data import SOURCES, Loader, load
from lineage.data.notes import notes
from lineage.data.tokenizers import Bytes
from lineage.tasks import TASKS


def write(path, rows=4):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("text,label\n" + "".join(f"{path.parent.name} {path.stem} {n},{n % 2}\n" for n in range(rows)))


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


def test_copies_in_several_splits(tmp_path):
    write(tmp_path / "train.csv")
    (tmp_path / "dev.csv").write_bytes((tmp_path / "train.csv").read_bytes())
    source = SOURCES["csv"](path=str(tmp_path))
    assert source.shared() == [str(tmp_path / "dev.csv")]
    content = (tmp_path / "train.csv").read_bytes()
    (tmp_path / "dev.csv").write_bytes(content.replace(b"train", b"other"))  # of the same size
    assert source.shared() == []


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
    path = f"{tmp_path}/a/train.csv"
    other |= {"validation_path": path}  # trained on in the other part
    assert noted(SOURCES["mixture"](parts=(table, other)), sequence_length=96) == [
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


@pytest.mark.parametrize("layout", ["{}.txt", "wiki.{}.tokens", "{}/0.txt"])
def test_text_files_that_are_named_after_splits(layout, tmp_path):
    """Check the note about texts for testing that are trained on, as in a folder of WikiText."""
    for name in ("train", "valid", "test"):
        (path := tmp_path / "texts" / layout.format(name)).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} " * 40)
    advice = "give the files of each split in source.path, source.validation_path and source.test_path."
    trained = "are training data, also those named after other splits"
    source = SOURCES["text"](path=f"{tmp_path}/texts")
    options = {"task": "causal_lm", "sequence_length": 8}
    assert noted(source, **options) == [f"all files of {tmp_path}/texts {trained} (test, validation): {advice}"]
    paths = {name: f"{tmp_path}/texts/{layout.format(name)}" for name in ("train", "valid", "test")}
    given = {"path": paths["train"], "validation_path": paths["valid"], "test_path": paths["test"]}
    assert noted(SOURCES["text"](**given), **options) == []
    pattern = f"{tmp_path}/texts/{layout.format('t*')}"
    assert noted(SOURCES["text"](path=pattern), **options) == [f"all files of {pattern} {trained} (test): {advice}"]
