"""The source text of Python's standard library."""

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from lineage.data.content import Documents
from lineage.data.sources.base import SOURCES, Source
from lineage.data.sources.text import read_all, with_validation


@SOURCES.register("stdlib")
@dataclass(frozen=True)
class StandardLibrary(Source):
    """Source text of the running Python's standard library without its tests; each module is a document.

    Attributes:
        validation_fraction: the fraction of the modules that is held out for validation; 0 = none.
        max_bytes: the most bytes to read, in whole modules; 0 = no limit.
    """

    validation_fraction: float = 0.1
    max_bytes: int = 0

    def documents(self) -> dict[str, Documents]:
        root, found = sysconfig.get_path("stdlib"), []
        for folder, names, modules in os.walk(root):
            names[:] = set(names) - {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
            # _sysconfigdata lists the paths and compiler flags of the machine that built Python.
            found += [Path(folder, name) for name in modules if name.endswith(".py") and name[:14] != "_sysconfigdata"]
        return with_validation({"train": read_all(sorted(found), root, self.max_bytes)}, self.validation_fraction)
