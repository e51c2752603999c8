"""Verification of runs: what is sound, what is damaged, and runs in progress."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from lineage.configs.atomic import sealed, write_record
from lineage.data import Facts
from lineage.report import comparison
from lineage.runs.folder import read_json, read_record, sealed_page
from lineage.runs.locks import locked
from lineage.train import loop, verification
from lineage.train.verification import runs_below, verify
from tests.tiers import tiered
from tests.train.runs import ONE


@pytest.fixture(scope="module")
def original(tiny, tmp_path_factory):
    """Return a folder with a complete run and its token cache."""
    folder = tmp_path_factory.mktemp("original")
    changes = {"total_steps": 6, "save_every_steps": 3, "sampling.num_samples": 1, "task.cache_dir": f"{folder}/tokens"}
    loop.train(tiny("gpt", changes | {"tokenizer": "characters"}), folder / "run", devices=ONE)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    """Return a copy of it."""
    shutil.copytree(original, tmp_path / "copy")
    config = tmp_path / "copy" / "run" / "config.json"
    config.write_text(config.read_text().replace(str(original), str(tmp_path / "copy")))
    return tmp_path / "copy"


def state(folder):
    """Return content and time of all files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files]


def test_sound_run(folder, capsys):
    before = state(folder)
    assert verify([folder]) == 0
    assert state(folder) == before
    lines, output = capsys.readouterr()
    names = [line.removesuffix(": sound").removeprefix(f"{folder}/") for line in lines.splitlines()]
    expected = {f"run/{name}" for name in ("config.json", "run.json", "data.json", "facts.json", "metrics.jsonl")}
    expected |= {f"run/{name}" for name in ("tokenizer.json", "checkpoints/3", "checkpoints/6", "report.html")}
    expected |= {f"run/artifacts/{name}" for name in ("samples.jsonl", "run.json", "cost.json")}
    assert expected <= set(names)
    assert [name for name in names if name.startswith("tokens/")]
    assert len(names) == len(set(names))
    assert output == f"{len(names)} of {len(names)} are sound\n"
    assert read_record(folder / "run/checkpoints/6")["data"] == sealed(read_json(folder / "run/data.json"))["crc32"]


def test_run_without_checksums_of_json_and_history(folder, capsys):
    """Check a run of an earlier version, whose changed digits cannot be found."""
    for path in [*folder.glob("run/*.json"), *folder.glob("run/artifacts/*.json")]:
        content = json.loads(path.read_text())
        if content.pop("crc32", None):
            path.write_text(json.dumps(content))
    record = read_record(folder / "run/checkpoints/6")
    assert record.pop("history_crc32")
    (folder / "run/checkpoints/6/about/metadata").write_text(json.dumps(sealed(record)))
    edit(b'"train/loss": ', b'"train/loss": 1')(folder / "run/metrics.jsonl")
    assert verify([folder / "run"]) == 0, capsys.readouterr().out


def test_relative_folder(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert verify([Path("run")]) == 0
    assert "run/checkpoints/6: sound" in capsys.readouterr().out


def edit(old, new):
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new, 1))


def flip(path):
    """Flip a bit in the middle of the largest file of a folder, or of a file."""
    path = max((file for file in [path, *path.rglob("*")] if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def shorten(path):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))


FAULTS = {
    "weights": ("run/checkpoints/6", flip, "damaged"),
    "record": ("run/checkpoints/3", lambda path: empty(path / "about" / "metadata"), "damaged"),
    "description": ("run/checkpoints/3", lambda path: (path / "_CHECKPOINT_METADATA").write_text("[]"), "damaged"),
    "sizes of shards": (
        "run/checkpoints/3",
        lambda path: os.truncate(path / "state/array_metadatas/process_0", 90),
        "damaged: Unterminated string",
    ),
    "hash": (
        "run/checkpoints/3",
        lambda path: edit(b'"next_batch": 3', b'"next_batch": 2')(path / "about/metadata"),
        "check",
    ),
    "config": ("run/config.json", edit(b'"learning_rate": 0.01', b'"learning_rate": 0.02'), "schedule.learning_rate"),
    "empty config": ("run/config.json", empty, "damaged"),
    "no config": ("run/config.json", Path.unlink, "is missing"),
    "no fingerprints": ("run/data.json", Path.unlink, "is missing"),
    "tokenizer": ("run/tokenizer.json", edit(b'"a":', b'"\xc3\xa4":'), "SHA-256"),
    "lost history": ("run/metrics.jsonl", shorten, "lines are lost"),
    "no history": ("run/metrics.jsonl", Path.unlink, "is missing"),
    "history": ("run/metrics.jsonl", edit(b'{"step": 2', b'"step": 2'), "line 2"),
    "changed history": ("run/metrics.jsonl", edit(b'"train/loss": ', b'"train/loss": 1'), "not those written"),
    "changed facts of the data": ("run/facts.json", edit(b'"vocab_size": ', b'"vocab_size": 1'), "checksum"),
    "facts of other data": (
        "run/facts.json",
        lambda path: Facts(vocab_size=7).save(path),
        "it is not that of the newest checkpoint",
    ),
    "fingerprints of other data": (
        "run/data.json",
        lambda path: write_record(path, {"tokenizer.json": json.loads(path.read_text())["tokenizer.json"]}),
        "it is not that of the newest checkpoint",
    ),
    "changed facts": ("run/artifacts/run.json", edit(b'"steps": 6', b'"steps": 7'), "checksum"),
    "changed cost": ("run/artifacts/cost.json", edit(b'"parameters"', b'"Parameters"'), "checksum"),
    "changed start": ("run/run.json", edit(b"{", b'{"seed": 1, '), "checksum"),
    "changed fingerprints": ("run/data.json", edit(b'": [\n    ', b'": [\n    1'), "checksum"),
    "changed samples": ("run/artifacts/samples.jsonl", edit(b'"text": "', b'"text": "x'), "checksum"),
    "samples": ("run/artifacts/samples.jsonl", lambda path: path.write_text('{}\n{"step": 6}\n'), "line 1"),
    "last sample": ("run/artifacts/samples.jsonl", lambda path: path.write_text('{"step": 6}\n{"step"}\n'), "line 2"),
    "artifact": ("run/artifacts/cost.json", empty, "Expecting value"),
    "page": ("run/report.html", lambda path: os.truncate(path, 5000), "does not match"),
    "changed page": ("run/report.html", flip, "does not match"),
    "changed event": ("run/events.out.tfevents.*", flip, "does not match"),
    "size of an event": (
        "run/events.out.tfevents.*",
        lambda path: os.truncate(path, 0) or path.write_bytes(b"0" * 40),
        "byte 12",
    ),
    "tokens": ("tokens/*/", flip, "is damaged"),
    "index": ("tokens/*/", lambda path: empty(path / "index.json"), "index.json is damaged"),
}


@tiered("name", FAULTS, first=6)
def test_damage_is_found(name, folder, capsys):
    pattern, damage, said = FAULTS[name]
    path = next(folder.glob(pattern)) if "*" in pattern else folder / pattern
    damage(path)
    before = state(folder)
    assert verify([folder / "run"], as_json=True) == 1
    assert state(folder) == before
    bad = [one for one in json.loads(capsys.readouterr().out) if not one["sound"]]
    assert [one["path"] for one in bad] == [str(path)]
    assert said in bad[0]["problem"]
    assert "\n" not in bad[0]["problem"]


@pytest.mark.parametrize("place", [5, ["a"], "a\0b", "absent"])
def test_odd_place_of_the_token_cache(place, tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"task": {"cache_dir": place}}))
    assert verify([tmp_path]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/config.json: sound\n"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["compare.html", "sweep.html"])
def test_page_about_several_runs_is_checked(name, folder, capsys):
    (folder / name).write_bytes(sealed_page(b"<!doctype html>" * 99))
    assert verify([folder]) == 0
    assert f"{folder}/{name}: sound\n" in capsys.readouterr().out
    flip(folder / name)
    for place in (folder, folder.parent):
        assert verify([place]) == 1
        assert f"{folder}/{name}: its SHA-256" in capsys.readouterr().out


@pytest.mark.thorough
def test_event_that_was_cut_by_a_kill_is_no_damage(folder):
    path = next(folder.glob("run/events.out.tfevents.*"))
    for removed in (3, 9):
        os.truncate(path, path.stat().st_size - removed)
        assert verify([folder]) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("damage", [empty, edit(b",", b""), lambda path: os.truncate(path, path.stat().st_size - 1)])
def test_table_of_a_sweep_is_checked(damage, folder, capsys):
    rows = [{"run": "a,\u2028b\n", "state": "failed (1)"}, {"run": "c", "state": "done", "test/loss": "0.5"}]
    comparison.write_table(rows, folder / "sweep.csv")
    assert verify([folder]) == 0
    damage(folder / "sweep.csv")
    assert verify([folder / "run"]) == 0
    assert verify([folder]) == 1
    assert f"{folder}/sweep.csv: its rows are not complete" in capsys.readouterr().out


@pytest.mark.parametrize("damage", [empty, edit(b'{"op_code"', b'{"op_cude"'), edit(b'"study_id"', b"&study_id")])
def test_journal_of_a_search_is_checked(damage, folder, capsys):
    """Otherwise, the folder would be called sound although the search refuses to continue."""
    path = folder / "optuna.journal"
    path.write_bytes(b'{"op_code":0,"study_name":"sweep"}\n{"op_code":4,"study_id":0}\n{"op_co')  # cut by a kill
    assert verify([folder]) == 0
    assert f"{path}: sound\n" in capsys.readouterr().out
    damage(path)
    assert verify([folder]) == 1
    assert re.search(rf"{path}: (line [12] is not a record of Optuna|it has no records)", capsys.readouterr().out)


def test_finished_run_without_checkpoints_is_not_sound(folder, capsys):
    for path in folder.glob("run/checkpoints/*"):
        shutil.rmtree(path)
    assert verify([folder]) == 1
    assert f"{folder}/run/checkpoints: the run has finished, but has no checkpoint\n" in capsys.readouterr().out
    (folder / "run/checkpoints").rmdir()
    assert verify([folder]) == 1
    assert f"{folder}/run/checkpoints: is missing\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["sweep.html", "run/artifacts/other.json"])
def test_broken_link_to_a_file_is_not_sound(name, folder, capsys):
    (folder / name).symlink_to("missing")
    assert verify([folder]) == 1
    assert f"{folder}/{name}: is missing\n" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["slurm", "run/slurm"])
def test_numbers_of_jobs_are_checked(place, folder, capsys):
    path = folder / place / "jobs.json"
    path.parent.mkdir()
    write_record(path, {"run": "7_0"})
    assert verify([folder]) == 0
    edit(b"7_0", b"8_0")(path)
    assert verify([folder]) == 1
    assert f"{path}: its checksum does not match" in capsys.readouterr().out


def test_names_of_folders_are_printed_escaped(tmp_path, capsys):
    """Check that a name in somebody else's folder neither controls the terminal nor looks like another line."""
    (tmp_path / "a\x1b[2J\nb: sound\udcff" / "checkpoints").mkdir(parents=True)
    assert verify([tmp_path]) == 1
    assert capsys.readouterr().out == f"{tmp_path}/a\\x1b[2J\\nb: sound\\udcff/config.json: is missing\n"


@pytest.mark.thorough
def test_damaged_arrays_are_found(folder, capsys):
    (folder / "run" / "artifacts" / "more.npz").write_bytes(b"PK\x03\x04 damaged")
    assert verify([folder]) == 1
    assert "more.npz: " in capsys.readouterr().out
    arrays = folder / "run" / "artifacts" / "more.npz"
    np.savez(arrays, a=np.arange(999))
    assert verify([folder]) == 0
    flip(arrays)
    assert verify([folder]) == 1
    assert "more.npz: a.npy is damaged" in capsys.readouterr().out
    os.mkfifo(folder / "run" / "artifacts" / "pipe.npz")
    assert verify([folder]) == 1
    assert "pipe.npz is not a regular file" in capsys.readouterr().out


@pytest.mark.parametrize("deleted", [True, False])
def test_checkpoint_that_a_run_deletes_meanwhile_is_no_error(deleted, folder, monkeypatch, capsys):
    """Check a checkpoint that disappears while it is read, and one that is still damaged when it is read again."""
    monkeypatch.setattr(verification.time, "sleep", lambda _: None)
    whole, reads = verification.read_fields, []

    def read(path, names):
        if path.name == "3":
            reads.append(path)
            shutil.rmtree(path / "state", ignore_errors=True)
            if deleted and len(reads) == 2:
                shutil.rmtree(path)
        return whole(path, names)

    monkeypatch.setattr(verification, "read_fields", read)
    with locked(folder / "run"):
        assert verify([folder / "run"]) == int(not deleted)
    assert len(reads) == (2 if deleted else verification.ATTEMPTS)
    assert ("checkpoints/3: " in capsys.readouterr().out) == (not deleted)


def test_runs_below_a_folder(tmp_path):
    for name in ("b/run/checkpoints/3", "b/run/export", "a/checkpoints", "c/export"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("b/run/export/config.json", "c/export/config.json"):  # exported models
        (tmp_path / name).write_text("{}")
    assert list(runs_below(tmp_path)) == [tmp_path / "a", tmp_path / "b" / "run"]
    with pytest.raises(FileNotFoundError, match="there is no run in"):
        verify([tmp_path / "c"])


def test_folders_that_cannot_be_read_are_not_sound(folder, monkeypatch, capsys):
    (folder / "closed").mkdir()
    listed, walked = os.listdir, os.scandir

    def unless(function, name):
        def call(path):
            if os.path.basename(path) == name:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return function(path)

        return call

    for name in ("closed", "checkpoints"):
        monkeypatch.setattr(os, "listdir", unless(listed, name))
        monkeypatch.setattr(os, "scandir", unless(walked, name))
        assert verify([folder]) == 1
        problems = [line for line in capsys.readouterr().out.splitlines() if not line.endswith("sound")]
        assert len(problems) == 1
        assert f"{name}: [Errno 13] Permission denied" in problems[0]


@pytest.mark.thorough
def test_state_with_fields_in_another_order_than_on_disk_is_sound(tiny, tmp_path):
    loop.train(tiny("vit", {"total_steps": 1, "optimizer.name": "prodigy"}), tmp_path / "run", devices=ONE)
    assert not verify([tmp_path / "run"])
