"""Files of labelled texts."""

from dataclasses import dataclass

from lineage.data.content import LabelledTexts, PairedTexts
from lineage.data.sources.base import SOURCES, SplitFiles
from lineage.data.sources.rows import read_rows


@SOURCES.register("labels")
@dataclass(frozen=True)
class Labels(SplitFiles):
    """Files of texts, or pairs of texts, with a label each; they may be gzipped (.gz).

    A path is a `.tsv` file whose last column is the label of the one or two texts before it, or a `.jsonl` file of
    objects with `text`, `label` and optionally `second`. As pairs, the labels are the targets (T5, arXiv 1910.10683).

    Attributes:
        path: the texts to train on.
        validation_path: the texts to validate on; "" = none.
        test_path: the texts to test on; "" = none.
    """

    def labelled_texts(self) -> dict[str, LabelledTexts]:
        return {split: read(path) for split, path in self.paths().items()}

    def pairs(self) -> dict[str, PairedTexts]:
        return {
            name: PairedTexts([" ".join(row) for row in part.texts], list(part.labels))
            for name, part in self.labelled_texts().items()
        }


def read(path: str) -> LabelledTexts:
    """Return the labelled texts in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a labelled text (the message has its number), or only some texts come in pairs.
    """
    rows = read_rows(path, ("text", "second", "label"), optional="second", columns="one or two texts and a label")
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{path} has some single texts and some pairs: it must have one or the other.")
    return LabelledTexts([row[:-1] for row in rows], [row[-1] for row in rows])
