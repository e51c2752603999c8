"""Readers of text files that have one example in each line."""

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_lines(path: str) -> list[str]:
    """Return the lines of a UTF-8 text file, which may be gzipped (.gz).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not UTF-8, or is a damaged gzip file.
    """
    opened: Any = gzip.open if path.endswith(".gz") else open
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            lines = [line.rstrip("\r") for line in file.read().split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}.") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}.") from None
    return lines if lines[-1] else lines[:-1]


def read_rows(
    path: str, keys: Sequence[str], *, columns: str, optional: str = "", others: str = ""
) -> list[tuple[str, ...]]:
    """Return the rows of a `.tsv` file, or of a `.jsonl` file of objects; either may be gzipped (.gz).

    Args:
        path: the file.
        keys: the keys of the objects, in the order of the columns.
        columns: the number of columns that a `.tsv` file must have, for the error message.
        optional: a key that may be missing.
        others: what other files are allowed, for the error message.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another suffix, or a line is not such a row; the message has its number.
    """
    suffix = Path(path.removesuffix(".gz")).suffix
    if suffix not in (".tsv", ".jsonl"):
        raise ValueError(f"{path} must be a .tsv or .jsonl file{others}.")
    needed = [key for key in keys if key != optional]
    rows = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        if suffix == ".tsv":
            row = line.split("\t")
            if not len(needed) <= len(row) <= len(keys):
                raise ValueError(f"{where} has {len(row)} columns: it must have {columns}.")
        else:
            row = _entries(line, keys, needed, where)
        rows.append(tuple(map(str, row)))
    return rows


def _entries(line: str, keys: Sequence[str], needed: Sequence[str], where: str) -> list[Any]:
    try:
        entry = json.loads(line)
        row = [entry[key] for key in keys if key in needed or key in entry]
        if None in row:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        names = " and ".join(f"`{key}`" for key in needed)
        raise ValueError(f"{where} must be a JSON object with {names}, none of them null.") from None
    return row
