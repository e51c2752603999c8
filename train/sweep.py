"""A sweep: the runs of a config's overrides one after another, each in a workdir of its own."""

import csv
import json
import signal
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from train import figures
from train.guard import PREEMPTED
from train.writers import read_metrics


def run_sweep(
    command: Sequence[str], overrides: Sequence[Mapping[str, Any]], configs: Sequence[Mapping[str, Any]], workdir: Path
) -> int:
    """Runs `command` with each of the overrides in `workdir/<what differs>`, and prints a table at the end.

    What is done is skipped, what was interrupted goes on; a run that fails does not keep the others from running.
    `workdir/sweep.csv` has the table, and `sweep.png` the test split's figures (or the validation split's), against the
    first key that differs, in a colour for each value of the next; seeds are dots around their mean.

    Args:
        command: the command line of a run without its workdir.
        overrides: config keys and values of each run.
        configs: the whole config of each run, as its `config.json` will have it.
        workdir: of the sweep.

    Returns:
        The exit code: 0 when every run is done, 75 when the sweep was told to stop, 1 otherwise.

    Raises:
        ValueError: there is nothing to run, or two runs have the same overrides.
    """
    names = [run_name(changes) for changes in overrides]
    if not names:
        raise ValueError("this config has no sweep(): it must yield a dict of overrides for each run.")
    if len(set(names)) < len(names):
        raise ValueError(f"two runs of the sweep are the same: {next(n for n in names if names.count(n) > 1)}.")
    codes: dict[str, int] = {}
    for number, (name, changes, config) in enumerate(zip(names, overrides, configs), start=1):
        folder = workdir / name
        print(f"\n[{number}/{len(names)}] {name}", flush=True)
        if is_done(folder, config):
            print("is done already", flush=True)
            codes[name] = 0
            continue
        settings = [f"--config.{key}={value}" for key, value in changes.items()]
        codes[name] = _run([*command, *settings, f"--workdir={folder}"])
        if codes[name] == PREEMPTED:
            break
    rows = [_row(name, changes, workdir / name, codes.get(name)) for name, changes in zip(names, overrides)]
    _write_table(rows, workdir / "sweep.csv")
    _draw([(changes, row) for changes, row in zip(overrides, rows) if row["state"] == "done"], workdir)
    if PREEMPTED in codes.values():
        return PREEMPTED
    return int(any(codes.values()))


def run_name(changes: Mapping[str, Any]) -> str:
    """A folder's name from what a run changes: "learning_rate=0.001,seed=1"."""
    parts = [f"{key.rpartition('.')[2]}={value}" for key, value in changes.items()]
    return ",".join(parts).replace("/", "_").replace(" ", "") or "base"


def is_done(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the run of this config came to its end in the folder: the facts that it wrote have the config."""
    return _facts(folder).get("config") == config


def _facts(folder):
    path = folder / "artifacts" / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _run(command):
    """The exit code of a command; the signal that would stop the sweep stops the command instead, which saves."""
    process = subprocess.Popen(command)
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    try:
        return process.wait()
    except KeyboardInterrupt:  # the terminal sent it to the command too
        return process.wait() or PREEMPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _row(name, changes, folder, code):
    state = {None: "not run", 0: "done", PREEMPTED: "stopped"}.get(code, f"failed ({code})")
    row = {"run": name, "state": state, **{key: str(value) for key, value in changes.items()}}
    if code == 0:
        row["seconds"] = f"{_facts(folder)['seconds']:.1f}"
        for line in read_metrics(folder):
            row |= {k: f"{v:.5g}" for k, v in line.items() if not k.startswith(("train/", "time/", "step"))}
    return row


def _draw(done, folder):
    kinds = [key for split in ("test/", "validation/") for _, row in done for key in row if key.startswith(split)]
    kinds = [kind for kind in dict.fromkeys(kinds) if kind.startswith(kinds[0][:4])]
    keys = [key for key in dict.fromkeys(key for changes, _ in done for key in changes) if key != "seed"]
    keys = [key for key in keys if len({str(changes.get(key)) for changes, _ in done}) > 1]
    if not kinds or not keys:
        return
    panels = {}
    for kind in kinds[:4]:
        runs = defaultdict(lambda: defaultdict(list))  # values by name and place
        for changes, row in done:
            place, name = (str(changes.get(key)) for key in (keys * 2)[:2])
            runs[name if len(keys) > 1 else kind][place].append(float(row.get(kind, "nan")))
        panels[kind] = {
            name: (list(places), np.array(list(zip_longest(*places.values(), fillvalue=np.nan))).T)
            for name, places in runs.items()
        }
    figures.save(figures.lines, panels, keys[0].rpartition(".")[2], name="sweep", folder=folder)


def _write_table(rows, path):
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
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
