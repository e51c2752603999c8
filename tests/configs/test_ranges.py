"""Ranges of the numeric config keys."""

import dataclasses
import typing

import pytest

from lineage import launch
from lineage.configs import base
from lineage.configs.registry import Count, Range, check_ranges, declared, field_types
from lineage.configs.run import Mesh, Run, Sampling
from lineage.evaluation import EVALUATORS
from lineage.models.bert import BERT
from lineage.models.bigbird import BigBird
from lineage.models.resnet import ResNet
from lineage.train.optimizer import OPTIMIZERS
from tests.tiers import tiered

# Numeric keys without a range, and why.
UNLIMITED = {
    "source.word_column": "negative columns are counted from the last one",
    "source.tag_column": "negative columns are counted from the last one",
    "task.mean": "any number may be subtracted from pixels",
    "task.no_answer_threshold": "a difference of two logits",
    "optimizer.lr_multipliers": "pairs with a regular expression; the optimizer checks the factors",
    "sampling.length_penalty": "below 0 prefers shorter texts",
}


def registered() -> list[tuple[str, type]]:
    """Return all classes whose fields are config keys, with the key of their section."""
    found = [(part, cls) for part, registry in base.REGISTRIES.items() for cls in registry.values()]
    found += [("evaluators", cls) for cls in EVALUATORS.values()]
    sections = [(name, hint) for name, hint in field_types(Run).items() if dataclasses.is_dataclass(hint)]
    return [*found, ("", Run), *sections]


def is_numeric(hint) -> bool:
    return hint in (int, float) or any(map(is_numeric, typing.get_args(hint)))


def test_every_numeric_key_has_a_range():
    without = set()
    for section, cls in registered():
        limited = declared(cls, Range)
        names = [name for name, hint in field_types(cls).items() if is_numeric(hint) and name not in limited]
        without |= {f"{section}.{name}".removeprefix(".") for name in names}
    assert without == set(UNLIMITED)


@tiered(
    ("experiment", "setting", "allowed"),
    [
        ("vit_digits", "model.num_classes=-3", "0 or more"),
        ("vit_digits", "model.image_size=-8", "1 or more"),
        ("vit_digits", "model.channels=0", "1 or more"),
        ("vit_digits", "model.epsilon=-1.0", "0 or more"),
        ("gpt_stdlib", "model.vocab_size=-4", "1 or more"),
        ("bigbird_stdlib", "model.block_size=0", "1 or more"),
        ("elmo_stdlib", "model.cell_dim=0", "1 or more"),
        ("resnet_digits", "model.stem_width=0", "1 or more"),
        ("swin_digits", "model.mlp_ratio=0.0", "above 0"),
        ("llama_stdlib", "model.num_kv_heads=0", "1 or more"),
        ("llama_stdlib", "model.head_size=0", "1 or more"),
        ("seq2seq_cldr", "model.embed_width=0", "1 or more"),
        ("t5_stdlib", "model.mlp_dim=0", "1 or more"),
        ("mae_digits", "task.mask_rate=2.0", "above 0 and below 1"),
        ("vit_digits", "seed=-1", "0 or more"),
        ("vit_digits", "total_steps=-5", "0 or more"),
        ("vit_digits", "step_timeout_minutes=-1.0", "0 or more"),
        ("vit_digits", "mesh.fsdp=0", "1 or more, or -1"),
        ("vit_digits", "cluster.nodes=0", "1 or more"),
        ("vit_digits", "init.layers=(-1,)", "0 or more"),
        ("gpt_stdlib", "sampling.top_p=2.0", "0 or more and at most 1"),
        ("gpt_stdlib", "sampling.top_k=-3", "0 or more"),
    ],
    first=lambda experiment, *_: experiment in ("vit_digits", "gpt_stdlib"),
)
def test_values_out_of_range_are_refused(experiment, setting, allowed, capsys):
    assert launch.main(["describe", experiment, f"--config.{setting}"]) == 1
    key, value = setting.split("=")
    assert f"error: {key} is {value}: it must be {allowed}.\n" in capsys.readouterr().err


def test_values_that_disable_something_are_allowed():
    assert Sampling(top_k=0, top_p=0.0).top_k == 0
    assert Mesh(data=-1).data == -1
    assert ResNet(num_classes=0).outputs == ("features",)
    assert BERT(num_segments=0).num_segments == 0
    assert BigBird(num_random_blocks=0).each_layer(1024)["pattern"].others.shape[-1] == 0


def test_learning_rate_multipliers_are_not_negative():
    with pytest.raises(ValueError, match=r"optimizer.lr_multipliers has -1.0 for 'bias': it must be 0 or more"):
        OPTIMIZERS["adamw"](lr_multipliers=(("bias", -1.0),))


def test_texts_in_place_of_numbers_are_shown_as_texts():
    @dataclasses.dataclass
    class Options:
        width: Count = 1

    with pytest.raises(ValueError, match=r"^model\.width is '8': it must be 1 or more\.$"):
        check_ranges("model", Options("8"))
