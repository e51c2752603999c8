"""Durations: conversion of every unit to steps, and invalid durations."""

import pytest

from lineage.configs.durations import steps


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
        ({}, "exactly one of total_steps, total_epochs, total_examples, total_percent must be set"),
        ({"total_steps": 1, "total_epochs": 1.0}, "exactly one of total_steps, total_epochs must be set"),
        ({"total_steps": -1}, "total_steps is -1: a duration cannot be negative"),
        ({"total_percent": 5.0}, "total cannot be given in percent"),
        ({"total_epochs": 5.0}, "total_epochs needs the data"),
    ],
)
def test_invalid_duration_raises(given, message):
    with pytest.raises(ValueError, match=message):
        steps(given, "total", batch_size=10)
