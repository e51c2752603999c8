"""The commands of the command line, on small runs."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from lineage import launch
from lineage.configs import cli
from lineage.data import TOKENIZERS, fingerprint, tokens
from lineage.runs.folder import read_json, read_metrics
from lineage.train.experiment import Experiment
from lineage.train.preparation import prepare_folder


@pytest.fixture
def say(capsys):
    """Return `say(*arguments)`, which runs a command that must succeed and returns its output."""

    def say(*arguments):
        code = launch.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return say


def test_default_workdirs_are_distinct():
    assert launch.default_workdir("configs/small/vit_digits.py") == "outputs/vit_digits"
    assert launch.default_workdir("configs/paper/bert_pretrain.py:base") == "outputs/bert_pretrain_base"
    for path in ("/data/images", "../../data"):  # not outputs/data, and not shared by two models
        workdir = launch.default_workdir(f"configs/small/fashion_mnist.py:vit,{path}")
        assert workdir == f"outputs/fashion_mnist_vit,{path.replace('/', '_')}"


@pytest.mark.parametrize(
    ("arguments", "workdir"),
    [
        (["train"], "outputs/vit_digits"),
        (["sweep"], "outputs/vit_digits_sweep"),
        (["sweep", "--workdir=a"], "a"),
        (["slurm", "submit"], "outputs/vit_digits"),
        (["slurm", "submit", "--sweep"], "outputs/vit_digits_sweep"),
    ],
)
def test_a_sweep_and_a_run_have_different_default_workdirs(arguments, workdir):
    assert launch.parsed(arguments)[1] == workdir


def test_finished_run_has_all_files(finished):
    left = {str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file()}
    assert {"config.json", "metrics.jsonl", "tokenizer.json", "report.html", "parameters.txt"} <= left
    assert {f"artifacts/{name}" for name in ("run.json", "cost.json", "samples.jsonl", "attention_text.npz")} <= left
    assert any(name.startswith("events.out.tfevents") for name in left)
    assert not any(name.endswith(".partial") for name in left)
    about = json.loads((finished / "artifacts/run.json").read_text())
    assert about["steps"] == 40
    assert about["command"].startswith("python launch.py --config=")
    assert about["packages"]["jax"] == jax.__version__
    assert about.get("git", {}).keys() in (set(), {"commit", "dirty"})
    start = read_json(finished / "run.json")
    assert about.items() >= start.items()
    assert start["command"] == about["command"]
    steps = [line["step"] for line in read_metrics(finished) if "train/loss" in line]
    assert steps == [*range(1, 41)]


def test_evaluate_reproduces_the_last_evaluation_of_training(finished, say):
    last = read_metrics(finished)[-1]
    expected = {key: value for key, value in last.items() if key.startswith("validation/")}
    assert len(expected) == 5
    assert json.loads(say("evaluate", f"--workdir={finished}")) == pytest.approx(expected, rel=1e-5)


@pytest.mark.thorough
def test_generate_continues_the_prompt(finished, say):
    texts = say("generate", f"--workdir={finished}", "--prompt=def f", "--config.sampling.temperature=0")
    assert texts.startswith("--- sample 1 of 2 ---\ndef f")
    assert texts.count("def f") == 2  # num_samples texts
    sample = json.loads((finished / "artifacts/samples.jsonl").read_text().splitlines()[-1])
    assert sample["prompt"] == "\n"
    assert sample["step"] == 40
    assert say("generate", f"--workdir={finished}").rstrip("\n").endswith(sample["text"].rstrip("\n"))


@pytest.mark.slow
def test_generate_with_draft_and_contrast_models(finished, say):
    """Check that all tokens of a draft that is the model itself are accepted, and that a contrast model can be used."""
    arguments = "generate", f"--workdir={finished}", "--config.sampling.temperature=0"
    drafted = say(*arguments, f"--config.sampling.draft={finished}")
    assert drafted == say(*arguments) + "100% of the draft's tokens were accepted\n"
    several = "--config.sampling.best_of=3", "--config.sampling.temperature=1"
    assert say(*arguments, *several, f"--config.sampling.contrast={finished}")


@pytest.mark.thorough
def test_describe_and_config_read_the_config_of_a_run(finished, say):
    assert "model.name = 'gpt'" in say("config", f"--workdir={finished}")
    assert say("describe", f"--workdir={finished}") == say("describe", f"--config={finished}/config.json")


@pytest.mark.parametrize("command", ["describe", "config"])
def test_folder_without_a_config_is_not_described(command, tmp_path, capsys):
    """Check that the default experiment is not described instead."""
    assert launch.main([command, f"--workdir={tmp_path}"]) == 1
    assert f"there is no config '{tmp_path}/config.json'" in capsys.readouterr().err


def test_metrics_that_are_not_finite_are_printed_as_null(say, monkeypatch):
    found = {"test/ap": float("nan"), "test/perplexity": float("inf"), "test/loss": 1.5}
    monkeypatch.setattr(launch, "restored", lambda options: SimpleNamespace(evaluate=lambda: found))
    assert re.sub(r"\s", "", say("evaluate", "run")) == '{"test/ap":null,"test/perplexity":null,"test/loss":1.5}'


def test_describe_needs_no_training(say):
    table = say("describe", "--config=tests/tiny.py:vit")
    total = 4 * 4 * 16 + 16 + 4 * 16 + 2 * (4 * (16 * 16 + 16) + 2 * 16 * 64 + 64 + 16 + 4 * 16) + 2 * 16 + 16 * 10 + 10
    assert f"{total:,}" in table


def test_report_is_rewritten(finished, say):
    (finished / "report.html").unlink()
    assert say("report", f"--workdir={finished}").strip() == str(finished / "report.html")
    assert (finished / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["sweep.run_sweep", "search.run_search"])
def test_sweep_passes_its_options_to_runs(name, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(f"lineage.runs.{name}", lambda command, *_: told.extend(command) or 0)
    kind = ["--optuna"] * ("search" in name)
    options = ["--config=tests/tiny.py:gpt", "--config.loader.batch_size=4", "--force-config"]
    assert launch.main(["sweep", *options, *kind, f"--workdir={tmp_path}"]) == 0
    assert told == [sys.executable, "-m", "lineage.launch", "train", *options]


def test_number_of_trials_is_an_option(tmp_path, monkeypatch, capsys):
    chosen = []
    monkeypatch.setattr("lineage.runs.search.run_search", lambda command, search, *_: chosen.append(search) or 0)
    arguments = ["sweep", "--config=tests/tiny.py:gpt", f"--workdir={tmp_path}"]
    assert launch.main([*arguments, "--optuna"]) == 0
    assert launch.main([*arguments, "--optuna", "--trials=7"]) == 0
    assert [search.trials for search in chosen] == [2, 7]
    assert launch.main([*arguments, "--optuna", "--trials=0"]) == 1
    assert "the Search has 0 trials: it must have 1 or more." in capsys.readouterr().err
    assert launch.main([*arguments, "--trials=7"]) == 1
    assert "--trials is 7: it requires --optuna." in capsys.readouterr().err


@pytest.mark.thorough
def test_search_with_a_mistyped_metric_stops_at_the_first_run(launch, tmp_path):
    (tmp_path / "config.py").write_text(
        "from tests.tiny import get_config\nfrom lineage.configs.sweeps import *\n\ndef search():\n"
        "    return Search({'seed': Integers(0, 9)}, metric='validation/lose', highest=False)\n"
    )
    code, output = launch("sweep", f"--config={tmp_path / 'config.py'}", "--optuna", f"--workdir={tmp_path / 'runs'}")
    assert code == 1
    assert "checkpoint.best is 'validation/lose': did you mean 'validation/loss'?" in output
    assert [path.name for path in (tmp_path / "runs").glob("trial_*")] == ["trial_000"]


@pytest.mark.slow
def test_sweep(launch, tmp_path):
    arguments = ["sweep", "--config=tests/tiny.py:vit", "--parallel=2", f"--workdir={tmp_path}"]
    arguments.append("--config.total_steps=3")
    code, output = launch(*arguments)
    assert code == 1, output
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["seed=1", "seed=2", "seed=3"]
    assert [row["state"] for row in rows] == ["done", "failed (1)", "done"]
    for row in rows[::2]:
        last = read_metrics(tmp_path / row["run"])[-1]
        assert float(row["test/accuracy"]) == pytest.approx(last["test/accuracy"], rel=1e-4)
        assert json.loads((tmp_path / row["run"] / "config.json").read_text())["total_steps"] == 3
    assert re.search(r"^done +1 .*\nfailed \(1\) +2 +3\ndone +3 ", output, re.MULTILINE), output
    assert output.count("error: ") == 1
    page = (tmp_path / "sweep.html").read_text()
    for row in rows:
        assert (
            f"python launch.py train --config=tests/tiny.py:vit --config.total_steps=3 --config.seed={row['run'][-1]} "
            in page
        )
    code, output = launch(*arguments)
    assert code == 1
    assert "2 of 3 runs are done already" in output
    code, output = launch("watch", f"--workdir={tmp_path}")
    assert code == 0
    assert re.search(r"^seed=1  done  step 3/3  loss [\d.]+\nseed=2  failed\nseed=3  done", output, re.MULTILINE), (
        output
    )


@pytest.mark.slow
def test_search(launch, tmp_path):
    arguments = ["sweep", "--config=tests/tiny.py:vit", "--optuna", "--parallel=2", f"--workdir={tmp_path}"]
    code, output = launch(*arguments, "--config.total_steps=3")
    assert code == 0, output
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["state"]) for row in rows] == [("trial_000", "done"), ("trial_001", "done")]
    for row in rows:
        config = json.loads((tmp_path / row["run"] / "config.json").read_text())
        assert 1e-4 <= config["schedule"]["learning_rate"] <= 1e-2
        assert str(config["schedule"]["learning_rate"]) == row["schedule.learning_rate"]
    assert rows[0]["schedule.learning_rate"] != rows[1]["schedule.learning_rate"]


def test_prepare_encodes_what_runs_read(say, capsys, tmp_path, monkeypatch):
    tiny = f"--config={Path(__file__).parents[1] / 'tiny.py'}:gpt"
    changes = {"tokenizer": "bpe", "tokenizer.vocab_size": "300", "task.cache_dir": str(tmp_path)}
    options = [tiny, *(f"--config.{key}={value}" for key, value in changes.items())]
    monkeypatch.setattr(fingerprint, "LARGE", 1)
    monkeypatch.setattr(fingerprint, "SETTLED", 0)
    assert re.search(rf"{tmp_path} has \d+ examples of train, \d+ examples of validation", say("prepare", *options))
    files = fingerprint.fingerprint(Experiment(cli.load(tiny.removeprefix("--config="))[0]).source.files())
    monkeypatch.setattr(fingerprint, "crc", None)  # the start of a run reads no source
    monkeypatch.setattr(tokens._Encode, "__call__", None)
    monkeypatch.setattr(TOKENIZERS["bpe"], "train", None)
    config, _ = cli.load(tiny.removeprefix("--config="))
    cli.override(config, changes)
    made, kept = (tmp_path / "run/artifacts" / name for name in ("run.json", "notes.txt"))
    made.parent.mkdir(parents=True)
    made.write_text('{"seconds": 9.0}')  # of an earlier run, whose checkpoints were deleted
    kept.touch()
    experiment = Experiment(config, tmp_path / "run")
    prepare_folder(experiment, {}, force_config=False)
    assert (made.exists(), kept.exists()) == (False, True)
    assert experiment.data.facts.vocab_size == 300
    assert json.loads((tmp_path / "run" / "data.json").read_text()).items() >= files.items()
    for name in (tiny, "--config=vit_digits"):
        assert launch.main(["prepare", name]) == 1
        assert "task.cache_dir is '': it must be a folder, for a task on documents" in capsys.readouterr().err


def test_interrupt_while_jax_compiles_ends_a_command_with_its_exit_code():
    code = """
import multiprocessing, os, signal, sys, threading
import jax, jax.numpy as jnp
from lineage import launch

def compile_slowly(options):
    for number in range(1500):
        options = jnp.sort(jnp.sin(options * number))
    return options

def run_list(options):
    lowered = jax.jit(compile_slowly).lower(jnp.ones(9))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    lowered.compile()
    signal.pause()

left = multiprocessing.get_context("spawn").Lock()  # Python must not report its semaphore as leaked
launch.run_list, sys.argv = run_list, ["lineage", "list"]
sys.exit(launch.main())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 130
    assert run.stderr.endswith("\ninterrupted\n"), run.stderr
