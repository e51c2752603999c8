"""Files of predictions and references to score.

A file has one text per line, or is a .jsonl of texts, lists of texts, or objects that have one of these as `prediction`
or `text`, and for references as `references`, `reference` or `text`; or it is a .json document in the format of COCO or
SQuAD. The tags of a sentence are a list, or separated by spaces. Files may be gzipped.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lineage.data.sources.lines import read_lines

PREDICTIONS, REFERENCES = ("prediction", "text"), ("references", "reference", "text")  # keys of objects in a .jsonl
Entries = Sequence[Any]  # texts, or lists of texts, of a file


def read(path: str, keys: Sequence[str] = ()) -> Any:
    """Return the entries of a file.

    Args:
        path: the file.
        keys: of objects, the first of these keys that an object has is its entry; () returns objects as they are.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, is not JSON, or an entry is neither a text nor a list of texts.
    """
    lines, suffix = read_lines(path), Path(path.removesuffix(".gz")).suffix
    if not lines:
        raise ValueError(f"{path} is empty: there is nothing to score.")
    if suffix not in (".json", ".jsonl"):
        return lines
    if suffix == ".json":
        rows = _parsed("\n".join(lines), path)
    else:
        rows = [_parsed(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    if not keys or isinstance(rows, dict):
        return rows
    for number, row in enumerate(rows):
        if isinstance(row, dict):
            rows[number] = row = next((row[key] for key in keys if key in row), None)
        if not isinstance(row, str) and not (isinstance(row, list) and all(isinstance(text, str) for text in row)):
            known = " or ".join(keys)
            raise ValueError(f"{path}, entry {number + 1} must be a text or texts, or an object with {known}.")
    return rows


def _parsed(text, where):
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
