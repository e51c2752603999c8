"""Several sources in one run."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from lineage.configs.registry import Natural, Needs, Range, field_types
from lineage.data.content import Images, PairedTexts, splits_of
from lineage.data.sources.base import CONTENT, SOURCES, Source, SplitFiles, in_several


class Part(NamedTuple):
    """Source in a mixture, and the prefix of its inputs."""

    source: Source
    prefix: str


@SOURCES.register("mixture")
@dataclass(frozen=True)
class Mixture(Source):
    """Several sources with the same kind of content, from which training examples come in fixed proportions.

    Without `weights`, a source with N training examples has the weight min(N, limit) ** (1 / temperature), as in T5
    (arXiv 1910.10683, section 3.5.2). The order of the sources is the same for any number of processes, and among the
    first n examples of a run, each source has its share of n up to a constant. Each is reshuffled when its examples are
    used up; an epoch has as many examples as all sources together. Evaluation splits are named "validation_NAME".

    Attributes:
        parts: sources, each a string such as "text:PATH", or a dictionary with such a string as `source` and optionally
            a `name` (by default that of the kind of source), a `prefix` of the input texts, and options of the source:
            `({"source": "pairs:sum.tsv", "prefix": "summarize: ", "validation_path": "dev.tsv"}, "cldr")`.
        weights: relative number of training examples from each source; (): by their sizes.
        temperature: values above 1 make weights by size more equal.
        limit: maximum number of examples that counts as the size of a source; 0: no limit.
    """

    parts: tuple[Any, ...] = ()
    weights: Annotated[tuple[float, ...], Range(above=0)] = ()
    temperature: Annotated[float, Range(1), Needs("weights", ((),))] = 1.0
    limit: Annotated[Natural, Needs("weights", ((),))] = 0

    def __post_init__(self):
        super().__post_init__()
        if self.weights and len(self.weights) != len(self.parts):
            raise ValueError(f"source.weights has {len(self.weights)} numbers for {len(self.parts)} source.parts.")
        _ = self.named  # raises ValueError for parts that are not valid

    @cached_property
    def named(self) -> dict[str, Part]:
        """Sources by name."""
        named: dict[str, Part] = {}
        for part in self.parts:
            options = {"source": part} if isinstance(part, str) else part
            if not isinstance(options, dict) or not isinstance(options.get("source"), str):
                raise ValueError(f"source.parts has {part!r}: it must be a source, or a dictionary with a `source`.")
            if wrong := [key for key in ("name", "prefix") if not isinstance(options.get(key, ""), str)]:
                raise ValueError(f"source.parts has the {wrong[0]} {options[wrong[0]]!r}: it must be a text.")
            kind, colon, value = options["source"].partition(":")
            name, prefix, keys = options.get("name", kind), options.get("prefix", ""), list(field_types(SOURCES[kind]))
            if name in named or not re.fullmatch(r"\w+", name):
                raise ValueError(f"source.parts has the name {name!r}: it must be unique, of letters, digits and _.")
            settings = {key: option for key, option in options.items() if key not in ("source", "name", "prefix")}
            if colon and not keys:
                raise ValueError(f"source.parts has {options['source']!r}: the source {kind!r} has no options.")
            named[name] = Part(SOURCES.build(kind, **settings | ({keys[0]: value} if colon else {})), prefix)
        if len(named) < 2:
            raise ValueError(f"source.parts is {self.parts}: a mixture needs two or more, as in ('text:PATH', 'cldr').")
        return named

    def proportions(self, sizes: Sequence[int]) -> list[float]:
        """Return the weights of the sources, given the numbers of their training examples."""
        return list(self.weights) or [min(n, self.limit or n) ** (1 / self.temperature) for n in sizes]

    def files(self) -> list[str]:
        return [path for part in self.named.values() for path in part.source.files()]

    def unread(self) -> list[str]:
        return [file for part in self.named.values() for file in part.source.unread()]

    def shared(self) -> list[str]:
        """Return the files that are read for several splits, of one part or of several."""
        splits: dict[str, list[str]] = {}
        others: list[str] = []
        for source, _ in self.named.values():
            if isinstance(source, SplitFiles):
                for split, files in source.copied().split_files().items():
                    splits.setdefault(split, []).extend(files)
            else:
                others += source.shared()
        return sorted({*in_several(splits.values()), *others})

    def notes(self) -> Iterator[str]:
        for name, (source, _) in self.named.items():
            yield from (f"part {name!r}: {note}" for note in source.notes())

    def without_effect(self, kind: str) -> list[str]:
        parts = self.named.items()
        return [f"{option} of the part {name!r}" for name, part in parts for option in part.source.without_effect(kind)]

    def content_kinds(self) -> list[str]:
        return [kind for kind in CONTENT if all(kind in part.source.content_kinds() for part in self.named.values())]

    def read(self, kind: str) -> Any:
        """Return the content of all sources, as splits such as "train_NAME"."""
        parts = self.read_parts(kind)
        images = [part for part in parts.values() if isinstance(part, Images)]
        splits = {f"{split}_{name}": rows for name, part in parts.items() for split, rows in splits_of(part).items()}
        return Images(splits, images[0].class_names) if images else splits

    def read_parts(self, kind: str) -> dict[str, Any]:
        return {name: _prefixed(part.source.read(kind), part.prefix) for name, part in self.named.items()}


def _prefixed(content, prefix):
    """Return pairs with the prefix before each input; raise ValueError for a prefix of other content."""
    if not prefix:
        return content
    if not all(isinstance(part, PairedTexts) for part in splits_of(content).values()):
        raise ValueError(f"The prefix of a source in a mixture is {prefix!r}: only pairs of texts can have one.")
    return {split: part._replace(inputs=[prefix + text for text in part.inputs]) for split, part in content.items()}
