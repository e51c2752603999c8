"""Text files, and the source text of Python's standard library."""

import ast
import os
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from lineage.configs.registry import Range
from lineage.data.content import Documents, PairedTexts
from lineage.data.sources.base import SOURCES, Source, SplitFiles
from lineage.data.sources.files import find_files, held_out


@SOURCES.register("text")
@dataclass(frozen=True)
class Text(SplitFiles):
    """UTF-8 text files; each file is a document.

    Attributes:
        path: training data: a file, a folder (read with its subfolders) or a glob.
        validation_path: validation data, likewise; "": hold out a part of the training text.
        test_path: test data, likewise; "": none.
        validation_fraction: fraction of the training text that is held out where there is no `validation_path`,
            by file if there are enough files; 0: none.
        max_bytes: maximum number of bytes to read for each split, in whole files; 0: no limit.
    """

    validation_fraction: Annotated[float, Range(0, below=1)] = 0.1
    max_bytes: Annotated[int, Range(0)] = 0

    def documents(self) -> dict[str, Documents]:
        texts = self.each(lambda path: _read_all(find_files(path), path, self.max_bytes))
        return _with_validation(texts, self.validation_fraction)


@SOURCES.register("stdlib")
@dataclass(frozen=True)
class StandardLibrary(Source):
    """Source text of the running Python's standard library without its tests; each module is a document.

    The pairs are functions without their docstrings, and the first lines of these.

    Attributes:
        validation_fraction: fraction of the modules that is held out for validation; 0: none.
        max_bytes: maximum number of bytes to read, in whole modules; 0: no limit.
    """

    validation_fraction: Annotated[float, Range(0, below=1)] = 0.1
    max_bytes: Annotated[int, Range(0)] = 0

    def documents(self) -> dict[str, Documents]:
        texts = _read_all(self._modules(), sysconfig.get_path("stdlib"), self.max_bytes)
        return _with_validation({"train": texts}, self.validation_fraction)

    def pairs(self) -> dict[str, PairedTexts]:
        splits: dict[str, PairedTexts] = {}
        for number, module in enumerate(_read_all(self._modules(), sysconfig.get_path("stdlib"), self.max_bytes)):
            split = "validation" if held_out(number, self.validation_fraction) else "train"
            for function, summary in _documented_functions(module):
                inputs, targets = splits.setdefault(split, PairedTexts([], []))
                inputs.append(function)
                targets.append(summary)
        return splits

    def files(self) -> list[str]:
        return [str(module) for module in self._modules()]

    def _modules(self) -> list[Path]:
        found: list[Path] = []
        for folder, names, modules in os.walk(sysconfig.get_path("stdlib")):
            names[:] = set(names) - {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
            # _sysconfigdata lists the paths and compiler flags of the machine that built Python.
            found += [Path(folder, name) for name in modules if name.endswith(".py") and name[:14] != "_sysconfigdata"]
        return sorted(found)


def _documented_functions(module: str) -> Iterator[tuple[str, str]]:
    """Yield each function of a module that has a docstring, without it, and the first line of the docstring."""
    lines = module.splitlines()
    for node in ast.walk(ast.parse(module)):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)) and len(node.body) > 1:
            first, rest = (
                lines[node.lineno - 1 : node.body[0].lineno - 1],
                lines[node.body[0].end_lineno : node.end_lineno],
            )
            yield textwrap.dedent("\n".join([*first, *rest])), text.splitlines()[0]


def _with_validation(texts: dict[str, list[str]], fraction: float) -> dict[str, Documents]:
    """Return documents by split; a `fraction` of the training texts is held out where there is no validation split."""
    if "validation" not in texts and fraction:
        texts["train"], texts["validation"] = hold_out(texts["train"], fraction)
    return {split: Documents(part) for split, part in texts.items()}


def hold_out(texts: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """Split texts into those for training and those for validation: an evenly spread fraction of them.

    If that would be none or all of them, the last `fraction` of the characters of each text is for validation.
    """
    held = held_out(np.arange(len(texts)), fraction)
    if held.any() and not held.all():
        return [text for text, out in zip(texts, held) if not out], [text for text, out in zip(texts, held) if out]
    cuts = [int(len(text) * (1 - fraction)) for text in texts]
    return [text[:cut] for text, cut in zip(texts, cuts)], [text[cut:] for text, cut in zip(texts, cuts)]


def _read_all(files: Sequence[Path], where: str, max_bytes: int) -> list[str]:
    """Return the texts of the first files that have at most `max_bytes` together (0: of all files)."""
    texts, size = [], 0
    for file in files:
        size += file.stat().st_size
        if max_bytes and size > max_bytes:
            break
        texts.append(read_text(file))
    if not files:
        raise FileNotFoundError(f"There is no text file at {where}.")
    if not any(texts):
        raise ValueError(f"There is no text in {where}{f' within max_bytes={max_bytes}' if max_bytes else ''}.")
    return texts


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file; an error has the offset of the first wrong byte."""
    content = Path(path).read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wrong = f"byte {content[error.start]:#04x} at offset {error.start} ({error.reason})"
        raise ValueError(f"{path} is not UTF-8 text: {wrong}.") from None
