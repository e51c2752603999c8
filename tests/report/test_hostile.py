"""Pages of runs whose every text is hostile: nothing of it becomes an element, an attribute or a script."""

import base64
import csv
import hashlib
import io
import json
import os
import re
import signal
import sys
import time
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pytest
from markupsafe import Markup

from lineage import launch
from lineage.configs.atomic import write_atomic
from lineage.report import comparison, curves, html
from lineage.report.comparison import compare
from lineage.report.run import write_report
from lineage.runs.live import Run
from lineage.runs.metrics import GrowingMetrics
from lineage.runs.process import print_error
from lineage.train import loop

HOSTILE = "\"'><img src=x onerror=alert(1)><script>document.title='taken'</script></style></pre>{0}%s&lt;"


class Elements(HTMLParser):
    """Parser that collects the elements with the names of their attributes, all texts, and scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.attributes, self.texts, self.code = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, *(name for name, _ in attributes)))
        self.attributes += [value or "" for _, value in attributes]
        if tag in ("script", "style"):
            self.code.append(tag)

    def handle_data(self, data):
        if self.lasttag in ("script", "style") and self.code[-1] == self.lasttag:
            self.code[-1] = data
        self.texts.append(data)


def write_run(folder, text):
    """Write a run whose names, keys, values, classes, texts and metrics are `text`; return its folder."""
    files, rng = folder / "artifacts", np.random.default_rng(0)
    split = text.replace("/", "")[:90]  # of a file's name
    files.mkdir(parents=True)
    config = {text: text, "model": {text: [text], "name": text}, "seed": folder.name}
    lines = [
        {"step": step, f"train/{text}": 1.0, f"{text}/loss": 0.5, f"validation/{text}": 1 / step} for step in (1, 2)
    ]
    facts = {"config_name": text, "command": text, text: text, "device": text, "device_count": 2, "seconds": 1.0}
    facts |= {"git": {"commit": text, "dirty": True}, "config": config}
    cost = {text: {text: 1, f"{text} total": 2, "kind": text}, "parameters": {"total": 3}}
    written = {"rows": [[text] * 3], "bleu": 1.0, "signature": text, "by_length": [[1, 9, 5, 1.0]]}
    for name, content in {"run": facts, "cost": cost, f"written_{split}": written}.items():
        (files / f"{name}.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (files / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": text, "text": text + text}) + "\n")
    names, image = np.array([text, f"{text} 2"]), rng.random((2, 4, 4, 3))
    attention = rng.random((1, 1, 2, 2))
    arrays = {
        "confusion_test": {"counts": np.array([[3, 1], [1, 3]]), "class_names": names},
        "mistakes_test": {
            "image": image,
            "label": np.array([0, 1]),
            "prediction": np.array([1, 0]),
            "probability": np.array([0.9, 0.8]),
            "class_names": names,
        },
        "objects_test": {
            "image": image,
            "truth": np.array([[0, 0, 1, 0, 0, 1, 1.0]]),
            "found": np.array([[1, 1, 1, 0, 0, 1, 1.0]]),
            "class_names": names,
        },
        "attention_text": {"tokens": names, "inputs": names, "decoder": attention, "cross": attention},
    }
    arrays[f"mistakes_{split}"] = arrays["mistakes_test"]
    for name, content in arrays.items():
        np.savez(files / f"{name}.npz", **content)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_hostile_texts_are_only_text(tmp_path, kind, browse):
    pages = {}
    harmless = re.sub(r"[^\w\s/.]", "x", HOSTILE)  # as long as the other, so that its lines break at the same places
    for name, text in {"harmless": harmless, "hostile": HOSTILE}.items():
        root = tmp_path / name
        runs = [write_run(root / f"{text.replace('/', '')[:60]}{n}", text) for n in range(2)]
        pages[name] = (write_report(runs[0]) if kind == "report" else compare([root])).read_text()
    harmless, hostile = Elements(pages["harmless"]), Elements(pages["hostile"])
    assert hostile.elements == harmless.elements
    assert len(hostile.elements) > 100
    shown = "\n".join([*hostile.texts, *hostile.attributes])
    assert shown.count("<script>document") > 20  # the texts are shown, as they are
    assert "alert(1)" in shown
    assert "taken" not in re.findall(r"<title>(.*?)</title>", browse(pages["hostile"], "/* nothing */"))


@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_policy_allows_the_script_and_the_style_of_the_page_only(tmp_path, kind):
    run = write_run(tmp_path / "a", "text")
    path = write_report(run) if kind == "report" else compare([run])
    page = Elements(path.read_text())
    policy = next(value for value in page.attributes if value.startswith("default-src 'none'"))
    assert re.search(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>\s*<title>", path.read_text())
    digests = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in page.code]
    assert [element[0] for element in page.elements if element[0] in ("style", "script")] == ["style", "script"]
    assert f"style-src-elem 'sha256-{digests[0]}'" in policy
    assert f"script-src 'sha256-{digests[1]}'" in policy
    assert not [name for element in page.elements for name in element[1:] if name.startswith("on")]


def test_control_characters_are_replaced(tmp_path):
    """Check NUL, which browsers would omit, an escape, a noncharacter, and one that changes the direction of a text."""
    page = html.write(tmp_path / "a.html", "b\0c\x1bd\u202ee\tf", [Markup("<p>{}</p>").format("g\x85h\ni\ufffe")])
    page = page.read_text()
    assert "<title>b\ufffdc\ufffdd\ufffde\tf</title>" in page
    assert "<p>g\ufffdh\ni\ufffd</p>" in page
    assert not re.search(r"[\0-\x08\x0b\x0e-\x1f\x7f-\x9f\u202e]", page)


def test_browser_refuses_other_scripts(tmp_path, browse):
    body = write_report(write_run(tmp_path / "a", "text")).read_text()
    attack = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    assert "<title>text</title>" in browse(body.replace("<main>", f"<main>{attack}"), "/* nothing */")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", {"git": 1}),
        ("run.json", {"seconds": "long"}),
        ("run.json", {"device": "cpu", "device_count": [1], "git": {"commit": 5}}),
        ("cost.json", {"memory": {"first": 10**400}}),
        ("cost.json", json.loads('{"a":' * 200 + "1" + "}" * 200)),
        ("written_test.json", {"rows": 5, "bleu": 1.0, "signature": "", "by_length": []}),
        ("written_test.json", {"bleu": None}),
        ("samples.jsonl", {"step": 1, "text": 5}),
        ("confusion_test.npz", {"counts": np.zeros(3), "class_names": np.array(["a"])}),
        ("confusion_test.npz", {"counts": np.eye(2, dtype=int), "class_names": np.array(["a", "\ud800"])}),
        ("mistakes_test.npz", {"image": np.zeros((1, 2, 2, 3)), "label": np.array([7])}),
        ("painted_x.npz", {"image": np.zeros((1, 2, 2, 3))}),
        (
            "objects_test.npz",  # matplotlib raises a RuntimeError
            {
                "image": np.zeros((1, 16, 16, 3)),
                "truth": np.zeros((0, 7)),
                "found": np.array([[0, 0, 0.5, 1e9, 1e9, 1e9, 1e9]]),
                "class_names": np.array(["a"]),
            },
        ),
        ("attention_text.npz", {"tokens": np.array(["a"]), "attention": np.zeros(3)}),
        ("attention_text.npz", {"tokens": np.array(["a"]), "attention": np.full((1, 1, 1, 1), np.nan)}),
        ("attention_text.npz", {"tokens": np.array(["a"]), "attention": np.full((1, 1, 1, 1), 2.0)}),
        ("attention_text.npz", {"tokens": np.array(["a"]), "attention": np.zeros((1, 1, 2, 2))}),
        ("attention_image.npz", {"weights": np.zeros(3)}),
        ("../metrics.jsonl", {"step": 1, "train/loss": "low"}),
    ],
)
def test_odd_artifacts_are_named(tmp_path, name, content):
    write_run(tmp_path, "text")
    path = tmp_path / "artifacts" / name
    if path.suffix == ".npz":
        np.savez(path, **content)
    else:
        path.write_text(json.dumps(content) + "\n")
    with pytest.raises(ValueError, match=f"{path.name} cannot be shown.*: move it away to write") as raised:
        write_report(tmp_path)
    assert len(str(raised.value)) < 400
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", {"checkpoint": {"best": 5, "best_is_highest": None}}),
        ("metrics.jsonl", {"step": 1, "train/loss": [1]}),
        ("metrics.jsonl", {"step": 10**30, "train/loss": 1}),
        ("metrics.jsonl", {"step": 1, "test/loss": "low"}),
        ("artifacts/run.json", {"seconds": "long"}),
    ],
)
def test_odd_runs_of_a_comparison_are_named(tmp_path, name, content):
    for run in "ab":
        write_run(tmp_path / run, "text")
    (tmp_path / "b" / name).write_text(json.dumps(content) + "\n")
    with pytest.raises(ValueError, match=f"{tmp_path}/b cannot be shown"):
        compare([tmp_path])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", {"step": 1, "test/loss": [1]}),
        ("metrics.jsonl", {"step": 10**30, "test/loss": 1}),
        ("artifacts/run.json", {"seconds": None}),
        ("artifacts/run.json", {}),
    ],
)
def test_odd_runs_of_a_sweep_are_named(tmp_path, name, content):
    folder = write_small(tmp_path / "a")
    (folder / name).write_text(json.dumps(content) + "\n")
    (run := Run("a", folder, state="done")).look()
    with pytest.raises(ValueError, match=f"{tmp_path}/a cannot be shown"):
        comparison.finish([run], ["train"], tmp_path)


def test_pipe_for_an_artifact_is_named(tmp_path):
    run = write_run(tmp_path / "run", "text")
    os.mkfifo(run / "artifacts" / "attention_text_2.npz")
    with pytest.raises(ValueError, match=r"attention_text_2.npz is not a regular file"):
        write_report(run)


def test_pictures_behind_a_link_are_kept(tmp_path):
    run = write_run(tmp_path / "run", "text")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.png").touch()
    (run / "report").symlink_to(tmp_path / "photos")
    with pytest.raises(ValueError, match=f"{run}/report is a link"):
        write_report(run)
    assert (tmp_path / "photos/a.png").exists()


def test_half_of_a_surrogate_pair_is_shown(tmp_path):
    run = write_run(tmp_path, "text")
    (run / "artifacts/samples.jsonl").write_text(json.dumps({"step": 1, "text": "ab\ud800cd"}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "train/\ud800f": 1.0, "test/\ud800f": 2.0}) + "\n")
    assert "ab?cd" in (page := write_report(run).read_text())
    assert ">?f</text>" in page
    assert ">Test ?f</text>" in compare([run]).read_text()


def test_names_do_not_change_the_direction_of_numbers(tmp_path):
    run = write_run(tmp_path, "a\u202eb\u2066c")
    for page in (write_report(run), compare([run])):
        assert "a\ufffdb\ufffdc" in (text := page.read_text())
        assert not set(text) & {*"\u202e\u2066"}


def write_small(folder):
    """Write a run with one line of metrics; return its folder."""
    (folder / "artifacts").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1, "validation/loss": 1.0}\n')
    (folder / "artifacts/cost.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "artifacts/cost.json"])
@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_files_behind_a_link_are_not_shown(tmp_path, kind, name):
    folder, target = write_small(tmp_path / "runs/a"), tmp_path / "own"
    (folder / name).rename(target)
    (folder / name).symlink_to(target)
    with pytest.raises(ValueError, match=f"{folder / name} is a link"):
        write_report(folder) if kind == "report" else compare([folder.parent])


def test_pictures_behind_a_link_are_kept_by_a_comparison(tmp_path):
    folder = write_small(tmp_path / "runs/a").parent
    (tmp_path / "photos").mkdir()
    (folder / "compare").symlink_to(tmp_path / "photos")
    with pytest.raises(ValueError, match=f"{folder}/compare is a link"):
        compare([folder])
    assert not list((tmp_path / "photos").iterdir())


def test_leftovers_of_others_are_neither_waited_for_nor_followed(tmp_path):
    def too_long(*_):
        raise TimeoutError

    os.mkfifo(tmp_path / ".x.1.partial")
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(20)
    try:
        write_atomic(tmp_path / "page", "new")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "page").read_text() == "new"
    assert not (tmp_path / ".x.1.partial").exists()


def test_temporary_file_that_is_a_link_is_not_written(tmp_path, monkeypatch):
    (tmp_path / "own").write_text("own")
    temporary = tmp_path / f".page.{os.uname().nodename}.{os.getpid()}.partial"
    temporary.symlink_to(tmp_path / "own")
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: [])  # as if the link were created after the leftovers are gone
    with pytest.raises(OSError, match="page"):
        write_atomic(tmp_path / "page", "new")
    assert (tmp_path / "own").read_text() == "own"


def test_long_rows_of_generated_texts_are_shortened(tmp_path):
    write_small(tmp_path)
    written = {
        "rows": [["t" * 99_999] * 5],
        "bleu": 1.0,
        "signature": "s" * 99_999,
        "by_length": [[1, 9, 5, 1.0]] * 9999,
    }
    (tmp_path / "artifacts/written_test.json").write_text(json.dumps(written))
    body = write_report(tmp_path).read_text()
    assert re.findall("t{500,}", body) == ["t" * 20_000] * 3
    assert "s" * 1001 not in body
    assert body.count("1%2C9%2C5%2C1") + body.count("1,9,5,1") == 1000


def test_names_that_differ_in_their_punctuation_have_their_own_figures(tmp_path):
    values = {f"{split}/{name}": 1.0 for split in ("train", "a_b", "a.b") for name in ("top_5", "top.5", "top__5")}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1} | values) + "\n")
    body = write_report(tmp_path).read_text()
    assert len(list((tmp_path / "report").glob("curve_top*.png"))) == 3
    assert len(set(re.findall(r'download="(curve_\w+)\.csv"', body))) == 3
    assert re.findall("step,train,a_b,a.b".replace(",", "(?:,|%2C)"), body)


def test_numbers_of_settings_without_a_place_on_an_axis_are_words(tmp_path):
    for name, value in {"a": 10**400, "b": 2, "c": float("nan"), "d": float("inf")}.items():
        folder = write_small(tmp_path / name)
        config = {"model": {"width": value}}
        for path in (folder / "config.json", folder / "artifacts/run.json"):
            path.write_text(json.dumps({"config": config, "seconds": 1.0} if path.name == "run.json" else config))
    body = compare([tmp_path]).read_text()
    assert "against width, " in body
    assert ">…00000000000000000<" in body


@pytest.mark.parametrize("command", ["report", "comparison"])
def test_terminal_gets_no_control_characters(tmp_path, monkeypatch, capsys, command):
    folder = tmp_path / "a\x1b]0;title\x07\x9b\u202e\u2069"
    write_small(folder if command == "report" else folder / "b")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert launch.main(["report", f"--workdir={folder}"]) == 0
    assert r"a\x1b]0;title\x07\x9b\u202e\u2069/" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert launch.main(["report", f"--workdir={folder}"]) == 0
    assert f"{folder}/" in capsys.readouterr().out  # as it is, for other programs


def test_terminal_gets_no_control_characters_of_train(tmp_path, monkeypatch, capsys):
    """Check the path of the report, and the traceback of an error in a user's code."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(loop, "train", lambda *_, **__: {})
    assert launch.main(["train", f"--workdir={tmp_path}/a\x1b\u202e"]) == 0
    assert capsys.readouterr().out.endswith("/a\\x1b\\u202e/report.html\n")
    assert sys.excepthook is print_error
    try:
        raise RuntimeError("a\x1b]0;x\x07\u202e")
    except RuntimeError:
        sys.excepthook(*sys.exc_info())
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):\n")
    assert shown.endswith("RuntimeError: a\\x1b]0;x\\x07\\u202e\n")


def test_table_of_a_sweep_has_no_formulas(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    rows = [{"run": "=1+2", "state": "done", "a;=b": "x\x1b[31m", "value": "-0.5"}]
    comparison.write_table(rows, tmp_path / "sweep.csv")
    assert (tmp_path / "sweep.csv").read_text().splitlines() == ["run,state,a;'=b,value", "'=1+2,done,x\x1b[31m,-0.5"]
    assert "\x1b" not in capsys.readouterr().out
    assert Run("a\x1b[31m", tmp_path).row()[0] == r"a\x1b[31m"


def test_printed_table_of_a_sweep_has_one_line_for_each_run(tmp_path, capsys):
    comparison.write_table([{"run": "a", "prompt": "b\nc\r"}, {"run": "d", "prompt": "e"}], tmp_path / "sweep.csv")
    assert capsys.readouterr().out.splitlines()[1:4] == ["prompt", r"b\nc\r", "e"]


def test_artifacts_behind_a_link_are_not_shown(tmp_path):
    folder, target = write_small(tmp_path / "runs/a"), tmp_path / "own"
    (folder / "artifacts").rename(target)
    (folder / "artifacts").symlink_to(target)
    for show in (write_report, lambda folder: compare([folder])):
        with pytest.raises(ValueError, match=f"{folder}/artifacts is a link"):
            show(folder)


def test_runs_behind_a_link_are_compared_only_if_named(tmp_path):
    own = write_small(tmp_path / "own")
    write_small(tmp_path / "runs/a")
    (tmp_path / "runs/b").symlink_to(own)
    with pytest.raises(ValueError, match=f"{tmp_path}/runs/b is a link: name the folders of the runs"):
        compare([tmp_path / "runs"])
    assert compare([tmp_path / "runs/a", tmp_path / "runs/b"]) == tmp_path / "runs/compare.html"


def test_metrics_are_read_once_for_all_of_their_names(tmp_path):
    """Check a history in which the product of lines and names is large."""
    lines = [{"step": step, "train/loss": 1.0} for step in range(15_000)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = {f"x/m{n}": 1.0 for n in range(15_000)}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 15_000} | names) + "\n")
    start = time.process_time()
    actual = curves.by_metric(GrowingMetrics(tmp_path / "metrics.jsonl").read())
    assert len(actual) == 15_001
    assert time.process_time() - start < 10


def test_names_written_from_right_to_left_do_not_reverse_numbers(tmp_path):
    run = write_run(tmp_path, "\u05d0b")
    body = write_report(run).read_text()
    assert "<b><bdi>\u05d0b</bdi></b> → <bdi>\u05d0b 2</bdi> <small>90%</small>" in body
    assert ">100% \u05d0b 2<" in body


def test_cells_have_no_formulas_for_any_separator():
    rows = [["x", 'a;"=1+2;'], ["x", 'a\t""@x'], ["x", '"=1+2']]
    text = unquote(re.search('utf-8,([^"]*)', html.download(rows, "x"))[1])
    for separator in ",;\t":
        for row in csv.reader(io.StringIO(text), delimiter=separator):
            assert not [cell for cell in row if cell.startswith(("=", "@"))]


def test_terminal_gets_no_control_characters_of_categories(tmp_path, monkeypatch, capsys):
    truth = {"images": [{"id": 1}], "categories": [{"id": 1, "name": "a\x1b]0;x\x07"}]}
    box = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 2, 2]}
    truth["annotations"] = [box | {"area": 4, "iscrowd": 0, "id": 1}]
    (tmp_path / "true.json").write_text(json.dumps(truth))
    (tmp_path / "found.json").write_text(json.dumps([box | {"score": 0.9}]))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    files = [f"--predictions={tmp_path}/found.json", f"--references={tmp_path}/true.json"]
    assert launch.main(["score", "--metric=voc", *files]) == 0
    assert r"ap a\x1b]0;x\x07" in capsys.readouterr().out
