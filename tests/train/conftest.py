from pathlib import Path

import pytest

from lineage import launch
from lineage.configs import cli
from lineage.models.budget import Budget
from lineage.train import loop, profiling

FREE = Budget({}, {"training": {"model": 0}}, {"training": {}}, {})
GPT, VIT = "--config=tests/tiny.py:gpt", "--config=tests/tiny.py:vit"


@pytest.fixture(scope="session")
def tiny():
    """Return `tiny(model, changes)`, which returns a config of `tests/tiny.py`."""

    def make(model="gpt", changes=()):
        config, _ = cli.load(f"{Path(__file__).parents[1]}/tiny.py:{model}")
        cli.override(config, dict(changes))
        return config

    return make


def throughput(experiment):
    """Return a `Throughput` without an estimate of the cost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling.throughput, "experiment_budget", lambda *args: FREE)
        return profiling.throughput.Throughput(experiment)


def without_report(patch):
    """Disable reports and cost estimates, which take longer than the rest of a tiny run."""
    patch.setattr(loop, "write_report", lambda workdir: None)
    patch.setattr(loop.artifacts, "write_all", lambda *args: None)
    patch.setattr(loop, "Throughput", throughput)


@pytest.fixture
def no_report(monkeypatch):
    without_report(monkeypatch)


class Killed(BaseException):
    """Exception that simulates the death of the process, and after which nothing is saved."""


@pytest.fixture
def interrupted(monkeypatch):
    """Return `interrupted(step, run)`, which calls `run` and kills its training before the batch of a step."""

    def call(step, run):
        whole = loop.device_batches

        def batches(experiment, start):
            for number, batch in enumerate(whole(experiment, start), start=start + 1):
                if number == step:
                    raise Killed
                yield batch

        with monkeypatch.context() as patch:
            patch.setattr(loop, "device_batches", batches)
            with pytest.raises(Killed):
                run()

    return call


@pytest.fixture
def error(capsys):
    """Return `error(*arguments, code=1)`, which runs a command that must fail and returns its error message."""

    def error(*arguments, code=1):
        assert launch.main([str(argument) for argument in arguments]) == code
        lines = capsys.readouterr().err.rsplit("\nerror: ", 1)[1].splitlines()
        assert lines[1:] == ["(use --traceback for the full traceback)"]  # one line, and a hint
        return lines[0]

    return error
