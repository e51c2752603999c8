"""Text files, and the source text of Python's standard library."""

import ast
import codecs
import os
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated

import numpy as np

from lineage.configs.registry import Natural, Needs, Rate
from lineage.data.content import PairedTexts
from lineage.data.documents import Documents
from lineage.data.fingerprint import identity
from lineage.data.sources.base import SOURCES, Source, SplitFiles
from lineage.data.sources.files import distinct, find_files, held_out, split_in


@SOURCES.register("text")
@dataclass(frozen=True)
class Text(SplitFiles):
    """UTF-8 text files; each file is a document.

    Attributes:
        path: training data: a file, a folder (read with its subfolders) or a glob.
        validation_path: validation data: a file, a folder or a glob; "": hold out a part of the training text.
        test_path: test data: a file, a folder or a glob; "": none.
        validation_fraction: fraction of the training text that is held out where there is no `validation_path`,
            by file if there are enough files; 0: none.
        max_bytes: maximum number of bytes to read for each split, in whole files; 0: no limit.
    """

    validation_fraction: Annotated[Rate, Needs("validation_path", ("",))] = 0.1
    max_bytes: Natural = 0

    def notes(self) -> Iterator[str]:
        """Yield a note if the names of the training files, as those of WikiText, are those of several splits."""
        files = find_files(self.copied().path)
        root = os.path.commonpath(files) if files else ""
        splits = {split_in(root, file) for file in files} - {""}
        if "train" in splits and (others := ", ".join(sorted(splits - {"train"}))):
            yield (
                f"all files of {self.path} are training data, also those named after other splits ({others}): "
                "give the files of each split in source.path, source.validation_path and source.test_path."
            )

    def documents(self) -> dict[str, Documents]:
        files = self.each(lambda path: _within(distinct(find_files(path)), path, self.max_bytes))
        return _documents(files, self.validation_fraction)


@SOURCES.register("stdlib")
@dataclass(frozen=True)
class StandardLibrary(Source):
    """Source text of the running Python's standard library without its tests; each module is a document.

    The pairs are functions without their docstrings, and the first lines of the docstrings.

    Attributes:
        validation_fraction: fraction of the modules that is held out for validation; 0: none.
        max_bytes: maximum number of bytes to read, in whole modules; 0: no limit.
    """

    validation_fraction: Rate = 0.1
    max_bytes: Natural = 0

    def documents(self) -> dict[str, Documents]:
        files = _within(self._modules(), sysconfig.get_path("stdlib"), self.max_bytes)
        return _documents({"train": files}, self.validation_fraction)

    def pairs(self) -> dict[str, PairedTexts]:
        splits: dict[str, PairedTexts] = {}
        for number, module in enumerate(_within(self._modules(), sysconfig.get_path("stdlib"), self.max_bytes)):
            split = "validation" if held_out(number, self.validation_fraction) else "train"
            for function, summary in _documented_functions("".join(read_blocks(module))):
                inputs, targets = splits.setdefault(split, PairedTexts([], []))
                inputs.append(function)
                targets.append(summary)
        return splits

    def files(self) -> list[str]:
        return [str(module) for module in self._modules()]

    def _modules(self) -> list[Path]:
        files: list[Path] = []
        for folder, names, modules in os.walk(sysconfig.get_path("stdlib")):
            names[:] = set(names) - {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
            # _sysconfigdata lists the paths and compiler flags of the machine that built Python.
            files += [Path(folder, name) for name in modules if name.endswith(".py") and name[:14] != "_sysconfigdata"]
        return sorted(files)


def _documented_functions(module: str) -> Iterator[tuple[str, str]]:
    """Yield each function with a docstring in a module, without the docstring, and the docstring's first line."""
    lines = module.splitlines()
    for node in ast.walk(ast.parse(module)):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)) and len(node.body) > 1:
            docstring = node.body[0]
            kept = lines[node.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
            yield textwrap.dedent("\n".join(kept)), text.splitlines()[0]


def _texts(files: Sequence[Path], start: float, stop: float) -> Iterator[Iterator[str]]:
    """Yield the characters between two fractions of each UTF-8 file, in blocks."""
    for file in files:
        yield read_blocks(file) if (start, stop) == (0, 1) else _blocks(file, start, stop)


@lru_cache
def _length(file, size, changed):
    """Return the number of characters of a file, which is counted again after a change."""
    return sum(map(len, read_blocks(file)))


def _blocks(file, start, stop):
    length, place = _length(file, file.stat().st_size, file.stat().st_mtime_ns), 0
    start, stop = int(length * start), int(length * stop)
    for block in read_blocks(file):
        yield block[max(start - place, 0) : max(stop - place, 0)]
        place += len(block)


def _documents(files: dict[str, list[Path]], fraction: float) -> dict[str, Documents]:
    """Return documents by split; a `fraction` of the training texts is held out if there is no validation split.

    The held-out texts are evenly spread. If they would be none or all of the texts, the last `fraction` of the
    characters of each text is used for validation.
    """
    parts: dict[str, tuple[Sequence[Path], float, float]] = {split: (paths, 0.0, 1.0) for split, paths in files.items()}
    if "validation" not in files and fraction:
        held = held_out(np.arange(len(files["train"])), fraction)
        if held.any() and not held.all():
            for split, chosen in (("train", ~held), ("validation", held)):
                parts[split] = [files["train"][index] for index in np.flatnonzero(chosen)], 0.0, 1.0
        else:
            parts["train"] = files["train"], 0, 1 - fraction
            parts["validation"] = files["train"], 1 - fraction, 1
    return {name: Documents(partial(_texts, *part), partial(identity, *part)) for name, part in parts.items()}


def _within(files: Sequence[Path], where: str, max_bytes: int) -> list[Path]:
    """Return the first files with at most `max_bytes` in total (0: all files)."""
    if missing := next((file for file in files if not file.exists()), None):
        raise FileNotFoundError(f"There is no file {missing}.")
    sizes = [file.stat().st_size for file in files]
    kept = [file for file, size in zip(files, np.cumsum(sizes)) if not max_bytes or size <= max_bytes]
    if not files:
        raise FileNotFoundError(f"There is no text file at {where}: source.path must name a file, a folder or a glob.")
    if not any(sizes[: len(kept)]):
        raise ValueError(f"There is no text in {where}{f' within max_bytes={max_bytes}' if max_bytes else ''}.")
    return kept


def read_blocks(path: str | Path, size: int = 1 << 20) -> Iterator[str]:
    """Yield the text of a UTF-8 file in blocks of at most `size` bytes; errors have the offset of an invalid byte."""
    decoder, block = codecs.getincrementaldecoder("utf-8")(), b" "
    with open(path, "rb") as file:
        start = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        file.seek(start)
        while block:
            offset = file.tell()
            block = file.read(size)
            pending = len(decoder.getstate()[0])  # bytes of a character that the next block completes
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                place = offset - pending + error.start
                problem = f"byte {error.object[error.start]:#04x} at offset {place} ({error.reason})"
                raise ValueError(f"{path} is not UTF-8 text: {problem}.") from None
            yield text
