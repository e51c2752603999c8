"""Reports of sweeps: order of the runs, complete tables and figures, and interaction in a browser."""

import json
import re
from functools import partial
from itertools import product

from lineage import launch
from lineage.report import comparison, figures
from lineage.report.comparison import compare, differing, ranked, target_of, write_page
from lineage.runs.live import Run


def names(runs):
    return [run.name for run in runs]


def test_runs_are_sorted_by_metric(runs):
    assert target_of(runs) == ("validation/loss", False)
    assert names(ranked(runs, target_of(runs))) == ["rate=0.001", "rate=0.01", "rate=0.0001", "rate=0.1"]
    assert names(ranked(runs, ("validation/loss", True)))[0] == "rate=0.0001"
    runs[0].config["checkpoint"] = {"best": "test/accuracy", "best_is_highest": True}
    assert target_of(runs) == ("test/accuracy", True)
    assert target_of([Run("a", runs[0].folder)]) == ("", False)


def test_differing_config_keys(runs):
    assert differing(runs) == ["schedule.learning_rate"]
    runs[0].changes = {}
    assert runs[0].settings.get("schedule.learning_rate") == 1e-4  # of the config
    assert runs[0].settings.get("optimizer.absent") is None
    assert differing(runs) == ["schedule.learning_rate"]


def test_figure_does_not_average_over_other_keys_than_the_seed(tmp_path, monkeypatch):
    drawn, runs = [], []
    monkeypatch.setattr(figures, "save", lambda *args, **names: drawn.append(args[1:]))
    for number, (place, norm, act, seed) in enumerate(product((1, 2), ("pre", "post"), ("relu", "gelu"), (0, 1))):
        changes = {"depth": place, "norm": norm, "act": act, "twice": 2 * place, "seed": seed}
        runs.append(Run(str(number), tmp_path, changes, {}, "done", [{"step": 1, "test/loss": number}]))
    comparison.plot(runs, tmp_path)
    ((panels, label),) = drawn
    actual = {name: (places, values.tolist()) for name, (places, values) in panels["test/loss"].items()}
    assert label == "depth"
    assert actual == {
        "norm=pre, act=relu": (["1", "2"], [[0, 1], [8, 9]]),
        "norm=pre, act=gelu": (["1", "2"], [[2, 3], [10, 11]]),
        "norm=post, act=relu": (["1", "2"], [[4, 5], [12, 13]]),
        "norm=post, act=gelu": (["1", "2"], [[6, 7], [14, 15]]),
    }


def test_figure_of_an_earlier_sweep_is_deleted(runs, tmp_path):
    (tmp_path / "sweep.png").touch()
    comparison.plot(runs[:1], tmp_path)  # no key differs
    assert not (tmp_path / "sweep.png").exists()


def test_report_contains_every_run(runs, tmp_path):
    commands = {run: f"python launch.py {run.name} >" for run in runs}
    page = write_page(tmp_path / "sweep.html", runs, commands, target_of(runs)).read_text()
    assert re.findall(r"<tr class='run run\d'><th scope=row><i[^>]*></i>([^<]+)<td>([^<]+)", page) == [
        ("rate=0.001", "done"),
        ("rate=0.01", "done"),
        ("rate=0.0001", "done"),
        ("rate=0.1", "failed (1)"),
    ]
    for run in runs:
        assert f"<pre class=command>python launch.py {run.name} &gt;<" in page
        charts = page.count(f"<title>{run.name}</title>")
        assert charts == 4 + (run.state == "done")  # train/loss and three metrics; the overview has the finished runs
    assert "3 done" in page
    assert "The best run by the last validation/loss is rate=0.001" in page
    assert not re.search(r"(?:src|href)=.?https?:", page)
    assert (tmp_path / "sweep" / "parallel.png").stat().st_size > 1000


def test_page_states_that_the_test_split_selects_the_best_run(runs, tmp_path):
    write = partial(write_page, tmp_path / "sweep.html", runs, dict.fromkeys(runs, ""))
    assert "The test split selects" not in write(target_of(runs)).read_text()
    for run in runs:
        run.metrics = [{k: v for k, v in line.items() if not k.startswith("validation/")} for line in run.metrics]
    (metric, highest), found = target_of(runs), [run for run in runs if run.state == "done"]
    assert metric.startswith("test/")
    last = {run.name: [line[metric] for line in run.metrics if metric in line][-1] for run in found}
    best = (max if highest else min)(last, key=last.get)
    page = write(target_of(runs)).read_text()
    assert f"The best run by the last {metric} is {best}. The test split selects it" in page


def test_changed_data_between_runs_are_reported(runs, tmp_path, capsys):
    def write():
        return write_page(tmp_path / "sweep.html", runs, dict.fromkeys(runs, ""), target_of(runs)).read_text()

    for run, checksum, other in zip(runs, (1, 1, 2), ("same", "same", "other")):
        files = {"/data/a.txt": [5, checksum], "/data/b.txt": [5, 0], "tokenizer.json": run.name}
        (run.folder / "data.json").write_text(json.dumps(files | {other: [5, 0]}))
    assert "changed between" not in write()  # the third run reads other files
    (runs[2].folder / "data.json").write_text(json.dumps(files | {"same": [5, 0]}))
    text = "The runs have different data: /data/a.txt changed between their starts."
    assert f"<p class=alert>{text}</p>" in write()
    assert capsys.readouterr().err == f"note: {text}\n"
    (runs[2].folder / "data.json").write_text("{")
    assert "changed between" not in write()


def test_sweep_without_results(tmp_path):
    runs = [Run(name, tmp_path / name, {"seed": name}) for name in "ab"]
    page = write_page(tmp_path / "sweep.html", runs, dict.fromkeys(runs, ""), target_of(runs)).read_text()
    assert "2 waiting" in page
    assert "<svg" not in page


def test_browser_highlights_a_run_and_sorts(runs, browse, tmp_path):
    page = write_page(tmp_path / "sweep.html", runs, dict.fromkeys(runs, ""), target_of(runs))
    point = 'document.querySelectorAll("tr.run")[1].dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));'
    shown = browse(page.read_text(), point + 'document.querySelectorAll(".runs button")[2].click();')
    assert len(re.findall(r'<g class="run run1 on">', shown)) == 5
    assert len(re.findall(r'<tr class="run run1 on">', shown)) == 1
    assert '<main class="chosen">' in shown
    names = re.findall(r'<tr class="run run\d[^>]*><th scope="row"><i[^>]*></i>rate=([^<]+)', shown)
    assert names == ["0.0001", "0.001", "0.01", "0.1"]


def test_compare_arbitrary_runs(runs, tmp_path, capsys):
    for run in runs[:3]:
        (run.folder / "config.json").write_text(json.dumps(run.config))
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run.metrics))
        facts = {"config": run.config, "command": f"python launch.py --workdir={run.name}", "seconds": 1.0}
        (run.folder / "artifacts" / "run.json").write_text(json.dumps(facts))
    first, *rest = (str(run.folder) for run in runs[:3])
    assert launch.main(["report", f"--workdir={first}", *rest]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "compare.html")
    page = (tmp_path / "compare.html").read_text()
    assert re.findall(r"<tr class='run run\d'><th scope=row><i[^>]*></i>rate=([^<]+)<td>done<td>([^<]+)", page) == [
        ("0.001", "0.001"),
        ("0.01", "0.01"),
        ("0.0001", "0.0001"),
    ]
    assert "<th scope=col>schedule.learning_rate" in page
    assert "model.name" not in page  # equal in all runs
    assert "python launch.py --workdir=rate=0.01<" in page
    # All runs of a sweep folder; many differing keys are shown in a separate table.
    for run in runs[:3]:
        config = run.config | {"data": {f"key{n}": f"{n}{run.name}" for n in range(13)}}
        (run.folder / "config.json").write_text(json.dumps(config))
    assert launch.main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "compare.html").read_text()
    assert page.count("<tr class='run") == 3
    assert "<tr class=''><th scope=row>data.key12<td>12rate=" in page
    assert "3 stopped" in page  # the metadata belong to another config
    assert launch.main(["report", str(tmp_path / "none"), first]) == 1
    assert "there is no run in" in capsys.readouterr().err
    (runs[0].folder / "config.json").write_text("{")
    assert launch.main(["report", str(tmp_path), first]) == 1
    assert f"{runs[0].folder / 'config.json'} is damaged" in capsys.readouterr().err


def test_runs_in_different_folders_are_compared_in_the_current_folder(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.path.commonpath", lambda paths: "/")
    for run in runs[:2]:
        (run.folder / "config.json").write_text(json.dumps(run.config))
    assert compare([run.folder for run in runs[:2]]) == tmp_path / "compare.html"
    assert "<th scope=row><i" in (tmp_path / "compare.html").read_text()
