"""What a sweep's runs came to, side by side: `sweep.csv`, `sweep.png` and a table in the terminal."""

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np

from train import figures
from train.follow import LOG, Run


def finish(runs: Sequence[Run], command: Sequence[str], folder: Path) -> None:
    """Writes `folder/sweep.csv` and `sweep.png`, and prints the table and why runs failed, each reason once."""
    rows = [row_of(run) for run in runs]
    write_table(rows, folder / "sweep.csv")
    draw([run for run in runs if run.state == "done"], folder)
    reasons = defaultdict(list)
    for run in runs:
        if run.state.startswith("failed"):
            reasons[run.error()].append(run)
    for reason, failed in reasons.items():
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        print(f"\n{failed[0].name}{others}: {reason or 'it left no message'} ({failed[0].folder / LOG})")


def results(run: Run) -> dict[str, float]:
    """The last value of each metric of its evaluations."""
    found = {key: value for line in run.metrics for key, value in line.items()}
    return {key: value for key, value in found.items() if not key.startswith(("train/", "time/", "step"))}


def row_of(run: Run) -> dict[str, str]:
    """A run's line of `sweep.csv`; what is not done has no results."""
    row = {"run": run.name, "state": run.state, **{key: str(value) for key, value in run.changes.items()}}
    if run.state == "done":
        row["seconds"] = f"{run.facts()['seconds']:.1f}"
        row |= {key: f"{value:.5g}" for key, value in results(run).items()}
    return row


def write_table(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Writes the rows as CSV, and prints them."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    shown = columns[1:]
    widths = [max(len(column), *(len(row.get(column, "")) for row in rows)) for column in shown]
    print()
    for row in [{column: column for column in shown}, *rows]:
        print("  ".join(row.get(column, "").ljust(width) for column, width in zip(shown, widths)).rstrip())
    print(f"\n{path}")


def draw(done: Sequence[Run], folder: Path) -> None:
    """`sweep.png`: up to four metrics of the test split, or else of the validation split, against the first key that
    differs, in a colour for each value of the next; seeds are dots around their mean."""
    found = dict.fromkeys(key for run in done for key in results(run))
    metrics = [key for key in found if key.startswith("test/")] or [key for key in found if key.startswith("validation/")]
    keys = [key for key in dict.fromkeys(key for run in done for key in run.changes) if key != "seed"]
    keys = [key for key in keys if len({str(run.changes.get(key)) for run in done}) > 1]
    if not metrics or not keys:
        return
    panels = {}
    for metric in metrics[:4]:
        values = defaultdict(lambda: defaultdict(list))  # by line and by place along it
        for run in done:
            place, line = str(run.changes.get(keys[0])), str(run.changes.get(keys[1])) if keys[1:] else metric
            values[line][place].append(results(run).get(metric, np.nan))
        panels[metric] = {
            line: (list(places), np.array(list(zip_longest(*places.values(), fillvalue=np.nan))).T)
            for line, places in values.items()
        }
    figures.save(figures.lines, panels, keys[0].rpartition(".")[2], name="sweep", folder=folder)
