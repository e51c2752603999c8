"""Predictions by several processes match those of one process, and errors of one process end all."""

import re
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

from lineage.train import loop
from tests.data.test_questions import CONTEXT, squad
from tests.e2e.conftest import outputs_of


def predict_all(start_all, count, output, run, inputs, *options):
    """Start a command `predict` over several processes, each with one device."""
    several = "--coordinator={coordinator}", "--num-processes={count}", "--process={number}", "--heartbeat=10"
    options = f"--inputs={inputs}", f"--output={output}", "--batch-size=2", *options
    return start_all(count, "launch.py", "predict", run, *options, *(several if count > 1 else ()), devices=count)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "vit"])
def test_predictions_of_two_processes_are_those_of_one(model, start_all, tiny, no_report, tmp_path):
    """Check texts, which are sampled, and images, of which one cannot be read, and that a file is continued."""
    config = tiny(model, {"model.depth": 1, "total_steps": 1, "sampling.max_new_tokens": 4})
    loop.train(config, tmp_path / "run", devices=jax.devices()[:1])
    inputs = tmp_path / "inputs.txt"
    more = ("--config.sampling.temperature=1.0",) if model == "gpt" else ("--skip-bad=1",)
    if model == "gpt":
        inputs.write_text("".join(f"text {number}\n" for number in range(29)))
    else:
        images = [tmp_path / f"{number}.png" for number in range(29)]
        for number, image in enumerate(images):
            Image.fromarray(np.full((8, 8), 8 * number, np.uint8)).save(image)
        images[17].write_bytes(b"no image")
        inputs.write_text("".join(f"{image}\n" for image in images))

    def predict(count, output, *options):
        return outputs_of(predict_all(start_all, count, output, tmp_path / "run", inputs, *options))

    outputs = predict(1, tmp_path / "one.jsonl", *more)
    expected = (tmp_path / "one.jsonl").read_bytes()
    assert expected.count(b"\n") == 29, outputs
    outputs = predict(2, tmp_path / "two.jsonl", *more)
    assert (tmp_path / "two.jsonl").read_bytes() == expected, outputs
    assert [output.count("29 predictions") for output in outputs] == [1, 0], outputs
    (tmp_path / "two.jsonl").write_bytes(expected[: len(expected) // 2])  # as after a kill
    outputs = predict(2, tmp_path / "two.jsonl", *more)
    assert (tmp_path / "two.jsonl").read_bytes() == expected, outputs
    if model == "vit":
        outputs = predict(2, tmp_path / "bad.jsonl")
        assert any("Image 17: " in output and "(--skip-bad=N continues" in output for output in outputs)
        assert all("error: " in output for output in outputs)


CASES = {  # name -> model, changes of its config, options of the command, and format of the file
    "beams": ("gpt", {}, ("--config.sampling.num_beams=2", "--config.sampling.temperature=0"), ".jsonl"),
    "draft": ("gpt", {}, ("--config.sampling.draft={run}", "--config.sampling.num_drafted=2"), ".json"),
    "contrast": ("gpt", {}, ("--config.sampling.contrast={run}", "--config.sampling.best_of=2"), ".jsonl"),
    "features": ("vit", {}, ("--features",), ".npz"),
    "answers": ("bert", {"task.name": "question_answering", "task.sequence_length": 16, "task.stride": 4}, (), ".json"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_files_of_two_processes_are_those_of_one(name, start_all, tiny, no_report, tmp_path):
    model, changes, options, suffix = CASES[name]
    inputs = tmp_path / f"inputs{'.json' if name == 'answers' else '.txt'}"
    if name == "answers":
        squad(inputs, [(f"Who is number {number}?", CONTEXT, [(13, "Normans")]) for number in range(29)])
        changes = changes | {"tokenizer": "words", "source": f"squad:{inputs}", "source.validation_path": str(inputs)}
    elif name == "features":
        images = [tmp_path / f"{number}.png" for number in range(29)]
        for number, image in enumerate(images):
            Image.fromarray(np.full((8, 8), 8 * number, np.uint8)).save(image)
        inputs.write_text("".join(f"{image}\n" for image in images))
    else:
        inputs.write_text("".join(f"text {number}\n" for number in range(29)))
        changes = {"sampling.max_new_tokens": 4}
    config = tiny(model, changes | {"model.depth": 1, "total_steps": 1})
    loop.train(config, tmp_path / "run", devices=jax.devices()[:1])
    options = [option.format(run=tmp_path / "run") for option in options]
    files = {}
    for count in (1, 2):
        output = tmp_path / f"{count}{suffix}"
        outputs = outputs_of(predict_all(start_all, count, output, tmp_path / "run", inputs, *options))
        assert output.with_suffix(".jsonl").read_bytes().count(b"\n") == 29, outputs
        files[count] = output.read_bytes()
    assert files[2] == files[1]


@pytest.mark.thorough
def test_file_that_one_process_does_not_have_is_named(start_all, tiny, no_report, tmp_path):
    """Check a run folder and a file of inputs on local disks: the other process does not call this one lost."""
    for number in range(2):
        (tmp_path / f"disk{number}").mkdir()
    (tmp_path / "disk0" / "inputs.txt").write_text("some text\n" * 20)
    loop.train(tiny("gpt", {"total_steps": 1}), tmp_path / "run", devices=jax.devices()[:1])
    shutil.copytree(tmp_path / "run", tmp_path / "disk0" / "local")
    script = f"import os, sys; os.chdir('{tmp_path}/disk{{number}}'); "
    script += "from lineage import launch; launch.main(sys.argv[1:])"
    several = "--coordinator={coordinator}", "--num-processes={count}", "--process={number}"
    inputs = "--inputs=inputs.txt", "--output=out.jsonl"
    for command, message in (
        (("evaluate", "local"), "error: .*/local/config.json is missing or not that of a run"),
        (("predict", "local", *inputs), "error: .*/local/config.json is missing or not that of a run"),
        (("predict", tmp_path / "run", *inputs), "error: There is no file inputs.txt"),
    ):
        outputs = outputs_of(start_all(2, "-c", script, *command, *several))
        assert re.search(message, outputs[1]), outputs
        assert "error: process 1 of this run failed: see its own error message." in outputs[0], outputs
