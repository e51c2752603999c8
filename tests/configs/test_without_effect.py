"""Notes on keys that have no effect because of other keys."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from lineage.configs import base, cli
from lineage.configs.registry import Needs, choices, declared, field_types
from lineage.train.experiment import Experiment
from lineage.train.preparation import start_notes
from tests.configs.test_ranges import registered

LINEAR = {"model.rope_scaling": "linear", "model.rope_factor": 2.0}


def test_declarations_name_other_fields_and_their_values():
    count = 0
    for section, cls in registered():
        types = field_types(cls)
        for name, needs in declared(cls, Needs).items():
            assert needs.field in types.keys() - {name}, (section, name)
            assert set(needs.values) <= {*(choices(types[needs.field]) or needs.values)}, (section, name)
            count += 1
    assert count > 20


@pytest.mark.parametrize(
    ("experiment", "changes", "note"),
    [
        ("vit_digits", {"init.skip": ("head",)}, "init.skip has no effect, because init.path is empty."),
        ("vit_digits", {"init.skip": ("head",), "init.path": "run"}, None),
        ("vit_digits", {"experts.choice": "prompt"}, "experts.choice has no effect, because experts.paths is empty."),
        ("vit_digits", {"task.squash": True}, "task.squash has no effect, because task.image_size is 0."),
        ("vit_digits", {"checkpoint.best_is_highest": False}, "checkpoint.best is empty."),
        ("vit_digits", {"checkpoint.best_is_highest": False, "checkpoint.best": "validation/loss"}, None),
        ("gpt_stdlib", {"sampling.length_penalty": 0.6}, "because sampling.num_beams is 1."),
        ("gpt_stdlib", {"sampling.length_penalty": 0.6, "sampling.num_beams": 4}, None),
        ("llama_stdlib", {"model.rope_scaling": "yarn"}, "because model.rope_factor is 1.0."),
        ("llama_stdlib", LINEAR | {"model.rope_turns": (1.0, 8.0)}, "because model.rope_scaling is 'linear'."),
        ("llama_stdlib", LINEAR | {"model.rope_turns": (1.0, 8.0), "model.rope_scaling": "yarn"}, None),
        ("bert_stdlib", {"model.head_dropout": 0.5}, "because model.head is 'pretraining'."),
        ("bert_tagging_ud:/data", {"model.head_dropout": 0.5}, None),
        ("llama_stdlib", {"model.variant": "llama3.2-1b", "model.rope_factor": 8.0}, None),
        ("seq2seq_cldr", {"model.attention": "fixed", "model.span": "monotonic"}, "model.attention is 'fixed'."),
        ("seq2seq_cldr", {"model.attention": None, "model.variant": "luong_local", "model.window": 3}, None),
        ("t5_multitask", {"source.limit": 50}, None),
        ("t5_multitask", {"source.limit": 50, "source.weights": (1.0,) * 3}, "source.weights is (1.0, 1.0, 1.0)."),
    ],
)  # fmt: skip
def test_keys_without_effect_are_noted(experiment, changes, note):
    config, _ = cli.load(experiment)
    for key, value in changes.items():
        section, name = key.split(".")
        config[section][name] = value
    notes = "\n".join(base.without_effect(config))
    assert notes.endswith(note) and "\n" not in notes if note else not notes


def test_options_of_the_model_without_effect_in_a_task_are_noted():
    config = base.get_config("gpt", "reinforcement", "cldr")
    assert not [*base.without_effect(config)]
    config.model.update(dropout=0.1, fused_loss=True)
    notes = [f"model.{key} has no effect in the task 'reinforcement'." for key in ("dropout", "fused_loss")]
    assert [*base.without_effect(config)] == notes
    base.choose(config, "task.name", "conditional_lm")
    assert not [*base.without_effect(config)]


def test_notes_are_part_of_the_start_of_a_run():
    config, _ = cli.load("vit_digits")
    assert not [line for line in start_notes(Experiment(config), 0, {}) if "no effect" in line]
    config.task.squash = True
    assert "task.squash has no effect, because task.image_size is 0." in start_notes(Experiment(config), 0, {})


def test_only_heads_with_classes_need_a_number_of_classes():
    config, _ = cli.load("bert_stdlib")
    config.model.head = "choice"  # one logit for each text
    assert Experiment(config).model.num_classes == 2  # the default, which has no effect
    config.model.head = "token_classification"
    with pytest.raises(ValueError, match="The source 'stdlib' has no num_classes, which the model 'bert' needs"):
        _ = Experiment(config).model


def test_a_condition_on_an_unknown_field_is_refused():
    @dataclass
    class Wrong:
        kind: str = "a"
        size: Annotated[int, Needs("knd")] = 1

    with pytest.raises(ValueError, match="needs 'knd', which is not a field: did you mean 'kind'"):
        declared(Wrong, Needs)
