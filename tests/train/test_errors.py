"""User errors: one sentence with the problem, the value and the allowed values.

See also `test_invalid_options.py`, `test_damaged_checkpoints.py`, `test_failing_runs.py`, `tests/data` for invalid
data, and `tests/e2e/test_resume.py` for kills during a save.
"""

import errno
import io
import json
import logging
import pwd
import resource
import shutil

import jax
import numpy as np
import pytest
from orbax.checkpoint._src.serialization import ocdbt_utils

import lineage
from lineage import launch
from lineage.runs.folder import read_metrics
from lineage.runs.locks import locked
from lineage.train import loop
from lineage.train.experiment import Experiment
from tests.train.conftest import GPT, VIT, without_report

pytestmark = pytest.mark.usefixtures("no_report")


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """Return a folder with the workdirs of finished runs of GPT and ViT."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        without_report(patch)
        for model in ("gpt", "vit"):
            loop.train(tiny(model, {"total_steps": 2}), folder / model, devices=jax.devices()[:1])
    return folder


@pytest.mark.thorough
def test_invalid_commands(error, trained):
    (trained / "model").mkdir()
    (trained / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    for mode in ("evaluate", "generate"):
        for folder in ("absent", f"{trained}/model"):
            said = error(mode, GPT, f"--workdir={folder}")
            assert (
                said == f"{folder}/config.json is missing or not that of a run: give the --workdir of a trained model."
            )
    assert error("generate", f"--workdir={trained}/vit") == ("ViT does not generate text, only decoders of texts do.")
    assert error(VIT, "--config.sampling.num_samples=1", f"--workdir={trained}/new") == (
        "ViT does not generate text, only decoders of texts do: leave sampling.num_samples at 0."
    )
    assert "empty" in error("generate", f"--workdir={trained}/gpt", "--prompt=")
    long = error("generate", f"--workdir={trained}/gpt", f"--prompt={'b' * 16}")
    assert long == "the prompt has 16 tokens: it must have fewer than model.max_length, 16, so that a token can follow."
    said = "sampling.best_of is 1 and sampling.temperature 1.0: with sampling.contrast, they must be at least 2"
    assert said in error("generate", f"--workdir={trained}/gpt", f"--config.sampling.contrast={trained}/gpt")
    drafted = "generate", f"--workdir={trained}/gpt"
    assert "its tokenizer differs from that of" in error(*drafted, f"--config.sampling.draft={trained}/vit")
    for folder in ("absent", f"{trained}/model"):
        said = f"sampling.draft is {folder}: it must be the folder of a run."
        assert error(*drafted, f"--config.sampling.draft={folder}") == said
    inputs, output = trained / "prompts.txt", trained / "continued.jsonl"
    inputs.write_text("ab")
    paths = f"--workdir={trained}/gpt", f"--inputs={inputs}", f"--output={output}"
    assert "sampling.draft is absent" in error("predict", *paths, "--config.sampling.draft=absent")
    assert not output.exists()
    beams = "--config.sampling.num_beams=2", "--config.sampling.temperature=0"
    assert "Speculative decoding needs sampling.num_beams=1" in error(
        *drafted, *beams, f"--config.sampling.draft={trained}/gpt"
    )
    assert error("evaluate", f"--workdir={trained}/gpt", "--checkpoint=best").startswith(
        "There is no best checkpoint in"
    )
    assert error("report", "--workdir=absent")
    assert "has no sweep()" in error("sweep", "--config=gpt_shakespeare_char", "--workdir=absent")


@pytest.mark.thorough
def test_generated_samples_are_separated(trained, capsys):
    generate = ["generate", f"--workdir={trained}/gpt", "--prompt=ab"]
    assert launch.main(generate) == 0
    assert "--- sample" not in capsys.readouterr().out
    assert launch.main([*generate, "--config.sampling.num_samples=2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("--- sample 1 of 2 ---\nab")
    assert "\n--- sample 2 of 2 ---\nab" in said


def test_missing_folders_of_the_user_are_named(error, tmp_path, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert error("train", "--workdir=~/run").startswith("~ stands for the home folder, which this user does not have")
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert error("train") == "the current folder was deleted: change to another one."


def test_workdir_that_cannot_be_written(error, tmp_path):
    (tmp_path / "file").touch()
    for workdir in (tmp_path / "file", tmp_path / "file" / "below"):
        assert error(GPT, f"--workdir={workdir}") == (
            f"the workdir is {workdir}, but {tmp_path}/file is a file: choose another workdir."
        )
    (link := tmp_path / "link").symlink_to("missing")
    said = f"the workdir is {link}, but {link} is a link to a missing folder: choose another workdir."
    assert error(GPT, f"--workdir={link}") == said
    said = error(GPT, "--workdir=/proc/lineage")  # not even root writes there
    assert said.startswith("the workdir /proc/lineage cannot be written (")


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["evaluate", "generate"])
def test_changed_tokenizer_is_named(mode, error, trained, tmp_path):
    """Check that a tokenizer with two swapped ids is not used."""
    shutil.copytree(trained / "gpt", tmp_path / "gpt")
    path = tmp_path / "gpt" / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(spec))
    said = f"{path} is damaged or missing: its SHA-256 is not that in data.json."
    assert error(mode, f"--workdir={tmp_path}/gpt") == said
    data = tmp_path / "gpt" / "data.json"
    data.write_text(data.read_text()[:-9])
    advice = "restore it, let the command `train` write it again, or"
    assert f": {advice}" in error(mode, f"--workdir={tmp_path}/gpt")
    data.unlink()
    said = f"{data}, which has the SHA-256 of tokenizer.json, is missing or incomplete: {advice}"
    assert error(mode, f"--workdir={tmp_path}/gpt").startswith(said)
    assert launch.main([mode, f"--workdir={tmp_path}/gpt", "--force-config"]) == 0


def test_control_characters_in_errors_are_escaped(error):
    assert error("watch", "a\x1b[2J\x07") == "there is no run in a\\x1b[2J\\x07."


def test_models_that_do_not_exist(error, tmp_path):
    folder = "which is not a folder: it must be the workdir of a run, a folder in the layout of transformers, or"
    said = error(GPT, "--config.init.path=bert-base-uncased", f"--workdir={tmp_path}")
    assert said == f"init.path is 'bert-base-uncased', {folder} hf:ORG/NAME."
    assert error("describe", GPT, "--config.init.path=nowhere") == f"init.path is 'nowhere', {folder} hf:ORG/NAME."
    student = "distilbert_stdlib:nowhere"
    assert error("describe", student, "--config.init.path=") == f"teacher is 'nowhere', {folder} hf:ORG/NAME."


def test_platform_without_devices(error, tmp_path, monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda': no device")

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", devices)
    assert error(GPT, f"--workdir={tmp_path}") == (
        "JAX_PLATFORMS is 'cuda', which JAX cannot use (Unable to initialize backend 'cuda': no device): unset it, or "
        "install JAX for the device."
    )


@pytest.mark.thorough
@pytest.mark.parametrize("flag", [[], ["--traceback"]])
def test_full_disk_at_the_end_of_a_save_prints_no_traceback(flag, tmp_path, monkeypatch, capsys):
    async def merge(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ocdbt_utils, "merge_ocdbt_per_process_files", merge)  # in Orbax's thread
    handler = logging.StreamHandler(io.StringIO())
    absl = logging.getLogger("absl")
    absl.addHandler(handler)
    try:
        assert launch.main(["train", GPT, "--config.total_steps=2", f"--workdir={tmp_path}", *flag]) == 1
    finally:
        absl.removeHandler(handler)
    assert ("Traceback" in handler.stream.getvalue()) == bool(flag)
    said = capsys.readouterr().err
    assert "error: a checkpoint could not be written to " in said
    assert "(No space left on device). Existing checkpoints are kept." in said
    assert ("Traceback" in said) == bool(flag)


def test_errors_name_the_option_and_the_argument_of_python(trained, tiny):
    with pytest.raises(ValueError, match=r"another workdir, or --force-config \(in Python, force_config=True\)\.$"):
        loop.train(tiny("gpt", {"optimizer.b1": 0.8}), trained / "gpt")
    with pytest.raises(ValueError, match=r"seed was 0, is 3.*\(in Python, force_config=True\)\.$"):
        lineage.load(trained / "gpt", changes={"seed": 3})
    assert lineage.load(trained / "gpt", changes={"seed": 3}, force_config=True).context.seed == 3


def test_run_that_is_shorter_than_before(error, trained):
    assert error(GPT, f"--workdir={trained}/gpt", "--config.total_steps=1") == (
        f"the length of the run is 1 steps: it must be at least 2, the last step in {trained}/gpt."
    )


def test_64_bit_numbers(tiny):
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(ValueError, match=r"^jax_enable_x64 \(JAX_ENABLE_X64\) is on: turn it off"):
            _ = Experiment(tiny("gpt")).mesh
    finally:
        jax.config.update("jax_enable_x64", False)


def test_run_in_the_folder_of_its_data(error, tmp_path):
    """Check that a run does not begin whose next start would read its own files as data."""
    (tmp_path / "input.txt").write_text("to be or not to be, that is the question. " * 20)
    options = (f"--config.source=text:{tmp_path}", f"--workdir={tmp_path}/outputs/run", "--config.total_steps=1")
    assert error(GPT, *options) == (
        f"the workdir {tmp_path}/outputs/run is in the folder of the data, {tmp_path}: choose another workdir."
    )


@pytest.mark.thorough
def test_prompt_with_unknown_characters(error, tiny, tmp_path):
    (tmp_path / "input.txt").write_text("to be or not to be, that is the question. " * 20)
    changes = {"source": f"text:{tmp_path}/input.txt", "tokenizer": "characters", "source.max_bytes": 0}
    loop.train(tiny("gpt", changes | {"total_steps": 1}), tmp_path / "run")
    said = error("generate", f"--workdir={tmp_path}/run", "--prompt=to be €")
    assert "€" in said


@pytest.mark.parametrize(
    "change", [{"model.width": 32}, {"model.depth": 3}, {"optimizer.name": "sgd"}, {"ema_decay": 0.9}], ids=str
)
def test_checkpoint_of_another_model(change, trained, tiny):
    with pytest.raises(ValueError, match="is damaged or of another model") as error:
        Experiment(tiny("gpt", change), trained / "gpt").restore()
    assert str(error.value).startswith(f"the checkpoint {trained}/gpt/checkpoints/2 ")
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("mode", ["evaluate", "generate"])
def test_commands_on_runs_use_the_config_of_the_run(mode, error, trained):
    said = error(mode, f"--workdir={trained}/gpt", "--config.model.activation=relu")
    assert said.startswith(f"{trained}/gpt holds a run of another config (model.activation was 'gelu_tanh', is 'relu')")
    said = error(mode, VIT, f"--workdir={trained}/gpt")
    assert said.startswith(f"{trained}/gpt holds a run of another config (")
    assert error(mode, f"--workdir={trained}/x") == (
        f"{trained}/x/config.json is missing or not that of a run: give the --workdir of a trained model."
    )


def test_workdir_in_use_or_with_another_config(error, trained):
    with locked(trained / "gpt"):
        assert error(GPT, f"--workdir={trained}/gpt") == (
            f"another run is using {trained}/gpt: wait for it, stop it, or choose another workdir."
        )
    assert error(GPT, f"--workdir={trained}/gpt", "--config.optimizer.b1=0.8") == (
        f"{trained}/gpt holds a run of another config (optimizer.b1 was 0.9, is 0.8): choose another workdir, or "
        "--force-config (in Python, force_config=True)."
    )


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache")  # the file size is limited
def test_full_disk_stops_the_run_and_keeps_its_files(error, tiny, tmp_path):
    """Simulate a full disk by a limit on the size of files: writes fail in the operating system, in any thread."""
    tiny_run = [
        GPT,
        f"--workdir={tmp_path}",
        "--config.model.width=4",
        "--config.save_every_steps=100",
        "--config.evaluate_every_steps=1000",
    ]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # enough for all files but the history
    try:
        said = error(*tiny_run, "--config.total_steps=2000")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said == f"[Errno 27] File too large: '{tmp_path}/metrics.jsonl'"
    reached = read_metrics(tmp_path)[-1]["step"]
    assert 100 < reached < 1000
    total = reached // 100 * 100 + 1
    changes = {"model.width": 4, "save_every_steps": 100, "evaluate_every_steps": 1000, "total_steps": total}
    config = tiny("gpt", changes)
    assert np.isfinite(loop.train(config, tmp_path)["validation/loss"])  # it resumes when there is space
    assert [line["step"] for line in read_metrics(tmp_path) if "train/loss" in line] == [*range(1, total + 1)]
