from pathlib import Path

import pytest

from lineage.configs import cli
from lineage.train import loop


@pytest.fixture(scope="session")
def tiny():
    """Return `tiny(model, changes)`, which returns a config of `tests/tiny.py`."""

    def make(model="gpt", changes=()):
        config, _ = cli.load(f"{Path(__file__).parents[1]}/tiny.py:{model}")
        cli.override(config, dict(changes))
        return config

    return make


@pytest.fixture
def no_report(monkeypatch):
    """Disable reports, which take longer than the rest of a tiny run."""
    monkeypatch.setattr(loop, "write_report", lambda workdir: None)
    monkeypatch.setattr(loop.artifacts, "write_all", lambda *args: None)
