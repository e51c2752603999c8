"""Helpers for writing sweeps and searches."""

import math
import statistics

import numpy as np
import pytest

from lineage.configs import cli
from lineage.configs.sweeps import Choice, Floats, Integers, axis, chain, product, repeat, samples, zipped


def test_combinations():
    depths, widths = axis("depth", (2, 4)), axis("width", (8, 16))
    assert list(product(depths, widths)) == [{"depth": depth, "width": width} for depth in (2, 4) for width in (8, 16)]
    assert list(zipped(depths, widths)) == [{"depth": 2, "width": 8}, {"depth": 4, "width": 16}]
    assert list(chain(depths, widths)) == [{"depth": 2}, {"depth": 4}, {"width": 8}, {"width": 16}]
    assert list(repeat(depths, seeds=2)) == [{"depth": depth, "seed": seed} for depth in (2, 4) for seed in (0, 1)]
    assert list(product(depths, zipped(widths, axis("name", "ab")))) == [
        {"depth": depth, "width": width, "name": name} for depth in (2, 4) for width, name in ((8, "a"), (16, "b"))
    ]
    with pytest.raises(ValueError, match="shorter"):
        list(zipped(depths, axis("width", (8,))))


def test_samples_are_deterministic_and_in_range():
    space = {
        "rate": Floats(1e-4, 1e-2, log=True),
        "decay": Floats(0.0, 1.0),
        "depth": Integers(1, 3),
        "width": Integers(1, 64, log=True),
        "name": Choice("vit", None, (1, 2)),
    }
    points = list(samples(space, 2000, seed=1))
    assert points == list(samples(space, 2000, seed=1))
    assert points != list(samples(space, 2000, seed=2))
    values = {key: [point[key] for point in points] for key in space}
    assert 1e-4 <= min(values["rate"]) < max(values["rate"]) <= 1e-2
    assert statistics.median(values["rate"]) == pytest.approx(1e-3, rel=0.15)
    assert statistics.median(values["decay"]) == pytest.approx(0.5, abs=0.05)
    assert all(600 < values["depth"].count(depth) < 740 for depth in (1, 2, 3))
    assert set(values["width"]) <= set(range(1, 65))
    expected = 2000 * math.log(1.5 / 0.5) / math.log(64.5 / 0.5)
    assert values["width"].count(1) == pytest.approx(expected, rel=0.15)
    assert set(values["name"]) == {"vit", None, (1, 2)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Floats(0, 1, log=True), "Floats has the bounds 0 and 1: .*, and above 0 because of log"),
        (lambda: Floats(math.nan, 1), "Floats has the bounds nan and 1: the first must be at most the second."),
        (lambda: Integers(5, 1), "Integers has the bounds 5 and 1: the first must be at most the second."),
        (lambda: Integers(0, 3, log=True), "Integers has the bounds 0 and 3: .*, and above 0 because of log"),
        (lambda: Floats(0, math.inf), "Floats has the bounds 0 and inf: their difference must be finite."),
        (lambda: Floats(-1e308, 1e308), "Floats has the bounds .*: their difference must be finite."),
        (lambda: Floats("0", "1"), "Floats has the bounds '0' and '1': they must be numbers."),
        (lambda: Integers(1.5, 4), "Integers has the bounds 1.5 and 4: they must be whole numbers."),
        (
            lambda: list(product(["seed"], axis("depth", (1,)))),
            "the run 'seed': it must be a dictionary of config keys.",
        ),
        (lambda: axis("seed", 5), "axis.. of seed has the values 5: they must be in a list."),
        (lambda: samples({"seed": 3}, 2), "samples.. of seed has 3: it must be Floats, Integers or a Choice."),
        (lambda: Choice(), "Choice.. has no values: it must have at least one."),
        (lambda: Choice(1, "1").suggest(None, "seed"), "seed has the choices 1 and '1': their texts must differ."),
    ],
)
def test_invalid_ranges_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_values_of_numpy_are_those_of_python(tmp_path):
    """Check values as in np.logspace, also in a tuple, whose text is the value on the command line of a run."""
    path = tmp_path / "config.py"
    path.write_text(
        "import numpy as np\n"
        "from lineage.configs import base\n"
        "def get_config():\n"
        "    return base.get_config('vit', 'image_classification', 'digits')\n"
        "def sweep():\n"
        "    for rate, seed in zip(np.logspace(-2, -1, 2), np.arange(2)):\n"
        "        yield {'schedule.learning_rate': rate, 'seed': seed, 'init.layers': (seed,)}\n"
    )
    config, overrides = cli.load(str(path))
    rates = [0.01, 0.1]
    assert repr(overrides) == repr(
        [{"schedule.learning_rate": rates[i], "seed": i, "init.layers": (i,)} for i in (0, 1)]
    )
    cli.override(config, overrides[1])
    assert config.init.layers == (1,)
    assert repr(Choice(*np.array(rates)).values) == repr(tuple(rates))
