"""Verification of runs: read and check every file of a run, without writing anything."""

import contextlib
import csv
import dataclasses
import errno
import hashlib
import json
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lineage.configs import cache
from lineage.configs.atomic import MAX_DATA, regular, unsealed
from lineage.data import shards, tokenizers
from lineage.data.facts import FACTS
from lineage.runs import data_record, folder
from lineage.runs.folder import ARTIFACTS, CONFIG, DATA, METRICS, SAMPLES, START, STORAGE, read_json
from lineage.runs.locks import held
from lineage.runs.process import printable, say
from lineage.train.metrics_writer import check_events, history_problem
from lineage.train.reading import DESCRIPTION, check_description, read_fields
from lineage.train.step import TrainState

ATTEMPTS = 5  # attempts, a second apart, to read a file that a run in progress may be replacing or deleting
Check = Callable[[Path], Any]  # raises an exception if a file or folder is damaged


class Finding(NamedTuple):
    """Result of a check: a file or folder and its problem, "" if it is sound."""

    path: Path
    problem: str


def verify(folders: Iterable[Path], as_json: bool = False) -> int:
    """Check all runs in the given folders, and print a line for each of their files or folders.

    Args:
        as_json: print a list of objects with the keys `path`, `sound` and `problem` instead.

    Returns:
        0 if all files are sound, 1 otherwise.

    Raises:
        FileNotFoundError: a folder has no run.
    """
    problems: dict[Path, str] = {}
    for place in folders:
        unread: list[OSError] = []
        runs = list(runs_below(place, unread.append))
        hidden = [Finding(Path(error.filename), str(error)) for error in unread if error.errno != errno.ENOENT]
        if not (runs or hidden):
            raise FileNotFoundError(f"there is no run in {place}.")
        results = chain(*(check_run(run, problems) for run in runs), _check_pages(place, runs, problems))
        for path, problem in chain(hidden, results):
            problems[path] = problem
            if not as_json:
                print(printable(f"{path}: {problem or 'sound'}"), flush=True)
    if as_json:
        print(json.dumps([{"path": str(path), "sound": not why, "problem": why} for path, why in problems.items()]))
    bad = sum(map(bool, problems.values()))
    say(f"{len(problems) - bad} of {len(problems)} are sound")
    return int(bad > 0)


def runs_below(place: Path, onerror: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Yield the folder if it contains a run, or else the folders of the runs below it.

    Folders that cannot be read are left out; `onerror` is called with the error of each.
    """
    for current, folders, files in os.walk(place, onerror=onerror):
        if "checkpoints" in folders or {METRICS, START} & {*files}:
            folders.clear()
            yield Path(current)
        folders.sort()


def _check_pages(place: Path, runs: Iterable[Path], known: Mapping[Path, str]) -> Iterator[Finding]:
    """Yield a finding for each page, table, list of jobs and search of several runs, from `place` down to a run."""
    places = {place, *(parent for run in runs for parent in (run, *run.parents) if parent.is_relative_to(place))}
    checks: dict[str, Check] = {"compare.html": _check_page, "sweep.html": _check_page, "sweep.csv": _check_table}
    checks |= {"slurm/jobs.json": _object, "slurm/configs.json": _object, STORAGE: _check_journal}
    for path, check in ((root / name, check) for root in sorted(places) for name, check in checks.items()):
        if os.path.lexists(path) and path not in known:
            yield Finding(path, _problem(path, check))


def check_run(run: Path, known: Mapping[Path, str]) -> Iterator[Finding]:
    """Yield a finding for each file of a run, which may be in progress, and for its token cache.

    Paths in `known` are not checked again.
    """
    try:
        checks = list(_checks(run))
    except OSError as error:  # a folder cannot be read
        yield Finding(Path(error.filename or run), str(error))
        return
    for path, check, needed in checks:
        if path in known:
            continue
        for attempt in range(ATTEMPTS if held(run) else 1):
            time.sleep(min(attempt, 1))
            problem = _problem(path, check)
            if not problem or not os.path.lexists(path):
                break
        if os.path.lexists(path) or needed:
            yield Finding(path, problem)


def _checks(run: Path) -> Iterator[tuple[Path, Check, bool]]:
    """Yield each path of a run with its check, and whether it must exist."""
    saved = folder.checkpoints(run)
    yield run / CONFIG, _check_config, True
    for name, check in ((START, _object), (DATA, _check_data), (FACTS, _check_data), (METRICS, _check_history)):
        yield run / name, check, bool(saved)
    yield run / tokenizers.FILE, _check_tokenizer, tokenizers.FILE in _read(run / DATA)
    for path in saved:
        yield path, _check_checkpoint, False
    if not saved and _read(run / ARTIFACTS / folder.FACTS).get("steps"):
        yield run / "checkpoints", _no_checkpoint, True
    yield run / ARTIFACTS / SAMPLES, _check_samples, False
    for pattern, check in (
        (f"{ARTIFACTS}/*.json", _object),
        (f"{ARTIFACTS}/*.npz", _check_arrays),
        ("*.html", _check_page),
        ("events.out.tfevents.*", check_events),
    ):
        for path in sorted(run.glob(pattern)):
            yield path, check, False
    task = _read(run / CONFIG).get("task")
    place = task.get("cache_dir") if isinstance(task, dict) else None
    if isinstance(place, str) and (place or os.environ.get("LINEAGE_CACHE") != ""):
        place = Path(place or cache.root() / "tokens")
        for path in sorted(place.glob(f"*/{shards.INDEX}")) if place.is_dir() else ():
            yield path.parent, shards.verify, False


def _problem(path: Path, check: Check) -> str:
    """Describe the problem of a path in one line; "" if it is sound."""
    try:
        if not path.exists():
            return "is missing"
        for file in chain([path], path.rglob("*")):
            regular(file)
        check(path)
    except Exception as error:  # damaged files raise exceptions of many types
        return " ".join(str(error).split())[:300] or type(error).__name__
    return ""


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if it is missing or damaged, which another check reports."""
    with contextlib.suppress(ValueError, OSError):
        return read_json(path)
    return {}


def _check_checkpoint(path: Path) -> None:
    check_description(path / DESCRIPTION)
    for field in dataclasses.fields(TrainState):  # one at a time, which needs less memory
        read_fields(path, (field.name,))
    for file in sorted(path.glob("state/array_metadatas/*")):  # read only for arrays that are placed on devices
        _check_sizes(file)


def _check_sizes(path: Path) -> None:
    """Raise ValueError for a damaged file of the sizes of shards, which Orbax reads when a run resumes."""
    try:
        _object(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _no_checkpoint(path: Path) -> None:
    raise ValueError("the run has finished, but has no checkpoint")


def _check_config(path: Path) -> None:
    """Check that a config equals the newest checkpoint's, except for keys that may change when a run resumes."""
    if changed := folder.changed_since_checkpoint(path.parent):
        raise ValueError(f"{', '.join(changed[:4])} differ from the config of the newest checkpoint")


def _check_data(path: Path) -> None:
    _object(path)
    if not data_record.matches_checkpoint(path):
        raise ValueError("it is not that of the newest checkpoint")


def _check_history(path: Path) -> None:
    if problem := history_problem(path, folder.newest_record(path.parent)):
        raise ValueError(problem)


def _check_samples(path: Path) -> None:
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, folder.MAX_LINE), b""), 1):
            if line.endswith(b"\n"):  # the last line is incomplete if the process was killed while writing
                unsealed(folder.parse_line(line, path, number))


def _check_tokenizer(path: Path) -> None:
    _object(path)
    if (known := _read(path.parent / DATA).get(path.name)) and known != hashlib.sha256(path.read_bytes()).hexdigest():
        raise ValueError(f"its SHA-256 is not that in {DATA}")


def _object(path: Path) -> None:
    if not isinstance(record := json.loads(regular(path, MAX_DATA).read_text(encoding="utf-8")), dict):
        raise ValueError("it is not a JSON object")
    unsealed(record)


def _check_arrays(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        if bad := archive.testzip():  # by its checksum
            raise ValueError(f"{bad} is damaged")


def _check_table(path: Path) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, strict=True))
    if len({*map(len, rows)}) != 1 or not path.read_bytes().endswith(b"\n"):
        raise ValueError("its rows are not complete: `lineage sweep` writes it again")


def _check_journal(path: Path) -> None:
    *lines, _ = regular(path, MAX_DATA).read_bytes().split(b"\n")  # a kill may cut the last line, which is dropped
    if not lines:
        raise ValueError("it has no records: `lineage sweep` chooses the values of the search again")
    for number, line in enumerate(lines, 1):
        try:
            _ = json.loads(line)["op_code"]
        except (ValueError, TypeError, LookupError):
            raise ValueError(f"line {number} is not a record of Optuna: restore the file, or delete it") from None


def _check_page(path: Path) -> None:
    page, comment, _ = path.read_bytes().rpartition(b"<!-- SHA-256 ")
    if not comment or path.read_bytes() != folder.sealed_page(page):
        advice = "`lineage report` or `lineage sweep` writes the page again"
        raise ValueError(f"its SHA-256, a comment at its end, does not match: {advice}")
