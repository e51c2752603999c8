import shutil
import subprocess
from pathlib import Path

import pytest

from lineage.configs import cli
from lineage.train import loop


@pytest.fixture(scope="session")
def tiny():
    """tiny("gpt" or "vit", {key: value}) is a config of `tests/tiny.py`."""

    def make(model="gpt", changes=()):
        config, _ = cli.load(f"{Path(__file__).parents[1]}/tiny.py:{model}")
        cli.override(config, dict(changes))
        return config

    return make


@pytest.fixture
def no_report(monkeypatch):
    """Runs leave out what they draw at the end, which costs more than the rest of a tiny run."""
    monkeypatch.setattr(loop, "write_report", lambda workdir: None)
    monkeypatch.setattr(loop.artifacts, "write_all", lambda *args: None)


@pytest.fixture
def browse(tmp_path):
    """browse(html, script) is what a browser makes of the page after the script."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("there is no Chromium")

    def browse(html, script):
        page = tmp_path / "page.html"
        page.write_text(f"<!doctype html><meta charset=utf-8>{html}<script>{script}</script>", encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}", "--dump-dom"]
        return subprocess.run([chromium, *options, page.as_uri()], capture_output=True, text=True, check=True).stdout

    return browse
