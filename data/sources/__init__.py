"""Sources: where content comes from. Importing this package registers the project's sources in `SOURCES`."""

from lineage.data.sources.base import SOURCES, PathSource, Source, SplitFiles
from lineage.data.sources.cifar import CIFAR
from lineage.data.sources.cldr import Dates
from lineage.data.sources.conllu import CoNLLU
from lineage.data.sources.digits import Digits
from lineage.data.sources.folder import Folder
from lineage.data.sources.idx import IDX
from lineage.data.sources.labels import Labels
from lineage.data.sources.pairs import Pairs
from lineage.data.sources.shapes import Shapes
from lineage.data.sources.squad import SQuAD
from lineage.data.sources.stdlib import StandardLibrary
from lineage.data.sources.text import Text
from lineage.data.sources.tfds import TFDS

__all__ = [
    "CIFAR",
    "IDX",
    "SOURCES",
    "TFDS",
    "CoNLLU",
    "Dates",
    "Digits",
    "Folder",
    "Labels",
    "Pairs",
    "PathSource",
    "SQuAD",
    "Shapes",
    "Source",
    "SplitFiles",
    "StandardLibrary",
    "Text",
]
