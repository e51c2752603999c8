"""Descriptions of experiments: sums, units, changes that make an experiment fit, and the table of parameters."""

import re
import shlex

import jax
import numpy as np
import pytest

from lineage import launch
from lineage.configs import cli
from lineage.train.compiler.chips import CHIPS
from lineage.train.experiment import Experiment
from lineage.train.profiling.description import describe, duration, parameters
from lineage.train.profiling.estimates import experiment_budget, memory_per_device
from lineage.train.sharding import abstract_mesh

SIZES = {"": 1, "B": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def value(words):
    """Return a printed number with its unit."""
    number, unit = (words[0], words[1]) if len(words) > 1 else (words[0], "")
    return float(number.replace(",", "")) * SIZES[unit]


@pytest.mark.parametrize("changes", [{}, {"model.remat": "full", "grad_accum_steps": 2, "mesh.fsdp": 2}])
def test_rows_sum_to_their_totals(changes, tiny):
    text = describe(Experiment(tiny("gpt", changes)))
    sections = [part.splitlines() for part in text.split("\n\n")]
    checked = []
    for title, *lines in sections:
        if not lines or not title.endswith(("FLOPs", "bytes")) or "parameters" in title:
            continue
        rows = {
            line.split("  ")[1]: value(line.split()[-2:] if line.split()[-1] in SIZES else line.split()[-1:])
            for line in lines
        }
        total = rows.pop("total")
        assert sum(rows.values()) == pytest.approx(total, rel=0.01), title
        checked.append(title)
    assert len(checked) == 4
    table = [re.split(r"  +", line.strip()) for line in sections[0]]
    whole = next(row for row in table if row[0] == "total")
    parts = table[1 : table.index(whole)]
    assert sum(int(row[1].replace(",", "")) for row in parts if len(row) == 5) == int(whole[1].replace(",", ""))
    assert sum(value(row[-2].split()) for row in parts) == pytest.approx(value(whole[2].split()), rel=0.01)


def test_durations_have_readable_units():
    actual = [duration(seconds) for seconds in (1.4e-7, 2.5e-3, 0.25, 0.9996, 1, 112, 119.6, 121, 7100, 9000)]
    assert actual == ["0.14 µs", "2.5 ms", "250 ms", "1 s", "1 s", "112 s", "2 min", "2.02 min", "118 min", "2.5 h"]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"mesh.data": 4}, {}, {"model.remat": "full"}])
def test_smallest_changes_make_an_experiment_fit(changes):
    config, _ = cli.load("gpt2_openwebtext")
    cli.override(config, changes)
    text = describe(Experiment(config))
    actual = dict(re.findall(r"^  ([\w ]+): (--config.*?)$", text.partition("smallest change")[2], re.MULTILINE))
    sizes = {chip.name: chip.size for chip in CHIPS}
    assert "RTX 4090" in actual
    for name, flags in actual.items():
        changed = config.copy_and_resolve_references()
        own = [flag for flag in shlex.split(flags) if flag.startswith("--config.")]
        cli.override(changed, dict(flag.removeprefix("--config.").split("=") for flag in own))
        experiment, mesh = Experiment(changed), abstract_mesh(**changed.mesh)
        needed = memory_per_device(experiment, experiment_budget(experiment), mesh)["total"]
        assert needed <= sizes[name] * 1e9
        assert changed.loader.batch_size % (mesh.shape["data"] * mesh.shape["fsdp"] * changed.grad_accum_steps) == 0
        # Without any one of them, it does not fit.
        for left in own if mesh == abstract_mesh(**config.mesh) else ():
            fewer = config.copy_and_resolve_references()
            cli.override(fewer, dict(flag.removeprefix("--config.").split("=") for flag in own if flag != left))
            experiment = Experiment(fewer)
            assert memory_per_device(experiment, experiment_budget(experiment), mesh)["total"] > sizes[name] * 1e9


def test_nothing_is_changed_where_everything_fits(tiny):
    assert "smallest change" not in describe(Experiment(tiny("gpt")))


@pytest.mark.thorough
def test_table_of_parameters(tiny, capsys):
    experiment = Experiment(tiny("gpt", {"mesh.fsdp": 8, "mesh.data": 1}))
    header, *lines = parameters(experiment).splitlines()
    assert header.split() == ["parameter", "shape", "dtype", "sharding", "mean", "deviation"]
    rows = {line.split()[0]: re.split(r"  +", line.strip()) for line in lines}
    state = jax.jit(experiment.make_state)()
    assert len(rows) == len(jax.tree.leaves(state.params))
    up = state.params["stack"]["layers"]["mlp"]["up"]["kernel"]
    _, shape, dtype, sharding, mean, deviation = rows["stack/layers/mlp/up/kernel"]
    assert (shape, dtype) == ("2 x 16 x 64", "float32")
    assert "fsdp" in sharding
    assert float(mean) == pytest.approx(float(np.mean(up)), rel=0.01, abs=1e-6)
    assert float(deviation) == pytest.approx(float(np.std(up)), rel=0.01)
    assert rows["norm/scale"][1:] == ["16", "float32", "whole", "1", "0"]
    assert launch.main(["describe", "--config=tests/tiny.py:gpt", "--parameters"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == header.split()
