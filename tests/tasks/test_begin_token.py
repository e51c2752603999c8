"""Language models read the token that a tokenizer adds before each text, such as Llama's <s>."""

import numpy as np
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from lineage.data import Documents, PairedTexts, Tokenizer
from lineage.data.sources.base import Source
from lineage.tasks import TASKS
from tests.data.conftest import load, train

TEXTS = ["one two", "three", "four five six"]


@pytest.fixture
def tokenizer():
    backend = tokenizers.Tokenizer.from_str(train("bytes", [], ("end_of_text", "cls", "pad", "mask")).to_str())
    special = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    return Tokenizer(backend)


class Texts(Source):
    def documents(self):
        return {"train": Documents(TEXTS), "test": Documents(TEXTS)}

    def pairs(self):
        texts = PairedTexts(TEXTS, TEXTS[::-1])
        return {"train": texts, "test": texts}


@pytest.mark.parametrize("options", [{}, {"packing": True}])
def test_documents(options, tokenizer):
    data = load(Texts(), TASKS["causal_lm"](sequence_length=40, **options), tokenizer, batch_size=1)
    batch = data.splits["test"].source.take(np.arange(1))
    assert data.facts.begin_token == tokenizer.cls
    assert (batch["tokens"] == tokenizer.cls).sum() == 3
    follows = batch["targets"][batch["tokens"] == tokenizer.cls]
    assert sorted(follows) == sorted(text.encode()[0] for text in TEXTS)


@pytest.mark.parametrize("name", ["masked_lm", "sequence_to_sequence"])
def test_other_tasks_do_not_read_it(name, tokenizer):
    data = load(Texts(), TASKS[name](sequence_length=20), tokenizer, batch_size=3)
    batch = data.splits["test"].source.take(np.arange(1))
    assert data.facts.begin_token is None
    assert not any((value == tokenizer.cls).any() for value in batch.values())


def test_pairs(tokenizer):
    """Check that the inputs in the data, in a prompt and in a file for predictions are the same."""
    task = TASKS["conditional_lm"](sequence_length=40)
    data = load(Texts(), task, tokenizer, batch_size=3)
    batch = data.splits["test"].source.take(np.arange(3))
    prompts, lengths, _ = task.requests(batch, data.facts)
    read = task.requests(task.input_examples(TEXTS, tokenizer, data.facts).source.take(np.arange(3)), data.facts)
    for row, text in enumerate(TEXTS):
        expected = [tokenizer.cls, *text.encode(), tokenizer.end_of_text]
        assert prompts[row, : lengths[row]].tolist() == expected
        assert read.prompts[row, : read.lengths[row]].tolist() == expected
        assert task.request(tokenizer.encode(text), tokenizer, data.facts).prompts.tolist() == [expected]
        targets = batch["targets"][row][batch["mask"][row]].tolist()
        assert targets == [*TEXTS[::-1][row].encode(), tokenizer.end_of_text]
