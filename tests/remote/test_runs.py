"""Runs in folders on remote storage, against a local stand-in of S3."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from lineage import launch
from lineage.configs import cli, storage
from lineage.runs import remote
from lineage.runs.folder import MEASURED, last_step
from lineage.tasks import TASKS
from lineage.train import loop
from lineage.train.experiment import Experiment

ROOT = Path(__file__).parents[2]
TOTAL = 8


def config(**changes):
    """Return the config of a run that takes seconds."""
    found, _ = cli.load(f"{ROOT}/tests/tiny.py:gpt")
    small = {"model.depth": 1, "model.dropout": 0.1, "source.max_bytes": 20_000, "save_every_steps": 2}
    cli.override(found, small | {"total_steps": TOTAL, "evaluate_every_steps": 4} | changes)
    return found


def train(workdir, **changes):
    return loop.train(config(**changes), workdir, devices=jax.devices()[:1])


class Killed(BaseException):
    """Exception that simulates the death of the process."""


@pytest.fixture
def no_report(monkeypatch):
    monkeypatch.setattr(loop, "write_report", lambda workdir: None)
    monkeypatch.setattr(loop.artifacts, "write_all", lambda *args: None)


def final(workdir):
    """Return the bytes of the final state, and the history without times."""
    saved = ocp.StandardCheckpointer().restore(workdir / "checkpoints" / str(TOTAL) / "state")
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    history = [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(saved)], history


@pytest.fixture
def mirror(bucket):
    """Return a new mirror of the folder of the bucket."""
    return remote.Mirror(bucket.url, "runs")


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def checkpoint(step, content=b"weights"):
    return {f"checkpoints/{step}/state/{part}": content for part in "ab"} | {
        f"checkpoints/{step}/about/metadata": b"record of " + content
    }


def copied(url, cache, name):
    """Return the files of a run by their names, as another machine sees them."""
    cache(name)
    with remote.opened(url) as folder:
        return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_local_workdir_is_used_as_it_is(tmp_path):
    with remote.opened(tmp_path / "run", training=True) as folder:
        assert folder == tmp_path / "run"
    assert not folder.exists()


def test_what_changes_is_uploaded_and_what_is_deleted_too(bucket, mirror, cache):
    files = {"config.json": b"{}", "artifacts/a.npz": b"a"} | checkpoint(1)
    write(
        mirror.folder,
        files | {".lock": b"", ".config.json.host.1.partial": b"", "checkpoints/2.orbax-checkpoint-tmp/a": b""},
    )
    mirror.push()
    assert bucket.get() == files
    write(mirror.folder, {"config.json": b"[]"} | checkpoint(2))
    (mirror.folder / "artifacts/a.npz").unlink()
    for name in checkpoint(1):
        (mirror.folder / name).unlink()
    mirror.push()
    assert bucket.get() == {"config.json": b"[]"} | checkpoint(2)
    assert copied(bucket.url, cache, "other") == {"config.json": b"[]"} | checkpoint(2)


@pytest.mark.parametrize("after", range(12))
def test_an_upload_that_is_killed_leaves_only_whole_checkpoints(cache, monkeypatch, after):
    """Kill an upload that replaces checkpoint 2, adds 3 and deletes 4 after some of its requests."""
    url = f"memory://{after}/run"
    mirror = remote.Mirror(url, "runs")
    write(mirror.folder, {"config.json": b"1"} | checkpoint(1) | checkpoint(2) | checkpoint(4))
    mirror.push()
    second = {"config.json": b"2"} | checkpoint(2, b"others") | checkpoint(3)
    write(mirror.folder, second)
    for name in checkpoint(4):
        (mirror.folder / name).unlink()
    requests = iter(range(1000))

    def killed(function):
        def request(*args):
            if next(requests) >= after:
                raise Killed
            return function(*args)

        return request

    monkeypatch.setattr(storage, "THREADS", 1)
    with monkeypatch.context() as patch, pytest.raises(Killed) if after < 11 else contextlib.nullcontext():
        for name in ("put_file", "rm_file"):
            patch.setattr(mirror._system, name, killed(getattr(mirror._system, name)))
        mirror.push()
    found = copied(url, cache, "other")
    for step in (1, 2, 3, 4):
        there = {name: content for name, content in found.items() if name.startswith(f"checkpoints/{step}/")}
        assert there in ({}, checkpoint(step), checkpoint(step, b"others"))
    assert checkpoint(1).items() <= found.items()
    assert checkpoint(3).items() <= found.items() or checkpoint(4).items() <= found.items()
    cache("third")
    with remote.opened(url, training=True) as folder:
        write(folder, second)
        for name in checkpoint(4):
            (folder / name).unlink(missing_ok=True)
    system = mirror._system
    assert {path.removeprefix(f"/{after}/run/") for path in system.find(f"/{after}/run")} == {*second, *checkpoint(1)}
    assert copied(url, cache, "last") == second | checkpoint(1)


def test_a_checkpoint_that_is_deleted_during_its_upload_does_not_count(bucket, mirror, monkeypatch):
    write(mirror.folder, checkpoint(1))
    put_file = mirror._system.put_file

    def deleted(place, name):
        (mirror.folder / "checkpoints/1/state/b").unlink(missing_ok=True)
        put_file(place, name)

    monkeypatch.setattr(storage, "THREADS", 1)
    monkeypatch.setattr(mirror._system, "put_file", deleted)
    mirror.push()
    assert set(bucket.get()) == {"checkpoints/1/state/a"}


@pytest.mark.parametrize(
    ("seconds", "files"), [(0.1, {"metrics.jsonl": b"line"}), (1000.0, checkpoint(1))], ids=["often", "checkpoint"]
)
def test_a_run_is_uploaded_while_it_is_in_progress(bucket, monkeypatch, seconds, files):
    monkeypatch.setattr(remote, "SECONDS", seconds)
    with remote.opened(bucket.url, training=True) as folder:
        write(folder, files)
        deadline = time.monotonic() + 60
        while not files.items() <= bucket.get().items():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert bucket.get() == files


def test_an_upload_that_fails_does_not_stop_the_run(bucket, monkeypatch, capsys):
    monkeypatch.setattr(remote, "SECONDS", 0.1)
    system = storage.Files(bucket.url).system
    put_file = system.put_file

    def failing(*_):
        raise RuntimeError("no connection")

    monkeypatch.setattr(system, "put_file", failing)
    with remote.opened(bucket.url, training=True) as folder:
        write(folder, {"metrics.jsonl": b"line"})
        time.sleep(2)
        monkeypatch.setattr(system, "put_file", put_file)
    assert bucket.get() == {"metrics.jsonl": b"line"}
    said = capsys.readouterr().err
    assert said.count(f"{bucket.url} cannot be used: RuntimeError: no connection. The run continues") == 1


def test_changes_that_were_not_uploaded_are_kept_for_the_next_start(bucket, monkeypatch):
    system = storage.Files(bucket.url).system

    def failing(*_):
        raise RuntimeError("no connection")

    def run(patch):
        with remote.opened(bucket.url, training=True) as folder:
            patch.setattr(system, "put_file", failing)
            write(folder, checkpoint(1))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no connection"):
        run(patch)
    assert set(bucket.get()) == {".lock"}
    with remote.opened(bucket.url) as folder:  # for another command than `train`
        assert last_step(folder) == 1
    with remote.opened(bucket.url, training=True) as folder:
        assert last_step(folder) == 1
    assert bucket.get() == checkpoint(1)


def test_files_of_an_earlier_run_do_not_come_back(bucket, cache):
    """Start a new run after the remote folder was deleted."""
    with remote.opened(bucket.url, training=True) as folder:
        write(folder, checkpoint(1) | {"config.json": b""})
    for name in bucket.get():
        bucket.delete(name)
    with remote.opened(bucket.url, training=True) as folder:
        assert not folder.exists()
    assert bucket.get() == {}


def test_what_was_uploaded_here_is_not_downloaded_again(bucket, monkeypatch):
    with remote.opened(bucket.url, training=True) as folder:
        write(folder, checkpoint(1) | {"config.json": b"{}"})

    def failing(*_):
        raise AssertionError("a file was downloaded")

    monkeypatch.setattr(storage.Files(bucket.url).system, "get_file", failing)
    with remote.opened(bucket.url) as folder:
        assert (folder / "config.json").read_bytes() == b"{}"


def foreign(bucket, **changes):
    """Write the lock file of a run on another machine."""
    lock = {"host": "other", "process": 1, "id": "other"} | changes
    bucket.put({".lock": json.dumps(lock).encode(), "config.json": b"{}"})


@pytest.mark.parametrize("alive", [True, False])
def test_a_run_on_another_machine_counts_as_dead_if_its_lock_does_not_change(bucket, monkeypatch, alive):
    foreign(bucket)
    monkeypatch.setattr(remote, "SILENCE", 3.0)

    def sleep(seconds):
        if alive:
            foreign(bucket, time=1)

    monkeypatch.setattr(time, "sleep", sleep)
    if alive:
        with pytest.raises(ValueError, match=f"another run is using {bucket.url} on other: wait for it"):
            remote.opened(bucket.url, training=True).__enter__()
        assert set(bucket.get()) == {".lock", "config.json"}
    else:
        with remote.opened(bucket.url, training=True) as folder:
            assert (folder / "config.json").exists()
            assert json.loads(bucket.get()[".lock"])["process"] == os.getpid()
        assert set(bucket.get()) == {"config.json"}


def test_a_run_whose_lock_was_taken_over_stops_without_uploading(bucket, monkeypatch):
    monkeypatch.setattr(remote, "HEARTBEAT", 0.1)
    signals = []

    def run():
        with remote.opened(bucket.url, training=True) as folder:
            foreign(bucket)
            write(folder, {"config.json": b"mine"})
            deadline = time.monotonic() + 60
            while not signals:
                assert time.monotonic() < deadline
                time.sleep(0.1)

    before = signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    try:
        with pytest.raises(ValueError, match=f"another run has taken over {bucket.url}"):
            run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert bucket.get()["config.json"] == b"{}"
    assert json.loads(bucket.get()[".lock"])["host"] == "other"


def test_a_run_in_progress_on_this_machine_is_read_where_it_is(bucket):
    bucket.put({"config.json": b"older"})
    with remote.opened(bucket.url, training=True) as folder:
        (folder / "config.json").write_bytes(b"newer")
        with remote.opened(bucket.url) as again:
            assert again == folder
            assert (folder / "config.json").read_bytes() == b"newer"
            (folder / "report.html").write_bytes(b"report")
        assert "report.html" not in bucket.get()  # the run uploads it
        with pytest.raises(ValueError, match=f"another run is using {bucket.url} on {os.uname().nodename}"):
            remote.opened(bucket.url, training=True).__enter__()
    assert bucket.get()["config.json"] == b"newer"


def test_an_output_is_uploaded_and_continued_elsewhere(bucket, cache):
    def predict():
        with remote.written(f"{bucket.url}/out.jsonl") as place:
            write(Path(place).parent, {"out.jsonl": b"1\n", "out.jsonl.about.json": b"{}", "out/1.png": b"image"})
            raise Killed

    with pytest.raises(Killed):
        predict()
    assert set(bucket.get()) == {"out.jsonl", "out.jsonl.about.json", "out/1.png"}
    assert not [file for file in cache("cache").rglob("*") if file.is_file()]
    bucket.put({"others.jsonl": b""})
    cache("other")
    with remote.written(f"{bucket.url}/out.jsonl") as place:
        with open(place, "ab") as file:
            file.write(b"2\n")
        assert not Path(place).with_name("others.jsonl").exists()
    assert bucket.get()["out.jsonl"] == b"1\n2\n"
    assert set(bucket.get()) == {"out.jsonl", "out.jsonl.about.json", "out/1.png", "others.jsonl"}


@pytest.mark.parametrize("command", ["sweep", "watch"])
def test_commands_that_need_a_folder_of_this_machine_refuse_others(s3_environment, capsys, command):
    assert launch.main([command, "--workdir=s3://bucket/runs"]) == 1
    assert f"s3://bucket/runs is remote: {command} needs a folder of this machine." in capsys.readouterr().err


def test_paths_that_cannot_be_remote_are_refused(capsys):
    with pytest.raises(ValueError, match=r"task.cache_dir is 's3://bucket/tokens': it must be a folder of this"):
        TASKS["causal_lm"](cache_dir="s3://bucket/tokens")
    assert launch.main(["train", "--workdir=hf:org/run"]) == 1
    assert "hf:org/run is on the Hugging Face Hub, which is only read" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_run_of_two_processes_is_killed_and_resumed(bucket, cache, tmp_path):
    """Check that the processes use one copy, that it is refused if each has its own, and that its state is whole."""
    url, folders = f"{bucket.url}/run", {"cache": (tmp_path / "both",) * 2, "own": (tmp_path / "a", tmp_path / "b")}
    command = ["launch.py", f"--config={ROOT}/tests/tiny.py:gpt", "--config.model.depth=1", "--config.mesh.fsdp=2"]
    command += ["--config.total_steps=60", "--config.save_every_steps=3", "--config.evaluate_every_steps=60"]

    def start(workdir, kind):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"--coordinator=127.0.0.1:{free.getsockname()[1]}"
        several = [f"--workdir={workdir}", address, "--num-processes=2", "--heartbeat=10"]
        return [
            subprocess.Popen(
                [sys.executable, *command, *several, f"--process={number}"],
                cwd=ROOT,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "LINEAGE_CACHE": str(folders[kind][number]), "XLA_FLAGS": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number in range(2)
        ]

    def ended(processes):
        try:
            return [process.communicate(timeout=400)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()

    refused = ended(start(f"{bucket.url}/no", "own"))
    said = f"$LINEAGE_CACHE must be shared: the copy of {bucket.url}/no of process 1 differs from that of process 0."
    assert all(said in output for output in refused), refused
    processes = start(url, "cache")
    while all(process.poll() is None for process in processes):
        time.sleep(0.2)
        if any(key.startswith("run/") and key.endswith(storage.RECORD) for key in bucket.get()):
            processes[0].kill()
    outputs = ended(processes)
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 1], outputs
    processes = start(url, "cache")
    outputs = ended(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "resuming from step" in outputs[0]
    assert not [key for key in bucket.get() if key.endswith(".lock")]
    assert [*bucket.get()] == [key for key in bucket.get() if key.startswith("run/")]
    cache("elsewhere")
    with remote.opened(url) as folder:
        experiment = Experiment(cli.load(str(folder / "config.json"))[0], folder, jax.devices()[:2])
        assert int(experiment.restore().step) == 60  # hashes are verified


@pytest.mark.thorough
@pytest.mark.usefixtures("no_report")
def test_a_run_that_continues_on_another_machine_ends_as_one_on_a_local_disk(bucket, cache, tmp_path, monkeypatch):
    train(tmp_path / "local")
    whole = loop.TrainingLoop.run

    def interrupted(self, step):
        if step == 6:
            raise Killed
        whole(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainingLoop, "run", interrupted)
        with pytest.raises(Killed):
            train(bucket.url)
    assert f"checkpoints/4/{storage.RECORD}" in bucket.get()
    cache("other")
    train(bucket.url)
    cache("third")
    with remote.opened(bucket.url) as folder:
        assert final(folder) == final(tmp_path / "local")
    assert {"config.json", "tokenizer.json", "data.json"} <= bucket.get().keys()


@pytest.mark.slow
def test_a_run_that_was_killed_ends_with_the_same_parameters(bucket, cache, tmp_path):
    """Kill a run once a checkpoint is on the storage; continue it with the same copy, and another one with another."""
    states, environment = [], dict(os.environ) | {"JAX_PLATFORMS": "cpu"}
    for name, copies in (("same", ("a", "a")), ("other", ("b", "c"))):
        url = f"{bucket.url}/{name}"
        command = [sys.executable, "launch.py", f"--config={ROOT}/tests/tiny.py:gpt", f"--workdir={url}"]
        command += ["--config.total_steps=60", "--config.save_every_steps=3", "--config.evaluate_every_steps=60"]
        for number, copy in enumerate(copies):
            environment["LINEAGE_CACHE"] = str(tmp_path / copy)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
            while number == 0 and process.poll() is None:
                time.sleep(0.2)
                if any(key.startswith(name) and key.endswith(storage.RECORD) for key in bucket.get()):
                    process.kill()
            output = process.communicate()[0]
            assert process.returncode == (0 if number else -signal.SIGKILL), output
        assert "resuming from step" in output
        assert f"{name}/.lock" not in bucket.get()
        cache(f"read {name}")
        with remote.opened(url) as folder:
            saved = ocp.StandardCheckpointer().restore(folder / "checkpoints" / "60" / "state")
        states.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(saved)])
    assert states[0] == states[1]


@pytest.mark.thorough
def test_commands_read_and_write_remote_paths(bucket, cache, monkeypatch, tmp_path, capsys):
    """Evaluate, predict, score, export and report a run on the storage, each as on a new machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda devices=jax.devices: devices()[:1])
    train(f"{bucket.url}/run", **{"sampling.max_new_tokens": 4})
    bucket.put({"inputs.txt": b"import \ndef \n", "references.txt": b"one\ntwo\n"})

    def command(*arguments):
        cache(f"machine {arguments[0]}")
        assert launch.main(list(arguments)) == 0, capsys.readouterr().err
        return capsys.readouterr()

    run, output = f"{bucket.url}/run", f"{bucket.url}/out/texts.jsonl"
    assert "validation/loss" in command("evaluate", f"--workdir={run}").out
    said = command("predict", run, f"--inputs={bucket.url}/inputs.txt", f"--output={output}").err
    assert f"2 predictions: {output}" in said
    assert len(bucket.get()["out/texts.jsonl"].splitlines()) == 2
    about = json.loads(bucket.get()["out/texts.jsonl.about.json"])
    assert list(about["inputs"][3]) == [f"{bucket.url}/inputs.txt"]
    command("score", "--metric=bleu", f"--predictions={output}", f"--references={bucket.url}/references.txt")
    assert "bleu" in json.loads(bucket.get()["out/texts.jsonl.bleu.json"])["scores"]
    said = command("export", f"--workdir={run}").out
    assert "run/export/model.safetensors" in bucket.get()
    command("export", f"--workdir={run}", f"--output={bucket.url}/exported")
    assert {"exported/config.json", "exported/tokenizer.json"} <= bucket.get().keys()
    bucket.delete("run/report.html")
    command("report", run)
    assert b"<html" in bucket.get()["run/report.html"]
    changes = {"init.path": run, "model.dropout": 0.0}
    train(tmp_path / "local", **changes, total_steps=2)
    assert {path.name for path in tmp_path.iterdir()} >= {"local"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("s3")]
