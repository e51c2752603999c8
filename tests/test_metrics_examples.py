"""The examples of docs/metrics.md run and return the values in their comments."""

import json
import re
import shlex
from pathlib import Path

import pytest

from lineage import launch

TEXT = (Path(__file__).parent.parent / "docs/metrics.md").read_text("utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)


def test_code_examples_run():
    names = {}
    for block in blocks("python"):  # each can be copied alone
        exec(block, own := {})
        names |= own
    assert len(blocks("python")) == 5
    assert names["exact_match"]("The cat.", ["cat", "dog"]) == 1
    assert names["f1"]("the cat sat", ["a cat"]) == pytest.approx(2 / 3)
    assert names["nats"] == pytest.approx((0.126928 + 0.313262 + 1.313262) / 3, abs=1e-6)
    assert names["state"].compute()["ap"] == pytest.approx(1)
    actual = names["Spans"].empty().update([["B-PER", "I-PER", "O"]], [["B-PER", "I-PER", "B-LOC"]])
    assert actual.types == ["LOC", "PER"]
    assert [actual.compute().f1, *actual.compute(None).f1] == pytest.approx([2 / 3, 0, 1])


def test_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("out.txt", "a.txt", "b.txt"):
        Path(name).write_text(f"the cat sat on the mat\n{name} ran over the road\n")
    for name in ("out.jsonl", "true.jsonl"):
        Path(name).write_text(json.dumps(["O", "B-X"]) + "\n")
    box = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 5, 5], "iscrowd": 0, "area": 25, "score": 0.5}
    Path("boxes.json").write_text(json.dumps([box]))
    truth = {"images": [{"id": 1}], "categories": [{"id": 1, "name": "cat"}], "annotations": [box]}
    Path("instances.json").write_text(json.dumps(truth))
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    for command in commands:
        assert launch.main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    assert len(commands) == 3
    assert json.loads(Path("out.jsonl.tagging.json").read_text())["scores"]["f1"] == 1
