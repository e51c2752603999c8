"""Sources of content. Importing this package registers the project's sources in `SOURCES`."""

from lineage.configs.registry import load_all
from lineage.data.sources.base import SOURCES, PathSource, Source, SplitFiles

load_all(__name__, __path__)
