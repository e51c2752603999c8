"""Record of the data of a run, which must stay the same while the run goes on. Uses only the standard library."""

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lineage.configs import storage
from lineage.configs.atomic import MAX_DATA, regular, sealed, write_record
from lineage.runs.folder import CONFIG, DATA, DATA_FACTS, FORCE, last_step, newest_record, read_json

CHECKSUMS = {DATA: "data", DATA_FACTS: "facts"}  # keys of the checksums in the records of checkpoints


def keep(files: Mapping[str, Any], workdir: Path, force: bool = False, teacher: str | None = None) -> None:
    """Write `data.json`, the fingerprints of the data files; raise ValueError if they have changed, unless `force`.

    `teacher` is that of the config; None: of `config.json`.
    """
    path, run_files = workdir / DATA, _run_files(workdir, teacher)
    files = {**files, **run_files}
    if last_step(workdir) and not force:
        before = read_json(path)
        _check_record(before or files, workdir)
        if before and before.keys() <= run_files.keys():  # earlier versions recorded no files of data sets of TFDS
            before |= {name: files[name] for name in files.keys() - run_files.keys()}
        names = differing(before, files)
        if before and names:
            named = [str(workdir / name) if name == "tokenizer.json" else name for name in names[:3]]
            number = f"{len(names)} of {len({**before, **files})} files"
            raise ValueError(
                f"{', '.join(named)} changed since the run in {workdir} began ({number}): restore the data or "
                f"{path}, choose another workdir, or {FORCE}."
            )
    write_record(path, files)


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of the files whose fingerprints differ, or that are only in one of two records."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def differing_between(workdirs: Iterable[Path]) -> list[str]:
    """Return the names of the files of data and of teachers that changed between runs that read the same files.

    Damaged records are ignored.
    """
    names, first = dict[str, None](), dict[frozenset[str], Mapping[str, Any]]()
    for workdir in workdirs:
        with contextlib.suppress(OSError, ValueError):
            files = {name: value for name, value in read_json(workdir / DATA).items() if name != "tokenizer.json"}
            names |= dict.fromkeys(differing(first.setdefault(frozenset(files), files), files))
    return [*names]


def changed(files: Mapping[str, Any], workdir: Path) -> list[str]:
    """Return the names of the data files, and of those of the teacher, that are not those in `data.json`.

    Of large files, a part is read that depends on the others: if some are missing, only the sizes are compared.
    """
    record, own = read_json(workdir / DATA), _run_files(workdir)
    before = {name: value for name, value in record.items() if isinstance(value, list)}
    compared = slice(None) if before.keys() <= files.keys() else slice(1)
    names = [name for name, value in files.items() if before and before.get(name, [])[compared] != value[compared]]
    return names + [name for name, value in record.items() if isinstance(value, str) and own.get(name) != value]


def checksums(workdir: Path) -> dict[str, int]:
    """Return the checksums of `data.json` and `facts.json`, for the records of checkpoints."""
    return {key: sealed(read_json(workdir / name))["crc32"] for name, key in CHECKSUMS.items()}


def matches_checkpoint(path: Path) -> bool:
    """Return whether `data.json` or `facts.json` in a run folder is that of the newest checkpoint, if any."""
    return newest_record(path.parent).get(CHECKSUMS[path.name]) in (None, sealed(read_json(path))["crc32"])


def check(workdir: Path) -> None:
    """Raise ValueError unless the tokenizer and the metadata of the data are those of the newest checkpoint."""
    path, data = workdir / "tokenizer.json", workdir / DATA
    advice = f"restore it, let the command `train` write it again, or {FORCE}"
    known = read_json(data, advice)
    if path.is_file() and path.name not in known:
        raise ValueError(f"{data}, which has the SHA-256 of {path.name}, is missing or incomplete: {advice}.")
    if (_digest(regular(path, MAX_DATA)) if path.is_file() else None) != known.get(path.name):
        raise ValueError(f"{path} is damaged or missing: its SHA-256 is not that in {DATA}.")
    _check_record(known, workdir)
    if not matches_checkpoint(workdir / DATA_FACTS):
        raise ValueError(f"{workdir / DATA_FACTS} is not that of the newest checkpoint in {workdir}: {advice}.")


def _check_record(known, workdir):
    """Raise ValueError if the newest checkpoint is that of a run on other data than those with `known` fingerprints."""
    if known and newest_record(workdir).get("data") not in (None, sealed(known)["crc32"]):
        raise ValueError(
            f"the newest checkpoint in {workdir} is that of a run on other data: restore the data and {workdir / DATA} "
            f"of that run, choose another workdir, or {FORCE}."
        )


def model_files(path: str) -> dict[str, str]:
    """Return the SHA-256 of the files of a model by name: of a run's newest checkpoint, a folder or a single file."""
    root = Path(storage.local(path))
    record = root / "checkpoints" / str(last_step(root)) / "about"  # has checksums of the weights
    files = [root, root / CONFIG, *sorted(root.glob("*.safetensors")), *sorted(record.glob("**/*"))]
    return {storage.name(file): _digest(file) for file in files if file.is_file()}


def _run_files(workdir, teacher=None):
    """Return the SHA-256 of the tokenizer in a run folder, and of the files of its teacher, if any."""
    tokenizer = regular(workdir / "tokenizer.json", MAX_DATA)
    teacher = read_json(workdir / CONFIG).get("teacher") if teacher is None else teacher
    own = {tokenizer.name: _digest(tokenizer)} if tokenizer.is_file() else {}
    return own | (model_files(teacher) if teacher else {})


def _digest(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
