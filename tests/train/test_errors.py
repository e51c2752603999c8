"""User errors: one sentence with the problem, the value and the allowed values.

See also `test_checkpoint.py` for damaged checkpoints, `test_loop.py` for non-finite losses, `tests/data` for invalid
data, and `tests/e2e/test_resume.py` for kills during a save.
"""

import errno
import io
import logging
import resource

import jax
import numpy as np
import pytest
from orbax.checkpoint._src.serialization import ocdbt_utils

from lineage import launch, models
from lineage.data import Images
from lineage.data.loader import ExampleSource
from lineage.runs.folder import read_metrics
from lineage.runs.locks import locked
from lineage.train import loop
from lineage.train.experiment import Experiment

pytestmark = pytest.mark.usefixtures("no_report")
GPT, VIT = "--config=tests/tiny.py:gpt", "--config=tests/tiny.py:vit"


@pytest.fixture
def error(capsys):
    """Return `error(*arguments)`, which runs a command that must fail and returns its error message."""

    def error(*arguments):
        assert launch.main([str(argument) for argument in arguments]) == 1
        lines = capsys.readouterr().err.rsplit("\nerror: ", 1)[1].splitlines()
        assert lines[1:] == ["(use --traceback for the full traceback)"]  # one line, and a hint
        return lines[0]

    return error


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """Return a folder with the workdirs of finished runs of GPT and ViT."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "write_report", lambda workdir: None)
        patch.setattr(loop.artifacts, "write_all", lambda *args: None)
        for model in ("gpt", "vit"):
            loop.train(tiny(model, {"total_steps": 2}), folder / model)
    return folder


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            [GPT, "--config.schedule.learning_rat=1"],
            "unknown config key 'schedule.learning_rat': did you mean 'schedule.learning_rate'?",
        ),
        (
            [GPT, "--config.optimizer.lr=1"],
            "unknown config key 'optimizer.lr': the keys of optimizer are b1, b2, clip_norm, ",
        ),
        ([GPT, "--config.batch_size=1"], "unknown config key 'batch_size': did you mean 'loader.batch_size'?"),
        ([GPT, "--config.modle.width=1"], "unknown config key 'modle.width': did you mean 'model.width'?"),
        ([GPT, "--config.loader.batch_size=many"], "loader.batch_size is 'many': it must be of type int."),
        ([GPT, "--config.schedule.learning_rate=fast"], "schedule.learning_rate is 'fast': it must be of type float."),
        (["--config=configs/vit_digit.py"], "there is no config 'configs/vit_digit.py': did you mean 'vit_digits'?"),
        ([GPT, "--config.source=text:absent.txt"], "There is no text file at absent.txt: source.path must name"),
        (
            [GPT, "--config.model.name=gtp"],
            f"Unknown model 'gtp'. Did you mean 'gpt'? Available: {', '.join(sorted(models.MODELS))}.",
        ),
        ([GPT, "--config.model.num_heads=3"], "3"),
        (
            [GPT, "--config.model.activation=gleu"],
            "Unknown activation 'gleu'. Did you mean 'gelu'? Available: relu, gelu, gelu_tanh, silu.",
        ),
        (
            [VIT, "--config.model.position=3d"],
            "Unknown position '3d'. Available: none, 1d, 2d, relative, sincos2d, mae.",
        ),
        ([GPT, "--config.source=digits"], "The source 'digits' offers images, not documents."),
        (
            [GPT, "--config.task=masked_lm"],
            "The task 'masked_lm' needs a model with the outputs masked_lm: GPT has next_token.",
        ),
        (
            [GPT, "--config.task=conditional_lm", "--config.source=digits"],
            "The source 'digits' offers images, not pairs.",
        ),
        ([GPT, "--config.task.name=causal"], "Unknown task 'causal'. Did you mean 'causal_lm'?"),
        ([GPT, "--config.task.mixup=0.2"], "unknown config key 'task.mixup': the keys of task are cache_dir, "),
        (
            [GPT, "--config.optimizer.name=adam"],
            "Unknown optimizer 'adam'. Did you mean 'adamw'? Available: adafactor, adamw, ademamix, lars, lion, muon, ",
        ),
        (
            [GPT, "--config.schedule=cos"],
            "Unknown schedule 'cos'. Did you mean 'cosine'? Available: constant, cosine, linear, rsqrt, transformer, ",
        ),
        ([GPT, "--config.optimizer.frozen=('atention',)"], "has 'atention', which matches no parameter; one is '"),
        (
            [GPT, "--config.precision=float12"],
            "precision is 'float12'. Did you mean 'float32'? Available: float32, bfloat16.",
        ),
        ([GPT, "--config.log_every_steps=0"], "log_every is 0 steps: it must be at least 1."),
        (
            [GPT, "--config.loader.batch_size=12"],
            "a batch of 12 examples does not divide over 8 devices (data x fsdp): it must be",
        ),
        (
            [GPT, "--config.loader.evaluation_batch_size=12"],
            "a batch of 12 examples does not divide over 8 devices (data x fsdp): it must be",
        ),
        (
            [GPT, "--config.grad_accum_steps=3"],
            "a batch of 8 examples does not divide over 8 devices (data x fsdp) in 3 accumulated parts",
        ),
        (
            [GPT, "--config.mesh.tensor=3"],
            "a mesh of data=-1, fsdp=1, context=1, tensor=3 does not fit 8 devices: the sizes must multiply",
        ),
        ([GPT, "--config.compiler_options=('a',)"], "compiler_options contains 'a': it must be pairs (name, value)."),
        (
            [GPT, "--config.compiler_options=(('xla_nonsense', 1),)"],
            "compiler_options: INVALID_ARGUMENT: No such compile option: 'xla_nonsense'",
        ),
        ([GPT, "--config.model.max_length=8"], "a sequence of 16 tokens is longer than the model's 8, max_length."),
        (
            [VIT, "--config.source=folder:absent"],
            "There is no folder absent/train: images are read from PATH/<split>/<class>/<file>",
        ),
        (
            [VIT, "--config.model.channels=3"],
            "image has shape (8, 8, 1) in the data: it must be (8, 8, 3), as in the model.",
        ),
        ([VIT, "--config.wandb=project"], "Weights & Biases is not installed"),
        ([VIT, "--config.task=object_detection", "--config.task.max_boxes=0"], "task.max_boxes is 0: it must be 1"),
        ([VIT, "--config.task.image_size=-1"], "task.image_size is -1: it must be 0 or more."),
        ([GPT, "--config.grad_accum_steps=0"], "grad_accum_steps is 0: it must be 1 or more."),
        (["--config=swin_digits", "--config.model.depths=(2,0)"], "model.depths is (2, 0): it must be 1 or more."),
        ([GPT, "--config.ema_decay=1.5"], "ema_decay is 1.5: it must be 0 or more and below 1."),
        ([GPT, "--config.schedule.learning_rate=-1.0"], "schedule.learning_rate is -1.0: it must be 0 or more."),
        ([GPT, "--config.optimizer.no_decay=('[',)"], "optimizer.no_decay has '[', which is not a regular expression"),
        ([GPT, "--config.sharding=(('x',),)"], "sharding has ('x',): it must be a pair of a regular expression"),
        ([GPT, "--config.model.vocab_size=100"], "model.vocab_size is 100: it must be at least 257, as the source"),
        ([VIT, "--config.model.num_classes=9"], "model.num_classes is 9: it must be at least 10, as the source"),
        ([GPT, "--config.checkpoint.keep=0"], "checkpoint.keep is 0: it must be 1 or more."),
        (
            [GPT, "--config.checkpoint.best=test/loss"],
            "checkpoint.best is 'test/loss': the metrics are validation/accuracy, validation/loss, ",
        ),
        (
            [GPT, "--config.checkpoint.best=validation/acuracy"],
            "checkpoint.best is 'validation/acuracy': did you mean 'validation/accuracy'?",
        ),
        (
            [VIT, "--config.checkpoint.best=test/acuracy"],
            "checkpoint.best is 'test/acuracy': did you mean 'test/accuracy'?",
        ),
        (
            [GPT, "--config.sampling.num_samples=1", f"--config.sampling.prompt={'a' * 16}"],
            "the prompt has 16 tokens: it must have fewer than model.max_length, 16, so that a token can follow.",
        ),
        (["--config=configs/paper/bert_glue.py:x"], "The GLUE task is 'x': it must be one of cola, "),
        (["--config=vit_digits:x"], "/configs/small/vit_digits.py takes no argument."),
        # More memory than any device has: the allocation fails before any of it is used.
        ([GPT, "--config.model.mlp_dim=1099511627776"], "out of memory (RESOURCE_EXHAUSTED: "),
    ],
)
def test_invalid_settings(arguments, sentence, error, tmp_path):
    said = error(*arguments, f"--workdir={tmp_path}")
    assert sentence in said
    assert len(said) < 400


def test_out_of_memory_error_suggests_changes(error, tmp_path):
    said = error(GPT, f"--workdir={tmp_path}", "--config.model.mlp_dim=1099511627776")
    for key in ("loader.batch_size", "grad_accum_steps", "model.remat", "mesh.fsdp", "lineage describe"):
        assert key in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("tarin", "unknown command 'tarin': did you mean 'train'?"),
        ("xyz", "unknown command 'xyz': use one of train, evaluate, "),
        ("--config.wandb --config.seed=1", "--config.wandb has no value: write --config.wandb=VALUE."),
        ("train --config.seed", "--config.seed has no value: write --config.seed=VALUE."),
        ("train --workdir", "argument --workdir: expected one argument."),
        ("train --workdri=x", "unknown argument '--workdri=x': did you mean '--workdir'?"),
        ("train --optuna", "unknown argument '--optuna'."),
        ("train more", "unknown argument 'more': an experiment is given by --config, the folder of a run by --workdir"),
        ("sweep --parallel=two", "argument --parallel: invalid int value: 'two'."),
        ("slurm start", "argument action: invalid choice: 'start' (choose from "),
        ("report --config.seed=1", "--config.seed is not an argument of report, which reads no config."),
    ],
)
def test_invalid_arguments(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        launch.main(arguments.split())
    assert stop.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {sentence}")
    assert said.endswith("--help` explains the arguments.)")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"good until \xff here", "is not UTF-8 text: byte 0xff at offset 11"),
        (b"", "There is no text in"),
        (b"a", "The text has 1 tokens: language modeling needs at least 2"),
    ],
)
def test_invalid_data(content, sentence, error, tmp_path):
    (tmp_path / "input.txt").write_bytes(content)
    arguments = [f"--config.source.name=text:{tmp_path}/input.txt", "--config.source.max_bytes=0"]
    validation = f"--config.source.validation_path={tmp_path}/input.txt"
    assert sentence in error(GPT, *arguments, validation, f"--workdir={tmp_path}/run")


def test_invalid_commands(error, trained):
    (trained / "model").mkdir()
    (trained / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    for mode in ("evaluate", "generate"):
        for folder in ("absent", f"{trained}/model"):
            said = error(mode, GPT, f"--workdir={folder}")
            assert said == f"there is no trained model in {folder}: give the --workdir of a run."
    assert error("generate", f"--workdir={trained}/vit") == (
        "ViT does not generate text, only decoders of texts do: leave sampling.num_samples at 0."
    )
    assert "empty" in error("generate", f"--workdir={trained}/gpt", "--prompt=")
    long = error("generate", f"--workdir={trained}/gpt", f"--prompt={'b' * 16}")
    assert long == "the prompt has 16 tokens: it must have fewer than model.max_length, 16, so that a token can follow."
    drafted = "generate", f"--workdir={trained}/gpt"
    assert "its tokenizer differs from that of" in error(*drafted, f"--config.sampling.draft={trained}/vit")
    beams = "--config.sampling.num_beams=2", "--config.sampling.temperature=0"
    assert "Speculative decoding needs sampling.num_beams=1" in error(
        *drafted, *beams, f"--config.sampling.draft={trained}/gpt"
    )
    assert error("evaluate", f"--workdir={trained}/gpt", "--checkpoint=best").startswith(
        "There is no best checkpoint in"
    )
    assert error("report", "--workdir=absent")
    assert "has no sweep()" in error("sweep", "--config=gpt_shakespeare_char", "--workdir=absent")


def test_generated_samples_are_separated(trained, capsys):
    generate = ["generate", f"--workdir={trained}/gpt", "--prompt=ab"]
    assert launch.main(generate) == 0
    assert "--- sample" not in capsys.readouterr().out
    assert launch.main([*generate, "--config.sampling.num_samples=2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("--- sample 1 of 2 ---\nab")
    assert "\n--- sample 2 of 2 ---\nab" in said


def test_workdir_that_cannot_be_written(error, tmp_path):
    (tmp_path / "file").touch()
    for workdir in (tmp_path / "file", tmp_path / "file" / "below"):
        assert error(GPT, f"--workdir={workdir}") == (
            f"the workdir is {workdir}, but {tmp_path}/file is a file: choose another workdir."
        )
    said = error(GPT, "--workdir=/proc/lineage")  # not even root writes there
    assert said.startswith("the workdir /proc/lineage cannot be written (")


def test_initial_parameters_from_no_folder(error, tmp_path):
    said = error(GPT, "--config.init.path=bert-base-uncased", f"--workdir={tmp_path}")
    assert said == (
        "init.path is 'bert-base-uncased', which is not a folder: it must be the workdir of a run, a folder in the "
        "layout of transformers, or hf:ORG/NAME."
    )


def test_platform_without_devices(error, tmp_path, monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda': no device")

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", devices)
    assert error(GPT, f"--workdir={tmp_path}") == (
        "JAX_PLATFORMS is 'cuda', which JAX cannot use (Unable to initialize backend 'cuda': no device): unset it, or "
        "install JAX for the device."
    )


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


def test_errors_name_the_arguments_of_python_in_python(trained, tiny):
    with pytest.raises(ValueError, match=r"choose another workdir, or force_config=True\.$"):
        loop.train(tiny("gpt", {"optimizer.b1": 0.8}), trained / "gpt")


def test_run_that_is_shorter_than_before(error, trained):
    assert error(GPT, f"--workdir={trained}/gpt", "--config.total_steps=1") == (
        f"the run is 1 steps long, but {trained}/gpt has step 2."
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
    assert said.startswith(f"{trained}/gpt holds a run of another config (model.activation: 'gelu_tanh' there")
    said = error(mode, VIT, f"--workdir={trained}/gpt")
    assert said.startswith(f"{trained}/gpt holds a run of another config (")
    assert error(mode, f"--workdir={trained}/x") == (
        f"there is no trained model in {trained}/x: give the --workdir of a run."
    )


def test_workdir_in_use_or_with_another_config(error, trained):
    with locked(trained / "gpt"):
        assert error(GPT, f"--workdir={trained}/gpt") == (
            f"another run is using {trained}/gpt: wait for it, stop it, or choose another workdir."
        )
    assert error(GPT, f"--workdir={trained}/gpt", "--config.optimizer.b1=0.8") == (
        f"{trained}/gpt holds a run of another config (optimizer.b1: 0.9 there, 0.8 here): choose another workdir, or "
        "--force-config."
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


def test_empty_data_set(tiny, monkeypatch):
    experiment = Experiment(tiny("vit"), None, jax.devices()[:1])
    empty = Images({"train": EMPTY, "test": EMPTY}, ["0"])
    monkeypatch.setattr("lineage.data.sources.packages.Digits.images", lambda self: empty)
    with pytest.raises(ValueError, match="The training set is empty: at least one example is needed"):
        experiment.data  # noqa: B018


class Empty(ExampleSource):
    def __len__(self):
        return 0

    def take(self, indices):
        raise IndexError


EMPTY = Empty()
