"""The effect of every key: another value changes the batches or the computation, or is refused, noted or listed here.

For each key of some small runs, the batches and the lowered programs are compared with those of another value.
"""

import hashlib
import typing

import jax

from lineage.configs import base, cli, schema
from lineage.configs.registry import choices, field_types
from lineage.train.experiment import Experiment
from lineage.train.preparation import jit_step
from lineage.train.step import make_forward_step
from tests.tiers import tiered

PARTS = "model", "task", "source", "loader"
GPT, VIT = "tests/tiny.py:gpt", "tests/tiny.py:vit"
TEXT = {"source": "stdlib", "source.max_bytes": 60_000}
CELLS = {"model.bidirectional": False, "model.attention": "dot", "model.span": "predictive"}
PAIRS = {"task.sequence_length": 24, "task.scheduled_sampling": 0.5}
SMALLER = {"task.image_size": 6, "model.patch_size": 2}
CASES = [
    (VIT, SMALLER | {"optimizer.weight_decay": 0.1}, (*PARTS, "optimizer", "schedule")),
    (GPT, {}, PARTS),
    ("tests/tiny.py:transformer", {"task.sequence_length": 16, "model.norm": "power"}, PARTS),
    ("tests/tiny.py:transformer_xl", {"model.cutoffs": (100, 200)}, PARTS),
    ("llama_stdlib", TEXT | {"model.rope_scaling": "yarn", "model.rope_factor": 4.0}, PARTS),
    ("bert_stdlib", TEXT, PARTS),
    ("bigbird_stdlib", TEXT, PARTS),
    ("elmo_stdlib", TEXT, PARTS),
    ("t5_stdlib", TEXT, PARTS),
    ("bart_stdlib", TEXT, PARTS),
    ("seq2seq_cldr", CELLS | PAIRS, PARTS),
    ("vit_digits", {"model": "deit", "model.pooling": "token", "model.patch_size": 4}, ("model",)),
    ("resnet_digits", {"task.image_size": 6, "model.norm": "group", "model.groups": 2}, PARTS),
    ("swin_digits", SMALLER | {"model.version": "v2", "model.window": 3}, PARTS),
    ("mae_digits", SMALLER, PARTS),
    ("detr_shapes", {}, PARTS),
    *(
        (GPT, {"optimizer": name, "optimizer.weight_decay": 0.1}, ("optimizer",))
        for name in base.REGISTRIES["optimizer"]
    ),
    *((GPT, {"schedule": name, "total_steps": 4000}, ("schedule",)) for name in base.REGISTRIES["schedule"]),
]
# Other values of keys for which `others` cannot derive one from the default.
VALUES = {
    "augment": "crop | flip",
    "buckets": (8, 16),
    "cutoffs": (100, 200),
    "frozen": ("kernel",),
    "hybrid": (1,),
    "lr_multipliers": (("kernel", 0.5),),
    "milestones_percent": (20.0,),
    "no_decay": ("kernel",),
    "noise": "infill(0.5, 3)",
    "trained_windows": (2, 2),
}
# Keys without an effect on batches and programs, with their class or section if they have one elsewhere, and why.
WITHOUT = {
    "BERT.head": "only the one of the task is accepted",
    "BigBird.head": "only the one of the task is accepted",
    "DETR.image_size": "a backbone takes images of any size",
    "MAE.head": "only for the features of all patches",
    "MAE.num_classes": "only for the features of all patches",
    "ResNet.image_size": "convolutions take images of any size",
    "TransformerXL.max_length": "only for generation",
    "attend": "the CPU has one implementation",
    "cache_dir": "only where token ids are kept",
    "model.backbone.num_classes": "a backbone has no classifier",
    "in_memory": "only when images are decoded",
    "path": "data, see tests/data",
    "squash": "only for images that are not square, see tests/tasks",
    "test_path": "data, see tests/data",
    "threads": "only who reads the batches",
    "unroll": "only how layers are compiled",
    "validation_path": "data, see tests/data",
    "workers": "only who reads the batches",
}


def fingerprint(config) -> dict[str, str]:
    """Return hashes of batches, of the learning rates and of the programs of a run."""
    experiment = Experiment(config, devices=jax.devices()[:1])
    experiment.check()
    data, state = experiment.data, experiment.abstract_state
    batch = jax.eval_shape(experiment.zeros)
    variables = jax.eval_shape(lambda state: state.variables(average=True), state)
    evaluate = make_forward_step(experiment.model, experiment.task.loss)
    rates = [float(experiment.schedule(step)) for step in (0, 1, 3, 7, experiment.total_steps - 2)]
    parts = {
        "batches": [content(batches[0]) for batches in (data.train, *data.splits.values())],
        "facts": [experiment.facts, experiment.total_steps, rates],
        "initialization": jax.jit(experiment.make_state).lower().as_text(),
        "training": jit_step(experiment).lower(state, batch).as_text(),
        "evaluation": jax.jit(evaluate).lower(variables, batch).as_text(),
    }
    return {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in parts.items()}


def content(batch) -> list:
    return [(name, value.shape, str(value.dtype), value.tobytes()) for name, value in sorted(batch.items())]


def others(name: str, hint, value) -> list:
    """Return other values of a key with a type."""
    kinds = (hint, *typing.get_args(hint))
    if allowed := choices(hint):
        return [choice for choice in allowed if choice != value]
    if bool in kinds:
        return [choice for choice in (True, False) if choice is not value]
    if isinstance(value, tuple) and value and all(isinstance(item, int | float) for item in value):
        return [tuple(2 * item for item in value), tuple(type(item)(item / 2) for item in value), value[::-1]]
    if isinstance(value, tuple):
        return [VALUES[name]]
    if value is not None and int in kinds:
        return [2 * value or 2, value // 2, value + 1]
    if int in kinds:
        return [2, 4, 64, 96]
    if float in kinds:
        return [(value or 0.5) / 2, (value or 0.0) + 0.125]
    return [VALUES[name]]


def has_effect(load, path: str, hint, value, before: dict[str, str]) -> bool:
    """Return whether another value of a key has an effect or is noted, or all of them are refused."""
    values = [other for other in others(path.rpartition(".")[2], hint, value) if other != value]
    accepted = not values
    for other in values:
        config = load()
        cli.override(config, {path: other})
        try:
            after = fingerprint(config)
        except ValueError:
            continue
        if after != before or any(note.startswith(f"{path} ") for note in base.without_effect(config)):
            return True
        accepted = True
    return not accepted


@tiered(
    ("experiment", "changes", "sections"),
    CASES,
    first=0,
    slow=lambda experiment, *_: experiment != VIT,
    ids=lambda value: next(iter(value), "") if isinstance(value, tuple | dict) else str(value).rpartition("/")[2],
)
def test_every_key_has_an_effect(experiment, changes, sections):
    def load():
        config, _ = cli.load(experiment)
        cli.override(config, changes)
        return config

    before, values, unchanged = fingerprint(load()), schema.describe(base.resolved(load()), {}), []
    for section, cls in base.classes(load()).items():
        if section.partition(".")[0] not in sections:
            continue
        for name, hint in field_types(cls).items():
            path = f"{section}.{name}"
            if path not in values or {name, path, f"{cls.__name__}.{name}"} & {*WITHOUT}:
                continue
            if not has_effect(load, path, hint, values[path][1], before):
                unchanged.append(path)
    assert not unchanged
