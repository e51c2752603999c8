"""Data sets on the Hugging Face Hub."""

import contextlib
from dataclasses import dataclass, fields
from typing import Any

from lineage.configs.hub import NoFileError
from lineage.configs.storage import local
from lineage.data.facts import evaluating
from lineage.data.sources.base import SOURCES, Source
from lineage.data.sources.parquet import Parquet

TABLES = ("parquet", "csv", "tsv", "jsonl")  # sources of tables, named after the suffixes of their files


@SOURCES.register("hf")
@dataclass(frozen=True)
class Hub(Parquet):
    """Data set on the Hugging Face Hub: its Parquet files or, if it has none, its CSV, TSV or JSON lines files.

    Only these files are downloaded, to the Hub's cache, which also works offline. The splits are given by the names of
    the files or folders. Other files are read by other sources, such as text:hf:ORG/NAME/PATH.

    Attributes:
        path: ORG/NAME[@REVISION][/PATH], such as stanfordnlp/imdb or nyu-mll/glue/cola; PATH is a folder (such as that
            of a configuration), a file or a glob. A commit as the revision makes runs reproducible.
    """

    def read(self, kind: str) -> Any:
        return self.copied().read(kind)

    def copied(self) -> Source:
        """Return the source of the files in the cache."""
        for table in TABLES:
            cls = SOURCES[table]
            options = {field.name: getattr(self, field.name) for field in fields(cls) if hasattr(self, field.name)}
            with contextlib.suppress(NoFileError):
                return evaluating(cls(**options | {"path": local(f"hf:{self.path}", cls.suffixes)}), self.known)
        raise FileNotFoundError(f"hf:{self.path} has no file of {', '.join(TABLES)}.")
