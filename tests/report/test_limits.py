"""Limits of what reports read and show."""

import json
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

from lineage.report import artifacts, figures
from lineage.report.comparison import compare
from lineage.report.run import write_report
from tests.report.test_hostile import write_run, write_small


def write_names(path, count):
    """Write a small file with `count` names of no characters, and no other array."""
    head = f"{{'descr': '<U0', 'fortran_order': False, 'shape': ({count},), }}".encode()
    head += b" " * (63 - (len(head) + 10) % 64) + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("class_names.npy", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("confusion_test", {"counts": (1500, 1500), "class_names": ()}),
        ("precision_test", {"precision": (1, 100_000)}),
        ("attention_text", {"tokens": (), "attention": (1, 1, 6000, 6000)}),
        ("attention_image", {"weights": (1, 1, 1, 6000, 6000)}),
        ("attention_text", None),
    ],
)
def test_arrays_that_are_too_large_for_a_page_are_named(tmp_path, name, shapes):
    path = write_small(tmp_path) / f"artifacts/{name}.npz"
    if shapes is None:
        write_names(path, 4_000_000)
    else:
        np.savez_compressed(path, **{key: np.zeros(shape, np.uint8) for key, shape in shapes.items()})
    with pytest.raises(ValueError, match=rf"{name}.npz cannot be shown .*has shape \(.*: move it away to write"):
        write_report(tmp_path)


def test_figures_that_another_report_deletes(tmp_path, monkeypatch):
    write_report(write_run(tmp_path, "text"))
    delete = Path.unlink

    def twice(path, missing_ok=False):
        delete(path, missing_ok)
        delete(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", twice)
    write_report(tmp_path)


def test_memory_error_names_the_file(tmp_path, monkeypatch):
    def no_memory(*_):
        raise MemoryError("Unable to allocate 9 GiB")

    folder = write_small(tmp_path)
    np.savez(folder / "artifacts/confusion_test.npz", counts=np.eye(2, dtype=int), class_names=np.array(["a", "b"]))
    monkeypatch.setattr(figures, "confusion", no_memory)
    with pytest.raises(ValueError, match=r"confusion_test.npz cannot be shown \(MemoryError: Unable"):
        write_report(folder)


def test_only_the_files_that_are_shown_are_read(tmp_path, monkeypatch):
    files, image = write_small(tmp_path) / "artifacts", np.zeros((50, 2, 2, 3))
    for step in range(20):
        np.savez(files / f"painted_{step}.npz", image=image, masked=image, painted=image)
    np.savez(files / "unknown.npz", image)
    monkeypatch.setitem(artifacts.LIMITS, "pictures", 2)
    seen, read = [], artifacts.read
    monkeypatch.setattr(artifacts, "read", lambda path, *most: (seen.append(path.name), read(path, *most))[1])
    body = write_report(tmp_path).read_text()
    assert sum(name.startswith("painted_") for name in seen) == 6
    assert "unknown.npz" not in seen
    assert 'aria-label="2 images, their visible patches, and their reconstructions at 6 steps."' in body


def test_number_of_boxes_is_limited(tmp_path, monkeypatch):
    monkeypatch.setitem(artifacts.LIMITS, "boxes", 3)
    boxes = np.tile([0, 0, 0.5, 0.1, 0.1, 0.1, 0.1], (9, 1))
    files = write_small(tmp_path) / "artifacts"
    arrays = {"image": np.zeros((1, 4, 4, 3)), "truth": boxes[:1], "found": boxes, "class_names": np.array(["a"])}
    np.savez(files / "objects_x.npz", **arrays)
    drawn, draw = [], figures.objects
    monkeypatch.setattr(figures, "objects", lambda axes, **rest: (drawn.append(len(rest["found"])), draw(axes, **rest)))
    write_report(tmp_path)
    assert max(drawn) == 3


def test_long_names_are_cut_in_figures_only(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, f"train/{'m' * 5000}": 1.0}) + "\n")
    body = write_report(tmp_path).read_text()
    assert re.findall("M(m+)(.?)<", body) == [("m" * 199, "…")]


def test_number_of_charts_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("lineage.report.run.MAX_CHARTS", 3)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1} | {f"train/m{n}": 1.0 for n in range(5)}) + "\n")
    body = write_report(tmp_path).read_text()
    assert body.count("<svg") == 3
    assert "3 of 5 metrics are shown." in body
    monkeypatch.setattr("lineage.report.run.MAX_CURVES", 2)
    assert "2 of 5 metrics are shown." in write_report(tmp_path).read_text()


def test_number_and_length_of_samples_are_limited(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (path := tmp_path / "artifacts/samples.jsonl").parent.mkdir()
    samples = [{"step": 1, "prompt": "p" * 99_999, "text": "<old>"}]
    samples += [{"step": step, "text": "t" * 99_999} for step in range(2, 32) for _ in range(1 if step < 31 else 200)]
    path.write_text("".join(json.dumps(line) + "\n" for line in samples))
    body = write_report(tmp_path).read_text()
    assert re.findall("t{500,}", body) == ["t" * 20_000] * (29 + 100)
    assert "&lt;old&gt;" not in body


def test_texts_and_pictures_that_are_too_large_for_a_page_are_named(tmp_path):
    names = {"counts": np.eye(20, dtype=int), "class_names": np.array(["a" * 300_000] * 20)}
    image = {"image": np.zeros((1, 6000, 6000, 1), bool)}
    for name, arrays in {"confusion_test": names, "mistakes_test": image}.items():
        folder = write_small(tmp_path / name)
        np.savez_compressed(folder / f"artifacts/{name}.npz", **arrays)
        with pytest.raises(ValueError, match=rf"{name}.npz cannot be shown .*has shape \(.*: move it away to write"):
            write_report(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "artifacts/cost.json", "artifacts/run.json", "artifacts/samples.jsonl"]
)
def test_files_that_are_too_large_are_not_read(tmp_path, name):
    path = write_small(tmp_path) / name
    path.touch()
    os.truncate(path, 1 << 40)  # without blocks on the disk
    with pytest.raises(ValueError, match=rf"{path.name}.* bytes"):
        write_report(tmp_path)


def test_keys_that_are_nested_too_deeply_are_named(tmp_path):
    folder = write_small(tmp_path / "a")
    (folder / "config.json").write_text(f'{{"{"k" * 200}":' * 3 + "1" + "}" * 3)
    with pytest.raises(ValueError, match=r"config.json cannot be shown .*too long or nested too deeply"):
        write_report(folder)
    with pytest.raises(ValueError, match=rf"{folder} cannot be shown .*too long or nested too deeply"):
        compare([tmp_path])
