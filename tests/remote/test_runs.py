"""Runs in folders on remote storage, against a local stand-in of S3."""

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
from lineage.runs.folder import MEASURED
from lineage.tasks import TASKS
from lineage.train import loop
from lineage.train.experiment import Experiment
from tests.remote.conftest import Killed, write
from tests.train.conftest import no_report  # noqa: F401 (a fixture)

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


def final(workdir):
    """Return the bytes of the final state, and the history without times."""
    saved = ocp.StandardCheckpointer().restore(workdir / "checkpoints" / str(TOTAL) / "state")
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    history = [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(saved)], history


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
    assert f"s3://bucket/runs is remote: {command} needs a local folder." in capsys.readouterr().err


def test_paths_that_cannot_be_remote_are_refused(capsys):
    with pytest.raises(ValueError, match=r"task.cache_dir is 's3://bucket/tokens': it must be a local folder"):
        TASKS["causal_lm"](cache_dir="s3://bucket/tokens")
    assert launch.main(["train", "--workdir=hf:org/run"]) == 1
    assert "hf:org/run is on the Hugging Face Hub, which is read-only" in capsys.readouterr().err


@pytest.mark.slow
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
    message = f"$LINEAGE_CACHE must be shared: the copy of {bucket.url}/no of process 1 differs from that of process 0."
    assert all(message in output for output in refused), refused
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


@pytest.mark.slow
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
                if any(key.startswith(name) and key.endswith(storage.RECORD) for key in bucket.names()):
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


@pytest.mark.slow
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
    messages = command("predict", run, f"--inputs={bucket.url}/inputs.txt", f"--output={output}").err
    assert f"2 predictions: {output}" in messages
    assert len(bucket.get()["out/texts.jsonl"].splitlines()) == 2
    about = json.loads(bucket.get()["out/texts.jsonl.about.json"])
    assert list(about["inputs"][3]) == [f"{bucket.url}/inputs.txt"]
    command("score", "--metric=bleu", f"--predictions={output}", f"--references={bucket.url}/references.txt")
    assert "bleu" in json.loads(bucket.get()["out/texts.jsonl.bleu.json"])["scores"]
    messages = command("export", f"--workdir={run}").out
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
