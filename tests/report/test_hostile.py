"""Pages of runs whose every text is hostile: nothing of it becomes an element, an attribute or a script."""

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from lineage.report.comparison import compare
from lineage.report.run import write_report

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


@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_hostile_texts_are_only_text(tmp_path, kind, browse):
    pages = {}
    for name, text in {"harmless": "text of a run / with a slash", "hostile": HOSTILE}.items():
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


def test_browser_refuses_other_scripts(tmp_path, browse):
    body = write_report(write_run(tmp_path / "a", "text")).read_text()
    attack = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    assert "<title>text</title>" in browse(body.replace("<main>", f"<main>{attack}"), "/* nothing */")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", {"git": 1}),
        ("run.json", {"seconds": "long"}),
        ("run.json", {"device": "cpu", "device_count": [1], "git": {"commit": 5}}),
        ("cost.json", {"memory": {"first": 10**400}}),
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
        ("attention_image.npz", {"weights": np.zeros(3)}),
        ("../metrics.jsonl", {"step": 1, "train/loss": "low"}),
        ("../metrics.jsonl", {"step": 1, "train/\ud800": 1.0}),
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
        ("config.json", {"checkpoint": {"best": "test/loss"}}),
        ("config.json", {"checkpoint": {"best": 5, "best_is_highest": None}}),
        ("config.json", {"checkpoint": None}),
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
    assert "ab?cd" in write_report(run).read_text()
