"""Files of questions in SQuAD's format."""

import json
from dataclasses import dataclass

from lineage.data.content import Question
from lineage.data.sources.base import SOURCES, SplitFiles
from lineage.data.sources.rows import read_lines


@SOURCES.register("squad")
@dataclass(frozen=True)
class SQuAD(SplitFiles):
    """JSON files of questions in the format of SQuAD 1.1 or 2.0 (arXiv 1606.05250); they may be gzipped (.gz).

    Attributes:
        path: the questions to train on.
        validation_path: the questions to validate on; "" = none.
        test_path: the questions to test on; "" = none.
    """

    def questions(self) -> dict[str, list[Question]]:
        return {split: read(path) for split, path in self.paths().items()}


def read(path: str) -> list[Question]:
    """Return the questions in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not in SQuAD's format, or an answer is not at its place in the context.
    """
    content = "\n".join(read_lines(path))
    try:
        return [
            Question(
                item["question"],
                paragraph["context"],
                [(answer["answer_start"], answer["text"]) for answer in item["answers"]],
            )
            for article in json.loads(content)["data"]
            for paragraph in article["paragraphs"]
            for item in paragraph["qas"]
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a file in SQuAD's format: {type(error).__name__} {error}.") from None
