"""Files of input and target texts."""

from dataclasses import dataclass

from lineage.data.content import PairedTexts
from lineage.data.sources.base import SOURCES, SplitFiles
from lineage.data.sources.rows import read_lines, read_rows


@SOURCES.register("pairs")
@dataclass(frozen=True)
class Pairs(SplitFiles):
    """Files of pairs of texts, which may be gzipped (.gz).

    A path is "a.tsv" (two columns), "a.jsonl" (objects with `input` and `target`) or "a.en,a.de" (two parallel files
    with a text in each line).

    Attributes:
        path: the pairs to train on.
        validation_path: the pairs to validate on; "" = none.
        test_path: the pairs to test on; "" = none.
    """

    def pairs(self) -> dict[str, PairedTexts]:
        return {split: read(path) for split, path in self.paths().items()}

    def files(self) -> list[str]:
        return [file for path in self.paths().values() for file in path.split(",")]


def read(path: str) -> PairedTexts:
    """Return the pairs of texts in one file, or in two parallel files with a comma between their paths.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a pair (the message has its number), or the files are not parallel.
    """
    files = path.split(",")
    if len(files) > 2:
        raise ValueError(f"{path!r} must be one file of pairs, or two parallel files separated by a comma.")
    if len(files) == 2:
        inputs, targets = map(read_lines, files)
        if len(inputs) != len(targets):
            raise ValueError(
                f"{files[0]} has {len(inputs)} lines and {files[1]} {len(targets)}: they must have equally many."
            )
        return PairedTexts(inputs, targets)
    rows = read_rows(path, ("input", "target"), columns="2", others=", or two files separated by a comma")
    return PairedTexts([given for given, _ in rows], [target for _, target in rows])
