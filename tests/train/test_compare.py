"""The page of a sweep: what is best, that all runs are on it, and that a browser shows them together."""

import json
import re
import shutil
import subprocess

import pytest

from train.compare import differing, ranked, setting, target_of, write_page
from train.follow import Run

LOSSES = {1e-4: 0.4, 1e-3: 0.2, 1e-2: 0.3, 1e-1: 0.1}


@pytest.fixture
def runs(tmp_path):
    """Four runs, of which the last, with the lowest loss, failed."""
    runs = []
    for number, (rate, loss) in enumerate(LOSSES.items()):
        folder = tmp_path / f"rate={rate}"
        (folder / "artifacts").mkdir(parents=True)
        (folder / "artifacts" / "run.json").write_text(json.dumps({"seconds": 60.0 * number}))
        config = {"optimizer": {"learning_rate": rate}, "model": {"name": "vit"}, "seed": 0}
        lines = [{"step": step, "train/loss": loss + 1 / step} for step in (1, 2, 3)]
        lines[-1] |= {"validation/loss": loss, "test/loss": 1 - loss, "test/accuracy": 1 - loss, "time/mfu": 0.3}
        changes = {"model.name": "vit", "optimizer.learning_rate": rate}
        runs.append(Run(f"rate={rate}", folder, changes, config, "done", lines))
    runs[-1].state = "failed (1)"
    return runs


def names(runs):
    return [run.name for run in runs]


def test_the_best_first(runs):
    assert target_of(runs) == ("validation/loss", False)
    assert names(ranked(runs, target_of(runs))) == ["rate=0.001", "rate=0.01", "rate=0.0001", "rate=0.1"]
    assert names(ranked(runs, ("validation/loss", True)))[0] == "rate=0.0001"
    runs[0].config["checkpoint"] = {"best": "test/accuracy", "best_is_highest": True}
    assert target_of(runs) == ("test/accuracy", True)
    assert target_of([Run("a", runs[0].folder)]) == ("", False)


def test_what_differs(runs):
    assert differing(runs) == ["optimizer.learning_rate"]
    runs[0].changes = {}
    assert setting(runs[0], "optimizer.learning_rate") == 1e-4  # of the config
    assert setting(runs[0], "optimizer.absent") is None
    assert differing(runs) == ["optimizer.learning_rate"]


def test_every_run_is_on_the_page(runs, tmp_path):
    page = write_page(runs, ["python3", "launch.py", "--config=c.py"], tmp_path, target_of(runs)).read_text()
    assert re.findall(r"<tr class='run run\d'><td>([^<]+)<td>([^<]+)", page) == [
        ("rate=0.001", "done"),
        ("rate=0.01", "done"),
        ("rate=0.0001", "done"),
        ("rate=0.1", "failed (1)"),
    ]
    for run in runs:
        rate = run.changes["optimizer.learning_rate"]
        options = f"--config.model.name=vit --config.optimizer.learning_rate={rate} --workdir={run.folder}"
        assert f"python launch.py --config=c.py {options}<" in page
        charts = page.count(f"<title>{run.name}</title>")
        assert charts == 4 + (run.state == "done")  # train/loss and three metrics; the overview has what is done
    assert "3 done" in page
    assert "The best by validation/loss is rate=0.001" in page
    assert not re.search(r"(?:src|href)=.?https?:", page)
    assert (tmp_path / "sweep" / "parallel.png").stat().st_size > 1000


def test_a_sweep_of_which_nothing_is_known(tmp_path):
    runs = [Run(name, tmp_path / name, {"seed": name}) for name in "ab"]
    page = write_page(runs, ["python", "launch.py"], tmp_path, target_of(runs)).read_text()
    assert "2 waiting" in page
    assert "<svg" not in page


def test_a_browser_marks_a_run_and_sorts(runs, tmp_path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("there is no Chromium")
    page = write_page(runs, ["python", "launch.py"], tmp_path, target_of(runs))
    script = """<script>
    document.querySelectorAll("tr.run")[1].dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
    document.querySelectorAll(".runs th")[2].click();
    </script></body>"""
    page.write_text(page.read_text().replace("</body>", script))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}", "--dump-dom"]
    shown = subprocess.run([chromium, *options, page.as_uri()], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(r'<g class="run run1 on">', shown)) == 5
    assert len(re.findall(r'<tr class="run run1 on">', shown)) == 1
    assert '<main class="chosen">' in shown
    assert re.findall(r'<tr class="run run\d[^>]*><td>rate=([^<]+)', shown) == ["0.0001", "0.001", "0.01", "0.1"]
