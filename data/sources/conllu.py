"""Files of tagged sentences in the CoNLL-U format."""

import re
from dataclasses import dataclass
from pathlib import Path

from lineage.data.content import Documents, TaggedSentence
from lineage.data.sources.base import SOURCES, SplitFiles
from lineage.data.sources.lines import read_lines

_ID = re.compile(r"\d+([-.]\d+)?")


@SOURCES.register("conllu")
@dataclass(frozen=True)
class CoNLLU(SplitFiles):
    """CoNLL-U files of sentences with universal parts of speech; they may be gzipped (.gz).

    Words are the syntactic ones (of "1-2 don't": do and n't), without empty nodes ("8.1"). Each sentence is a document.

    Attributes:
        path: training file, or a folder with the files of a Universal Dependencies treebank
            (*-train.conllu, *-dev.conllu and *-test.conllu).
        validation_path: validation file; "": the folder's, if any.
        test_path: test file; "": the folder's, if any.
    """

    def paths(self) -> dict[str, str]:
        return _files_of_splits(self.path) | {name: path for name, path in super().paths().items() if name != "train"}

    def files(self) -> list[str]:
        return list(super().paths().values())

    def tagged_sentences(self) -> dict[str, list[TaggedSentence]]:
        return self.each(read_sentences)

    def documents(self) -> dict[str, Documents]:
        splits = self.tagged_sentences().items()
        return {split: Documents(["".join(sentence.words) for sentence in part]) for split, part in splits}


def _files_of_splits(path: str) -> dict[str, str]:
    """Return the file of each split: `path` itself, or those of a treebank of Universal Dependencies in a folder."""
    if not Path(path).is_dir():
        return {"train": path}
    names = {"train": "train", "dev": "validation", "test": "test"}
    files = {split: sorted(Path(path).glob(f"*-{name}.conllu*")) for name, split in names.items()}
    if not files["train"]:
        raise FileNotFoundError(f"There is no file *-train.conllu in {path}.")
    return {split: str(some[0]) for split, some in files.items() if some}


def read_sentences(path: str) -> list[TaggedSentence]:
    """Return the sentences in a file with their universal parts of speech; an error has the number of the line."""
    sentences, words, tags = [], [], []
    # `space` precedes the next word; `multiword` is the last word of a multiword token and the space after it.
    space, multiword = "", (0, "")
    for number, line in enumerate([*read_lines(path), ""], 1):
        if not line.strip():
            if words:
                sentences.append(TaggedSentence(words, tags))
            words, tags, space = [], [], ""
        elif not line.startswith("#"):
            columns = line.split("\t")
            if len(columns) != 10:
                raise ValueError(f"{path}, line {number} has {len(columns)} columns: CoNLL-U has 10.")
            if not _ID.fullmatch(columns[0]):
                raise ValueError(f"{path}, line {number} begins with {columns[0]!r}, not with an ID such as 1 or 1-2.")
            after = "" if "SpaceAfter=No" in columns[9].split("|") else " "
            if "-" in columns[0]:
                multiword = int(columns[0].partition("-")[2]), after
            elif "." not in columns[0]:
                index = int(columns[0])
                words.append(space + columns[1])
                tags.append(columns[3])
                space = after if index > multiword[0] else multiword[1] if index == multiword[0] else ""
                multiword = (0, "") if index >= multiword[0] else multiword
    return sentences
