"""Options, arguments and data that are refused with one sentence."""

import jax
import pytest

from lineage import launch, models
from lineage.data import Images
from lineage.data.loader import ExampleSource
from lineage.runs.process import NO_MEMORY, UNKNOWN_METRIC
from lineage.train.experiment import Experiment
from tests.train.conftest import GPT, VIT

pytestmark = pytest.mark.usefixtures("no_report")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            [GPT, "--config.schedule.learning_rat=1"],
            "unknown config key 'schedule.learning_rat': did you mean 'schedule.learning_rate'? "
            "The keys of schedule are end_factor, learning_rate, name, ",
        ),
        (
            [GPT, "--config.optimizer.lr=1"],
            "unknown config key 'optimizer.lr'. The keys of optimizer are b1, b2, clip_norm, ",
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
            "model.activation is 'gleu'. Did you mean 'gelu'? Available: relu, gelu, gelu_tanh, silu.",
        ),
        (
            [VIT, "--config.model.position=3d"],
            "model.position is '3d'. Available: none, 1d, 2d, relative, sincos2d, mae.",
        ),
        ([GPT, "--config.source=digits"], "The source 'digits' provides images, not documents."),
        (
            [GPT, "--config.task=masked_lm"],
            "The task 'masked_lm' needs a model with the outputs masked_lm: GPT has next_token.",
        ),
        (
            [GPT, "--config.task=conditional_lm", "--config.source=digits"],
            "The source 'digits' provides images, not pairs.",
        ),
        (
            [
                GPT,
                *("--config.task=conditional_lm", "--config.source=cldr", "--config.task.sequence_length=64"),
                *("--config.model.max_length=64", "--config.sampling.max_new_tokens=64"),
                "--config.evaluators.generation=generation",
            ],
            "sampling.max_new_tokens is 64 and model.max_length is 64: the former must be lower, because",
        ),
        ([GPT, "--config.task.name=causal"], "Unknown task 'causal'. Did you mean 'causal_lm'?"),
        ([GPT, "--config.task.mixup=0.2"], "unknown config key 'task.mixup'. The keys of task are cache_dir, "),
        (
            [GPT, "--config.optimizer.name=adam"],
            "Unknown optimizer 'adam'. Did you mean 'adamw'? Available: adafactor, adamw, ademamix, lamb, lars, lion, ",
        ),
        (
            [GPT, "--config.schedule=cos"],
            "Unknown schedule 'cos'. Did you mean 'cosine'? Available: constant, cosine, linear, rsqrt, step, ",
        ),
        ([GPT, "--config.optimizer.frozen=('atention',)"], "has 'atention', which matches no parameter; one is '"),
        (
            [GPT, "--config.precision=float12"],
            "precision is 'float12'. Did you mean 'float32'? Available: float32, bfloat16.",
        ),
        ([GPT, "--config.log_every_steps=0"], "log_every_steps is 0: it must be 1 or more."),
        ([GPT, "--config.evaluate_every_percent=0.0"], "evaluate_every_percent is 0.0: it must be above 0."),
        (
            [GPT, "--config.loader.batch_size=12"],
            "a batch of 12 examples cannot be split evenly over 8 devices (data x fsdp): it must be",
        ),
        (
            [GPT, "--config.loader.evaluation_batch_size=12"],
            "a batch of 12 examples cannot be split evenly over 8 devices (data x fsdp): it must be",
        ),
        (
            [GPT, "--config.grad_accum_steps=3"],
            "a batch of 8 examples cannot be split evenly over 8 devices (data x fsdp) in 3 micro-batches",
        ),
        (
            [GPT, "--config.mesh.tensor=3"],
            "a mesh of data=-1, fsdp=1, context=1, tensor=3 does not fit 8 devices: their product must be",
        ),
        ([GPT, "--config.compiler_options=('a',)"], "compiler_options contains 'a': it must be pairs (name, value)."),
        (
            [GPT, "--config.compiler_options=(('xla_dump_to', 'x'),)"],
            "compiler_options contains xla_dump_to: an option that names files must be given in the environment",
        ),
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
            "The images of the source 'digits' have 1 channels, the model 3: set model.channels or that of its",
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
        ([GPT, "--config.sharding=(('atention',('fsdp',)),)"], "sharding has 'atention', which matches no parameter"),
        (
            [GPT, "--config.sharding=(('^embed/',(None,'fsdp')),)"],
            "sharding has '^embed/', which matches no parameter; one is 'params/embed/table'.",
        ),
        (
            ["--config=resnet_digits", "--config.mesh.tensor=2"],
            "mesh.tensor is 2: it must be 1, because no parameter of the model is split over it.",
        ),
        ([GPT, "--config.model.vocab_size=100"], "model.vocab_size is 100: it must be at least 257, as the source"),
        ([VIT, "--config.model.num_classes=9"], "model.num_classes is 9: it must be at least 10, as the source"),
        ([GPT, "--config.checkpoint.keep=0"], "checkpoint.keep is 0: it must be 1 or more."),
        (
            [GPT, "--config.sampling.num_samples=1", f"--config.sampling.prompt={'a' * 16}"],
            "the prompt has 16 tokens: it must have fewer than model.max_length, 16, so that a token can follow.",
        ),
        (["--config=configs/paper/bert_glue.py:x"], "The GLUE task is 'x': it must be one of cola, "),
        (["--config=vit_digits:x"], "/configs/small/vit_digits.py takes no argument."),
    ],
)
def test_invalid_settings(arguments, sentence, error, tmp_path):
    message = error(*arguments, f"--workdir={tmp_path}")
    assert sentence in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            [GPT, "--config.checkpoint.best=test/loss"],
            "'test/loss': the metrics are validation/accuracy, validation/loss, ",
        ),
        (
            [GPT, "--config.checkpoint.best=validation/acuracy"],
            "'validation/acuracy': did you mean 'validation/accuracy'?",
        ),
        ([VIT, "--config.checkpoint.best=test/acuracy"], "'test/acuracy': did you mean 'test/accuracy'?"),
        ([VIT, "--config.checkpoint.best=test/loss", "--config.evaluators.loss.every=0"], "nothing is evaluated"),
    ],
)
def test_unknown_metrics_have_their_own_exit_code(arguments, sentence, error, tmp_path):
    message = error(*arguments, f"--workdir={tmp_path}", code=UNKNOWN_METRIC)
    assert message.startswith("checkpoint.best is '")
    assert sentence in message


def test_out_of_memory_error_suggests_changes(error, tmp_path):
    """Check with more memory than any device has: the allocation fails before any of it is used."""
    message = error(GPT, f"--workdir={tmp_path}", "--config.model.mlp_dim=1099511627776", code=NO_MEMORY)
    assert message.startswith("out of memory (RESOURCE_EXHAUSTED: ")
    for key in ("loader.batch_size", "grad_accum_steps", "model.remat", "mesh.fsdp", "lineage describe"):
        assert key in message


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
        ("sweep more", "unknown argument 'more': use --config for an experiment, --workdir for the folder of a run"),
        ("sweep --parallel=two", "argument --parallel: invalid count value: 'two'."),
        ("train --max-restarts=-1", "argument --max-restarts: invalid count value: '-1'."),
        ("slurm start", "argument action: invalid choice: 'start' (choose from "),
        ("report --config.seed=1", "--config.seed is not an argument of report, which reads no config."),
    ],
)
def test_invalid_arguments(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        launch.main(arguments.split())
    assert stop.value.code == 2
    (output,) = capsys.readouterr().err.splitlines()
    assert output.startswith(f"error: {sentence}")
    assert output.endswith("--help` explains the arguments.)")


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
