"""Durations: conversion of every unit to steps, and invalid durations."""

import pytest

from lineage.configs import base, cli
from lineage.configs.durations import steps
from lineage.runs import folder


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"total_steps": 7}, 7),
        ({"total_epochs": 2.0}, 20),
        ({"total_epochs": 0.25}, 3),  # 25 of 100 examples are 2.5 batches of 10
        ({"total_examples": 95}, 10),
        ({"total_examples": 0}, 0),
    ],
)
def test_units(given, expected):
    assert steps(given, "total", batch_size=10, examples_per_epoch=100) == expected


def test_percent_refers_to_the_total():
    assert steps({"warmup_percent": 12.5}, "warmup", batch_size=10, total_steps=100) == 13


@pytest.mark.parametrize("percent", range(1, 100))
def test_whole_percentages_do_not_round_up(percent):
    assert steps({"x_percent": float(percent)}, "x", batch_size=1, total_steps=100) == percent


def test_unset_duration_uses_the_default():
    section = {"save_every_steps": None, "save_every_epochs": None}
    assert steps(section, "save_every", batch_size=10, default=5) == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (base.get_config(), "exactly one of total_steps, total_epochs, total_examples must be set"),
        ({"total_steps": 1, "total_epochs": 1.0}, "exactly one of total_steps, total_epochs must be set"),
        ({"total_steps": -1}, "total_steps is -1: a duration cannot be negative"),
        ({"total_epochs": 5.0}, "total_epochs requires the size of the data set"),
    ],
)
def test_invalid_duration_raises(given, message):
    with pytest.raises(ValueError, match=message):
        steps(given, "total", batch_size=10)


def test_setting_a_unit_unsets_the_others():
    config, _ = cli.load("vit_digits")
    assert config.total_epochs
    config.total_steps = 4
    assert (config.total_steps, config.total_epochs) == (4, None)
    config.total_epochs = None
    assert config.total_steps == 4
    copy = config.copy_and_resolve_references()
    copy.update(total_examples=9)
    assert (copy.total_steps, copy.total_examples) == (None, 9)
    config.schedule.warmup_steps = 3
    config.schedule.warmup_percent = 5.0
    assert (config.schedule.warmup_steps, config.schedule.warmup_percent) == (None, 5.0)
    config.grad_accum_steps = 2
    assert config.total_steps == 4


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000), ("2.0", 2), ("1_000", 1000)])
def test_whole_numbers_of_any_notation(text, value):
    config, _ = cli.load("vit_digits")
    cli.override(config, {"total_steps": text})
    assert config.total_steps == value
    with pytest.raises(ValueError, match=r"total_steps is '1\.5': it must be of type int"):
        cli.override(config, {"total_steps": "1.5"})


def test_the_length_of_a_run_has_no_percentage_of_itself():
    config, _ = cli.load("vit_digits")
    config.total_steps = 4
    assert "total_percent" not in config
    with pytest.raises(ValueError, match="unknown config key 'total_percent'"):
        cli.override(config, {"total_percent": "50"})
    saved = folder.plain(config)
    assert base.from_json(saved | {"total_percent": None}).total_steps == 4  # of an earlier version
    with pytest.raises(ValueError, match="Unknown config key 'total_percent'"):
        base.from_json(saved | {"total_percent": 50.0})
