"""Curves of a metric in the runs of a sweep, with a line for each value of a key.

    python -m benchmarks.sweep_curves outputs/optimizers --key=optimizer.name --metric=validation/loss

Runs with the same value, such as those of several seeds, are dots around the line of their mean. The program prints the
last values and draws `sweep_curves.png` in the folder of the sweep.
"""

import argparse
import json
import statistics
from collections import defaultdict
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from lineage.report import figures
from lineage.runs.folder import CONFIG, METRICS, flatten, parse_metrics, read_json

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's, for color-blind readers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="folder of the sweep")
    parser.add_argument("--key", required=True, help="dotted key of the config that distinguishes the lines")
    parser.add_argument("--metric", default="validation/loss", help="metric as in metrics.jsonl")
    options = parser.parse_args()
    points = defaultdict(list)
    for config in sorted(options.sweep.glob(f"*/{CONFIG}")):
        lines = [line for line in parse_metrics(config.parent / METRICS) if options.metric in line]
        points[flatten(read_json(config))[options.key]].append([(line["step"], line[options.metric]) for line in lines])
    curves = {name: np.array(runs) for name, runs in points.items()}
    curves = dict(sorted(curves.items(), key=lambda curve: curve[1][:, -1, 1].mean()))
    for name, runs in curves.items():
        last = runs[:, -1, 1].tolist()
        print(json.dumps({options.key: name, "mean": statistics.mean(last), "runs": last}))
    figures.save(draw, curves, options.metric, name="sweep_curves", folder=options.sweep)
    print(options.sweep / "sweep_curves.png")


def draw(curves: dict[str, np.ndarray], metric: str) -> Figure:
    """Return a figure of curves [runs, evaluations, 2] of pairs of a step and a value."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel=metric)
    for (name, runs), color in zip(curves.items(), cycle(COLORS)):
        axes.plot(runs[..., 0].T, runs[..., 1].T, "o", color=color, markersize=3)
        axes.plot(*runs.mean(axis=0).T, color=color, linewidth=1.4, label=name)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
