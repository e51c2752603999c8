"""Files of a run folder, and checks before the folder is used. Uses only the standard library."""

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lineage.configs import storage
from lineage.configs.atomic import MAX_DATA, MAX_JSON, absolute, regular, sealed, unsealed, write_atomic

CONFIG = "config.json"
METRICS = "metrics.jsonl"
STORAGE = "optuna.journal"  # in the folder of a search
ARTIFACTS = "artifacts"
FACTS = "run.json"  # in ARTIFACTS, written at the end of a run
SAMPLES = "samples.jsonl"  # in ARTIFACTS, generated texts
PARAMETERS = "parameters.txt"  # a table, written before the first step
START = "run.json"  # in the folder itself, written at the start of a run
DATA = "data.json"  # the fingerprints of the data files
DATA_FACTS = "facts.json"  # metadata of the data, see `lineage.data.Facts`
# Files of a run that, in a folder without a run, may belong to somebody else.
RUN_FILES = (CONFIG, START, METRICS, PARAMETERS, DATA, DATA_FACTS, "tokenizer.json", "report.html")

# Files in ARTIFACTS, by the patterns of their names.
PATTERNS = (FACTS, "cost.json", SAMPLES, "written_*.json")
PATTERNS += tuple(f"{name}_*.npz" for name in ("attention", "confusion", "mistakes", "objects", "painted", "precision"))

MAX_LINE = 10**7  # bytes of a line of metrics or samples
MEASURED = ("time/", "system/")  # prefixes of the metrics that differ between runs of the same config
FORCE = "--force-config (in Python, force_config=True)"

# Prefixes of the keys that may change when a run is resumed: its length, when it evaluates and saves, and the devices
# and processes that it uses. A test checks that each is the prefix of a key.
MAY_CHANGE = (
    "checkpoint.",
    "cluster.",
    "evaluate_every_",
    "evaluators.",
    "experts.",
    "grad_accum_steps",
    "imports",
    "loader.evaluation_batch_size",
    "loader.threads",
    "loader.workers",
    "log_every_",
    "mesh.",
    "model.attend",
    "model.remat",
    "model.unroll",
    "sampling.",
    "save_every_",
    "sharding",
    "step_timeout_minutes",
    "task.cache_dir",
    "task.no_answer_threshold",
    "task.unanswerable",
    "total_",
    "wandb",
    "weights",
)


def make(workdir: Path) -> None:
    """Create the folder of a run if it does not exist; raise OSError or ValueError if it cannot be used."""
    if files := [path for path in (workdir, *workdir.parents) if os.path.lexists(path) and not path.is_dir()]:
        kind = "a file" if files[0].exists() else "a link to a missing folder"
        raise NotADirectoryError(f"the workdir is {workdir}, but {files[0]} is {kind}: choose another workdir.")
    if (workdir / ARTIFACTS).is_symlink():  # in somebody else's folder, it may lead to the files of another run
        raise ValueError(f"{workdir / ARTIFACTS} is a link, and files in it would be replaced: delete the link.")
    if bad := {*"*?[\\"} & {*str(absolute(workdir))}:  # Orbax takes it for a pattern, and would lose checkpoints
        raise ValueError(f"the workdir {absolute(workdir)} has {min(bad)!r} in its path: choose another workdir.")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=workdir).close()
    except OSError as error:
        raise OSError(f"the workdir {workdir} cannot be written ({error.strerror}): choose another one.") from None


def read_json(path: Path, advice: str = "restore it, or move it away to continue without it") -> dict[str, Any]:
    """Return the object in a JSON file of a run, {} if the file does not exist; raise ValueError if it is damaged."""
    try:
        content = regular(path, MAX_DATA if path.name in (DATA, DATA_FACTS) else MAX_JSON)
        return unsealed(dict(json.loads(content.read_text(encoding="utf-8")))) if path.exists() else {}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): {advice}.") from None


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the lines of `workdir/metrics.jsonl` in order, without an incomplete last line; null is returned as NaN.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged; the message names the line.
    """
    lines = parse_metrics(Path(workdir) / METRICS)
    return [{key: math.nan if value is None else value for key, value in line.items()} for line in lines]


def without_nan(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics with None, in JSON null, instead of NaN and infinity, which JSON lacks."""
    return {key: value if math.isfinite(value) else None for key, value in metrics.items()}


def parse_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file of metrics or samples, without an incomplete last line; null is None."""
    with regular(path).open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE), b""), 1):
            try:
                yield parse_line(line, path, number)
            except ValueError:
                if file.peek(1):  # the last line is incomplete if the process was killed while writing
                    raise


def parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Return a line of a file of metrics or samples; raise ValueError if it is damaged."""
    if len(line) == MAX_LINE:
        raise ValueError(f"{path}, line {number}, has more than {MAX_LINE:,} bytes.")
    try:
        parsed = json.loads(line)
        if type(parsed["step"]) is not int:
            raise TypeError("the step is not an integer")
        return parsed
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(
            f"{path}, line {number}, is not a JSON object with an integer `step`: {line[:60]!r}."
        ) from None


class DamagedError(ValueError):
    """Exception raised for a checkpoint that is provably damaged, or belongs to another model."""


class UnknownMetricError(ValueError):
    """Exception raised if `checkpoint.best` is not the name of a metric of the run."""


def sealed_page(page: bytes) -> bytes:
    """Return an HTML page with its SHA-256 in a comment at its end."""
    return page + f"<!-- SHA-256 {hashlib.sha256(page).hexdigest()} -->\n".encode()


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Return the record in the folder of a checkpoint.

    Raises:
        DamagedError: the record is missing or damaged.
        ValueError: the record was written by an earlier version.
    """
    path = checkpoint / storage.RECORD
    try:
        record = dict(json.loads(regular(path, MAX_DATA).read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedError(f"the checkpoint {checkpoint} is damaged: {path} cannot be read ({error})") from None
    if "checksums" in record:
        raise ValueError(
            f"the checkpoint {checkpoint} has sums of bits instead of hashes: it was written by an earlier version, "
            "and can be read only with that version."
        )
    if record.pop("crc32", None) != sealed(record)["crc32"]:
        raise DamagedError(f"the checkpoint {checkpoint} is damaged: the checksum of {path} does not match")
    if odd := _odd_entries(record):
        raise DamagedError(f"the checkpoint {checkpoint} is damaged: {path} has an unusable entry {odd[0]!r}")
    if "next_batch" in record and checkpoint.name.isdecimal() and record["next_batch"] != int(checkpoint.name):
        step = str(record["next_batch"])[:60]
        raise DamagedError(f"the checkpoint {checkpoint} is damaged: {path} is the record of step {step}")
    return record


def _odd_entries(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the entries of a checkpoint's record that have unexpected types or values."""
    config, metrics, averages = (record.get(name, {}) for name in ("config", "metrics", "averages"))
    sound = {
        "config": isinstance(config, dict),
        "metrics": isinstance(metrics, dict) and all(map(_is_number, metrics.values())),
        "averages": isinstance(averages, dict) and all(map(_is_average, averages.values())),
        "lines": type(lines := record.get("lines", 0)) is int and 0 <= lines < 1 << 63,
    }
    return [name for name, is_sound in sound.items() if not is_sound]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_average(value: Any) -> bool:
    """Return whether a value consists of a total and a number of values, see `Log`."""
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def last_step(workdir: Path) -> int:
    """Return the step of the newest checkpoint in a run folder; 0 if there is none."""
    return max((int(path.name) for path in checkpoints(workdir)), default=0)


def checkpoints(workdir: Path) -> list[Path]:
    """Return the folders of the checkpoints in a run folder, oldest first.

    Raises OSError if they cannot be listed: otherwise, a run would take them for missing and start anew.
    """
    place = workdir / "checkpoints"
    try:
        paths = [place / name for name in os.listdir(place) if name.isdecimal()]  # `glob` hides errors
    except (FileNotFoundError, NotADirectoryError):
        if os.path.lexists(place):
            problem = "is neither a folder nor a link to one that exists: restore it"
            raise NotADirectoryError(f"{place} {problem}.") from None
        return []
    return sorted((path for path in paths if path.is_dir()), key=lambda path: int(path.name))


def plain(config: Any) -> dict[str, Any]:
    """Return a `ConfigDict` as a dictionary in the form of `config.json`."""
    return json.loads(config.to_json_best_effort())


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dictionaries with their dotted keys."""
    if len(prefix) > 300:
        raise ValueError(f"the keys that begin with {prefix[:40]}... are too long or nested too deeply")
    leaves = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping) and value
        leaves |= flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return leaves


def keep_config(config: Any, workdir: Path, force: bool = False, earlier: Any = None, write: bool = True) -> None:
    """Write `config.json`; raise ValueError if the folder has a run of another config, unless `force`.

    Without `write`, the file is not written.
    """
    if last_step(workdir) and not force:
        check_config(config, workdir, earlier, also=("experts.",))  # which determine the initial parameters
    if write:
        write_atomic(workdir / CONFIG, _text(config))


def check_results(config: Any, workdir: Path) -> None:
    """Raise ValueError if a run of this config would replace the results of another one, whose checkpoints are lost."""
    before = {}
    with contextlib.suppress(OSError, ValueError):  # a damaged file is replaced
        before = read_json(workdir / ARTIFACTS / FACTS).get("config")
    if changed := isinstance(before, dict) and differences(before, plain(config), also=("total_",)):
        given = f"{workdir} has the results of a run of another config ({changed}) but not its checkpoints"
        raise ValueError(f"{given}: restore them, choose another workdir, or {FORCE}.")


def is_run_config(config: Mapping[str, Any]) -> bool:
    """Return whether the content of a `config.json` is the config of a run, and not that of another program."""
    return {"model", "task"} <= config.keys()


def discard(workdir: Path, force: bool = False) -> None:
    """Delete the files of a run without checkpoints that a new run must not read, such as its tokenizer.

    Raises:
        ValueError: there are files of a run but no `config.json` of one, and `force` is False.
    """
    existing, advice = [name for name in RUN_FILES if (workdir / name).exists()], f"choose another workdir, or {FORCE}"
    if existing and not force and not is_run_config(read_json(workdir / CONFIG, f"restore it, {advice}")):
        raise ValueError(f"{workdir / existing[0]} does not belong to a run: {advice}.")
    for name in ("tokenizer.json", DATA_FACTS):
        (workdir / name).unlink(missing_ok=True)


def discard_artifacts(workdir: Path) -> None:
    """Delete the artifacts of a run without checkpoints, which would be taken for those of a new run in its folder."""
    for path in [path for pattern in PATTERNS for path in (workdir / ARTIFACTS).glob(pattern)]:
        path.unlink(missing_ok=True)


def check_shared(config: Any, workdir: Path, process: int) -> None:
    """Raise ValueError unless this process has the same config and folder as process 0, which wrote `config.json`."""
    path = workdir / CONFIG
    if not path.exists() or path.read_text(encoding="utf-8") != _text(config):
        raise ValueError(
            f"{path} of process {process} differs from that of process 0: every process must be given the same "
            "command and a workdir on shared storage."
        )


def _text(config):
    return json.dumps(plain(config), indent=2)


def check_config(config: Any, workdir: Path, earlier: Any = None, also: Sequence[str] = ()) -> None:
    """Raise ValueError unless the run has this config, or as `earlier` versions wrote it.

    For `also` and the keys that are not compared, see `differences`.
    """
    # If no record is left, the checkpoints cannot be restored either.
    if changed := differences(saved_config(workdir), plain(config), plain(earlier or config), also):
        raise ValueError(f"{workdir} holds a run of another config ({changed}): choose another workdir, or {FORCE}.")


def differences(
    before: Mapping[str, Any],
    config: Mapping[str, Any],
    earlier: Mapping[str, Any] | None = None,
    also: Sequence[str] = (),
) -> str:
    """Return the first differences of a run's config from the one it had `before`, apart from `MAY_CHANGE`.

    The prefixes in `also`, which are some of `MAY_CHANGE`, are compared, too. The result is "" if there are no
    differences, or if the config before is not known, {}. See `check_config` for `earlier`.
    """
    before, now, other = map(flatten, (before, config, earlier or config))
    ignored = tuple(prefix for prefix in MAY_CHANGE if prefix not in also)
    changed = [
        f"{key} was {', is '.join(_excerpts(before.get(key), now.get(key)))}"
        for key in {**before, **now}
        # A key that only the new config has is ignored while it is off (0, False, "" or None).
        if before.get(key) not in (now.get(key), other.get(key)) and not key.startswith(ignored)
        if key in before or now[key]
    ]
    return "; ".join(changed[:4]) if before else ""


def _excerpts(*values: Any) -> list[str]:
    """Return values as texts of about 200 characters, which include the first difference."""
    texts = list(map(repr, values))
    first = next((place for place, characters in enumerate(zip(*texts)) if len({*characters}) > 1), 0)
    start = max(min(first - 100, max(map(len, texts)) - 200), 0)
    return [f"{'...' * (start > 0)}{text[start : start + 200]}" for text in texts]


def saved_config(workdir: Path) -> dict[str, Any]:
    """Return the config in the newest intact checkpoint record, else that in `config.json`, else {}."""
    return newest_record(workdir).get("config") or read_json(workdir / CONFIG)


def changed_since_checkpoint(workdir: Path) -> list[str]:
    """Return the keys in `config.json` that differ from the newest checkpoint's config, apart from `MAY_CHANGE`."""
    current, saved = flatten(read_json(workdir / CONFIG)), flatten(newest_record(workdir).get("config", {}))
    return [key for key in saved if current.get(key) != saved[key] and not key.startswith(MAY_CHANGE)]


def newest_record(workdir: Path) -> dict[str, Any]:
    """Return the newest intact checkpoint record in a run folder, {} if there is none."""
    for checkpoint in reversed(checkpoints(workdir)):
        with contextlib.suppress(DamagedError):
            return read_record(checkpoint)
    return {}
