"""Runs that are trained for a few steps, and the commands that use them."""

import json

import jax
import pytest

from lineage import launch
from lineage.train import loop
from tests.train.conftest import no_report, tiny  # noqa: F401 (fixtures)


@pytest.fixture
def trained(tiny, tmp_path):  # noqa: F811
    """Return `trained(model, changes)`, which trains for a few steps and returns the folder and the metrics."""

    def train(model, changes, steps=2):
        durations = {"total_steps": steps, "evaluate_every_steps": steps, "save_every_steps": steps}
        folder = tmp_path / "run"
        return folder, loop.train(tiny(model, dict(changes) | durations), folder, devices=jax.devices()[:1])

    return train


@pytest.fixture
def call(capsys):
    """Return `call(*arguments)`, which runs a command and returns its exit code, output and messages."""

    def call(*arguments):
        code = launch.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def refused(call):
    """Return `refused(*arguments)`, which runs `predict` with arguments that it refuses, and returns its messages."""

    def refused(*arguments):
        code, _, messages = call("predict", *arguments)
        assert code == 1
        return messages

    return refused


@pytest.fixture
def printed(call):
    """Return `printed(folder, inputs, *options)`, which returns the predictions that the command prints as objects."""

    def printed(folder, inputs, *options):
        code, lines, messages = call("predict", folder, f"--inputs={inputs}", *options)
        assert code == 0, messages
        return [json.loads(line) for line in lines.splitlines()]

    return printed


@pytest.fixture
def predict(call, tmp_path):
    """Return `predict(folder, inputs, *options)`, which writes a file and returns its lines as objects."""

    def predict(folder, inputs, *options, output="out.jsonl"):
        code, _, messages = call("predict", folder, f"--inputs={inputs}", f"--output={tmp_path / output}", *options)
        assert code == 0, messages
        lines = (tmp_path / output).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    return predict


@pytest.fixture
def score(call, tmp_path):
    """Return `score(metric, predictions, references)`, which returns the scores of a file."""

    def score(metric, predictions, references):
        files = f"--predictions={tmp_path / predictions}", f"--references={references}"
        code, _, messages = call("score", f"--metric={metric}", *files, f"--output={tmp_path / 'scores.json'}")
        assert code == 0, messages
        return json.loads((tmp_path / "scores.json").read_text())["scores"]

    return score


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
