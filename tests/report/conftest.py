import base64
import hashlib
import json
import shutil
import subprocess

import pytest

from lineage.runs.live import Run

LOSSES = {1e-4: 0.4, 1e-3: 0.2, 1e-2: 0.3, 1e-1: 0.1}


@pytest.fixture
def runs(tmp_path):
    """Return four runs; the last one, which has the lowest loss, failed."""
    runs = []
    for number, (rate, loss) in enumerate(LOSSES.items()):
        folder = tmp_path / f"rate={rate}"
        (folder / "artifacts").mkdir(parents=True)
        (folder / "artifacts" / "run.json").write_text(json.dumps({"seconds": 60.0 * number}))
        config = {"schedule": {"learning_rate": rate}, "model": {"name": "vit"}, "seed": 0}
        lines = [{"step": step, "train/loss": loss + 1 / step} for step in (1, 2, 3)]
        lines[-1] |= {"validation/loss": loss, "test/loss": 1 - loss, "test/accuracy": 1 - loss, "time/mfu": 0.3}
        changes = {"model.name": "vit", "schedule.learning_rate": rate}
        runs.append(Run(f"rate={rate}", folder, changes, config, "done", lines))
    runs[-1].state = "failed (1)"
    return runs


@pytest.fixture
def browse(tmp_path):
    """Return `browse(html, script)`, which returns the DOM of a page in a browser after running the script.

    The page's Content-Security-Policy, which must be there, is extended by the hash of the script only. The options of
    `browse` are those of the browser.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("there is no Chromium")

    def browse(html, script, *options):
        page = tmp_path / "page.html"
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        before, after = html.split("script-src ")
        page.write_text(f"{before}script-src 'sha256-{digest}' {after}<script>{script}</script>", encoding="utf-8")
        fixed = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}", "--dump-dom"]
        command = [chromium, *fixed, *options, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return browse
