"""The options of tables that have no effect on a kind of content, which runs note at their start."""

import csv
import json
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lineage.configs import base
from lineage.data.sources import SOURCES
from lineage.data.sources.tfds import TFDS
from lineage.data.transforms.pillow import png
from lineage.train.experiment import Experiment
from lineage.train.preparation import start_notes

KINDS = "documents", "labeled_texts", "pairs"
CASES = [(name, kind) for name in ("csv", "tsv", "jsonl", "parquet") for kind in KINDS] + [("parquet", "images")]
NAMES = "text", "label", "input", "target"
OTHERS = {f"{name}_key": f"{name}2" for name in (*NAMES, "image")} | {"max_bytes": 20, "validation_fraction": 0.5}
COLUMNS = {f"{name}{end}": [f"{n % 3} {name}{end}" for n in range(9)] for name in NAMES for end in ("", "2")}


@pytest.fixture
def folder(tmp_path):
    images = {
        f"image{end}": [{"bytes": png(np.full((4, 4, 3), first + n, np.uint8)), "path": None} for n in range(9)]
        for end, first in (("", 0), ("2", 100))
    }
    pq.write_table(pa.table(COLUMNS | images), tmp_path / "a.parquet")
    rows = list(zip(*COLUMNS.values()))
    for suffix, delimiter in (("csv", ","), ("tsv", "\t")):
        with (tmp_path / f"a.{suffix}").open("w", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows([list(COLUMNS), *rows])
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(dict(zip(COLUMNS, row)))}\n" for row in rows))
    return tmp_path


def content(source, kind):
    splits = source.read(kind)
    if kind == "documents":
        return {split: list(texts) for split, texts in splits.items()}
    if kind == "images":
        examples = {split: part.take(np.arange(len(part))) for split, part in splits.splits.items()}
        arrays = {split: ([*map(np.asarray, e["image"])], e["label"]) for split, e in examples.items()}
        return repr((arrays, splits.class_names))
    return splits


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_options_without_effect_are_those_that_do_not_change_the_content(name, kind, folder):
    plain = SOURCES[name](str(folder / f"a.{name}"))
    expected = content(plain, kind)
    for option in OTHERS.keys() & {field.name for field in fields(plain)}:
        other = replace(plain, **{option: OTHERS[option]})
        assert other.without_effect(kind) == [option] * (content(other, kind) == expected), option
    assert not plain.without_effect(kind)


def test_options_of_tfds():
    source = TFDS("prose", text_key="a", label_key="b", image_key="c", max_bytes=1)
    assert source.without_effect("documents") == ["label_key", "image_key"]
    assert source.without_effect("labeled_texts") == ["image_key", "max_bytes"]
    assert source.without_effect("images") == ["text_key", "max_bytes"]


def test_runs_note_options_without_effect(folder):
    config = base.get_config("bert", "text_classification", "csv")
    path = str(folder / "a.csv")
    config.source.update(path=path, validation_path=path, validation_fraction=0.1, max_bytes=20)
    config.model.update(width=8, depth=1, num_heads=2)
    config.tokenizer = base.get_config("gpt", "causal_lm", "stdlib").tokenizer
    config.task.sequence_length, config.total_steps = 16, 1
    notes = [note for note in start_notes(Experiment(config), 0, {}) if "no effect" in note]
    assert notes == [
        f"source.validation_fraction has no effect, because source.validation_path is {path!r}.",
        "source.max_bytes has no effect in the task 'text_classification'.",
    ]


def test_parts_of_a_mixture(folder):
    parts = {"source": f"csv:{folder / 'a.csv'}", "max_bytes": 20}, f"jsonl:{folder / 'a.jsonl'}"
    mixture = SOURCES["mixture"](parts=parts)
    assert mixture.without_effect("documents") == []
    assert mixture.without_effect("pairs") == ["max_bytes of the part 'csv'"]
