"""Labeled texts: file layouts, sentence pairs, and truncation of long texts."""

import gzip
import json
from typing import get_args, get_type_hints

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st

from lineage.configs import schema
from lineage.data import LabeledTexts, Question, Tokenizer
from lineage.data.examples import encoded
from lineage.data.sources.lines import LabelFiles, read_labeled_texts
from lineage.data.tokenizers.kinds import TokenizerFile, Words
from lineage.tasks import TASKS, question_answering
from lineage.tasks.text_classification import (
    TextClassification,
    TextEncoder,
    TextRegression,
    class_names,
    document_frequencies,
)
from tests.data.conftest import load, train

WORDS = [f"w{i}" for i in range(40)]
CODER = train("words", [" ".join(WORDS) + " . the"], encoded.ROLES)


def fit(rule, length=8, stride=0, texts=(("w0",),)):
    task = TextClassification(sequence_length=length, long_text=rule, stride=stride)
    encoder = TextEncoder(task, CODER, document_frequencies(texts), len(texts))
    encoder.encode(texts)
    return lambda row: encoder(row, tuple(CODER.encode_batch(row)))


def written(rows):
    return [[CODER.decode(part) for part in row] for row in rows]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("layout", ["tsv", "jsonl"])
@pytest.mark.parametrize("second", [False, True])
def test_every_layout_of_files_gives_the_same_texts(layout, zipped, second, tmp_path):
    rows = [("ein Haus", "groß", "yes"), ("zwei", "klein", "no"), ("drei", "groß", "yes")]
    rows = rows if second else [(a, label) for a, _, label in rows]
    keys = ("text", "second", "label") if second else ("text", "label")
    lines = ["\t".join(row) if layout == "tsv" else json.dumps(dict(zip(keys, row))) for row in rows]
    path = tmp_path / f"a.{layout}{'.gz' if zipped else ''}"
    (gzip.open if zipped else open)(path, "wt", encoding="utf-8").write("\n".join(lines) + "\n")
    part = read_labeled_texts(str(path))
    assert list(part.texts) == [row[:-1] for row in rows]
    assert list(part.labels) == ["yes", "no", "yes"]
    task = TextClassification(sequence_length=20)
    loaded = load(LabelFiles(str(path), validation_path=str(path)), task, batch_size=3)
    assert loaded.facts.class_names == ("no", "yes")
    (batch,) = loaded.splits["validation"]
    assert batch["label"].tolist() == [1, 0, 1]
    coder = loaded.tokenizer
    for tokens, mask, segments, (*texts, _) in zip(batch["tokens"], batch["tokens_mask"], batch["segments"], rows):
        assert tokens[0] == coder.cls
        assert (tokens[~mask] == coder.pad).all()
        ends = np.flatnonzero(tokens == coder.sep)
        assert ends[-1] == mask.sum() - 1
        starts = [1, *(ends[:-1] + 1)]
        assert [coder.decode(tokens[start:end]) for start, end in zip(starts, ends)] == texts
        expected = np.zeros(20, int)
        if second:
            expected[ends[0] + 1 : ends[1] + 1] = 1
        np.testing.assert_array_equal(segments, expected)


@pytest.mark.parametrize(("name", "line"), [("a.tsv", "two\t\n"), ("a.jsonl", '{"text": "two", "label": ""}\n')])
def test_empty_labels_are_refused(name, line, tmp_path):
    first = "one\t1\n" if name == "a.tsv" else '{"text": "one", "label": 1}\n'
    (tmp_path / name).write_text(first + line)
    with pytest.raises(ValueError, match=rf"{name}, example 2 has an empty label"):
        read_labeled_texts(f"{tmp_path}/{name}")


def test_numeric_classes_are_in_numeric_order():
    part = LabeledTexts([("a",)] * 3, ["10", "9", "x"])
    assert class_names({"train": part}) == ["9", "10", "x"]
    with pytest.raises(ValueError, match="The label 'y' of the test split is not one of 9, 10, x"):
        class_names({"train": part, "test": LabeledTexts([("a",)], ["y"])})


def test_regression_targets(tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\t1.5\nc\td\t-0.25\n")
    loaded = load(LabelFiles(f"{tmp_path}/a.tsv"), TextRegression(sequence_length=8), batch_size=2)
    assert sorted(loaded.train[0]["label"].tolist()) == [-0.25, 1.5]
    assert loaded.train[0]["label"].dtype == np.float32
    assert loaded.facts.num_classes == 1


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 30))
def test_longer_text_is_truncated_first(first, second, room):
    """Check against the library `tokenizers`, which truncates pairs for `transformers`."""
    backend = library.Tokenizer(library.models.WordLevel({"a": 0, "b": 1}))
    backend.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    backend.enable_truncation(room)
    tokens = backend.encode("a " * first, "b " * second).tokens
    assert encoded.longest_first(first, second, room) == (tokens.count("a"), tokens.count("b"))


@given(st.integers(0, 60), st.integers(1, 20), st.data())
def test_windows_cover_the_whole_text(count, room, draw):
    stride = draw.draw(st.integers(0, room))
    starts = list(encoded.window_starts(count, room, stride))
    assert {i for start in starts for i in range(start, start + room)} >= set(range(count))
    assert starts == [i * (stride or room) for i in range(len(starts))]
    assert len(starts) == 1 or starts[-2] + room < count  # no window is redundant


def test_truncation_rules():
    text = " ".join(WORDS[:10])
    assert written(fit("head")((text,))) == [[" ".join(WORDS[:6])]]
    assert written(fit("tail")((text,))) == [[" ".join(WORDS[4:10])]]
    assert written(fit("head_tail")((text,))) == [["w0 w1 w6 w7 w8 w9"]]
    assert written(fit("segments", stride=3)((text,))) == [
        ["w0 w1 w2 w3 w4 w5"],
        ["w3 w4 w5 w6 w7 w8"],
        ["w6 w7 w8 w9"],
    ]
    for rule in get_args(get_type_hints(TextClassification)["long_text"]):
        assert written(fit(rule)(("w3 w4",))) == [["w3 w4"]]
    pair = (" ".join(WORDS[:9]), "w20 w21")
    assert written(fit("tail", texts=[("a", "b")])(pair)) == [["w6 w7 w8", "w20 w21"]]


def test_single_texts_and_pairs_may_be_encoded_together():
    encoder = TextEncoder(TextClassification(sequence_length=12), CODER, {}, 0)
    rows = [("w1 w2",), ("w3", "w4 w5"), ("w6",)]
    actual = encoder.encode(rows).tokens
    assert [ids.tolist() for ids in actual] == [encoder.encode([row]).tokens[0].tolist() for row in rows]
    assert [np.sum(ids == CODER.sep) for ids in actual] == [1, 2, 1]
    with pytest.raises(ValueError, match="A row has 3 texts: it must have one or two"):
        encoder.encode([("a",), ("a", "b", "c")])


def test_bert_keeps_128_and_382_of_510():
    ids = fit("head_tail", 512)((" ".join(f"w{i % 40}" for i in range(1000)),))[0][0]
    expected = CODER.encode(" ".join(f"w{i % 40}" for i in [*range(128), *range(1000 - 382, 1000)]))
    np.testing.assert_array_equal(ids, expected)


def test_key_sentences_have_the_most_distinctive_words():
    """Check a text in which w5 is frequent and specific, whereas `the` occurs in every text."""
    others = [(f"the {word} .",) for word in WORDS[10:]]
    text = "the the the . w5 w6 w5 . the . w7 w5 ."
    assert written(fit("key_sentences", 9, texts=[*others, (text,)])((text,))) == [["w5 w6 w5 . w7 w5 ."]]


def test_windows_of_a_text_have_its_label(tmp_path):
    (tmp_path / "a.tsv").write_text(f"{' '.join(WORDS[:10])}\tyes\nw1\tno\n{' '.join(WORDS[:7])}\tno\n")
    source = LabelFiles(f"{tmp_path}/a.tsv", validation_path=f"{tmp_path}/a.tsv")
    loaded = load(source, TextClassification(sequence_length=8, long_text="segments", stride=2), Words(), batch_size=4)
    source = loaded.splits["validation"].source
    assert source.origins.tolist() == [0, 0, 0, 1, 2, 2]
    assert source.per_sequence["label"].tolist() == [1, 1, 1, 0, 0, 0]
    assert loaded.facts.examples["validation"] == 6


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("a\n", {}, r"line 1 has 1 columns: it must have one or two texts and a label"),
        ("a\tyes\na\tb\tno\n", {}, "some single texts and some pairs"),
        ("a\tyes\n", {"name": "text_regression"}, "must be numbers: .*'yes'"),
        ("a\t1\nb\tnan\n", {"name": "text_regression"}, "must be finite: one of the train split is not"),
        ("a\tyes\n", {"long_text": "middle"}, "task.long_text is 'middle'. Available: head, tail"),
        ("a\tb\tyes\n", {"long_text": "segments"}, "'segments': it must be head, tail or head_tail for pairs"),
        ("a\tyes\n", {"long_text": "segments", "stride": 7}, r"stride is 7: it must be from 0 \(no overlap\) to 6"),
        ("a\tyes\n", {"sequence_length": 3}, "task.sequence_length is 3: it must be 4 or more"),
        ("\n", {}, "is empty: it must have"),
        ("a\tyes\n", {"mask_rate": 0.5}, "TextClassification has no key 'mask_rate'"),
    ],
)
def test_invalid_files_raise(content, options, message, tmp_path):
    (tmp_path / "a.tsv").write_text(content + ("b c d e f g h i\tyes\n" if options.get("stride") else ""))
    options = {"name": "text_classification", "sequence_length": 8} | options
    with pytest.raises(ValueError, match=message):
        load(LabelFiles(f"{tmp_path}/a.tsv"), schema.build(TASKS, schema.section(TASKS, **options)))
    with pytest.raises(ValueError, match=r"must be a \.tsv or \.jsonl file"):
        read_labeled_texts("a.csv")
    for content in ('{"text": "a"}\n', '{"text": "a", "label": null}\n', '{"text": "a", "label": NaN}\n'):
        (tmp_path / "a.jsonl").write_text(content)
        with pytest.raises(ValueError, match="line 1: the column 'label' has no value: it must be a text or a number"):
            read_labeled_texts(f"{tmp_path}/a.jsonl")


def test_tokenizer_without_special_tokens_raises(tmp_path):
    train("bytes", []).save(tmp_path)
    (tmp_path / "a.tsv").write_text("a\tyes\n")
    tokenizer = TokenizerFile(f"{tmp_path}/tokenizer.json")
    with pytest.raises(ValueError, match=r"special tokens cls, sep, pad, mask, which .*tokenizer.json.* does not have"):
        load(LabelFiles(f"{tmp_path}/a.tsv"), TextClassification(sequence_length=8), tokenizer)


def test_token_layout_of_single_texts_and_pairs(tmp_path):
    (tmp_path / "a.tsv").write_text("one\tyes\n")
    (tmp_path / "b.tsv").write_text("one\ttwo\tyes\n")
    with pytest.raises(ValueError, match="Rows have 1 and 2 texts: all must have the same number"):
        load(LabelFiles(f"{tmp_path}/a.tsv", f"{tmp_path}/b.tsv"), TextClassification(sequence_length=16))


@pytest.mark.parametrize("separators", [1, 2])
def test_pairs_are_joined_as_the_tokenizer_does(separators):
    """Check a post-processor with one separator between the texts, and RoBERTa's, with two and one segment."""
    backend = library.Tokenizer.from_str(CODER.to_str())
    cls, sep = ((backend.id_to_token(id), id) for id in (CODER.cls, CODER.sep))
    bert, roberta = library.processors.BertProcessing, library.processors.RobertaProcessing
    backend.post_processor = bert(sep, cls) if separators == 1 else roberta(sep, cls, add_prefix_space=False)
    coder = Tokenizer(library.Tokenizer.from_str(backend.to_str()))
    expected, types = backend.encode("w1 w2", " w3").ids, backend.encode("w1 w2", " w3").type_ids
    tokens, second = encoded.join(coder, *coder.encode_batch(["w1 w2", " w3"]))
    assert tokens.tolist() == expected
    assert second == expected.index(*coder.encode("w3"))
    many = " ".join(WORDS)
    pair = TextEncoder(TextClassification(sequence_length=16), coder, {}, 0).encode([(many, many)])
    windows = question_answering.encode([Question("w1 w2", many, ())], coder, 16, 0)
    for source in (pair, windows):
        first = source.tokens[0].tolist()
        assert (len(first), first.count(coder.sep)) == (16, separators + 1)
    short = TextEncoder(TextClassification(sequence_length=len(types)), coder, {}, 0).encode([("w1 w2", "w3")])
    assert short[0]["segments"].tolist() == types
    assert max(types) == (separators == 1)
    assert coder.exported(coder.cls, coder.sep) == coder.to_str()
