"""Files of rows with named columns (CSV, TSV, lines of JSON), compressed files, and the splits of folders."""

import bz2
import csv
import gzip
import json
import lzma
from functools import partial

import pyarrow
import pytest

from lineage.configs import schema
from lineage.data.facts import Facts, evaluating
from lineage.data.fingerprint import fingerprint
from lineage.data.sources import SOURCES
from lineage.data.sources.files import find_splits, numbered_lines, read_lines, split_of
from lineage.data.sources.tables import CSV, TSV, JSONLines
from lineage.data.tokenizers.kinds import Bytes, Characters
from lineage.tasks.causal_lm import CausalLM
from lineage.tasks.sequence_to_sequence import SequenceToSequence
from lineage.tasks.text_classification import TextClassification, TextRegression
from tests.data.conftest import load
from tests.tiers import tiered

ROWS = [("ein Haus, groß", 'a "big" house', "1"), ("zwei\nZeilen", "two\tlines", "0"), ("", "\u2028 empty", "1")]
NAMES = ("de", "en", "good")
TWO_COLUMNS = b"text,label\n" + b"x,y\n" * 100
KINDS = {"csv": CSV, "tsv": TSV, "jsonl": JSONLines}


def zst(path, mode):
    return pyarrow.CompressedOutputStream(str(path), "zstd")


OPENED = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": zst}


def write(path, rows=ROWS, names=NAMES, compressed=""):
    """Write rows in the format that the suffix of a path names, and return the path."""
    path = path.with_name(path.name + compressed)
    text = path.with_name("plain")
    with open(text, "w", encoding="utf-8", newline="") as file:
        if path.name.removesuffix(compressed).endswith("jsonl"):
            file.writelines(json.dumps(dict(zip(names, row)), ensure_ascii=False) + "\n\n" for row in rows)
        else:
            dialect = "excel-tab" if ".tsv" in path.name else "excel"
            csv.writer(file, dialect).writerows([names, *rows])
    with OPENED[compressed](path, "wb") as file:
        file.write(text.read_bytes())
    text.unlink()
    return str(path)


@pytest.mark.parametrize("compressed", list(OPENED)[1:])
def test_compressed_files_may_be_joined(compressed, tmp_path):
    """Check streams that follow each other, of which one is empty, and padding."""
    text = b"".join(b"line %d\n" % number for number in range(30_000))
    parts = []
    for content in (text, b"", text):
        with OPENED[compressed](tmp_path / "a", "wb") as file:
            file.write(content)
        parts.append((tmp_path / "a").read_bytes())
    path = tmp_path / f"a.txt{compressed}"
    path.write_bytes(b"".join(parts) + bytes(8 if compressed != ".zst" else 0))
    assert read_lines(str(path)) == text.decode().splitlines() * 2


@pytest.mark.parametrize("compressed", OPENED)
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_content(kind, compressed, tmp_path):
    path = write(tmp_path / f"a.{kind}", compressed=compressed)
    source = KINDS[kind](path, text_key="de", label_key="good", input_key="en", target_key="de")
    assert source.content_kinds() == ["documents", "pairs", "labeled_texts"]
    assert list(source.documents()["train"]) == [row[0] for row in ROWS]
    assert source.pairs()["train"] == ([row[1] for row in ROWS], [row[0] for row in ROWS])
    part = source.labeled_texts()["train"]
    assert (list(part.texts), list(part.labels), part.names) == ([row[:1] for row in ROWS], ["1", "0", "1"], [])
    both = KINDS[kind](path, text_key="de,en", label_key="good").labeled_texts()["train"]
    assert list(both.texts) == [row[:2] for row in ROWS]


def test_default_columns_and_tasks(tmp_path):
    pairs = write(tmp_path / "p.csv", [("a", "b"), ("c", "d")], ("input", "target"))
    assert load(CSV(pairs), SequenceToSequence(sequence_length=4), batch_size=1).facts.examples == {"train": 2}
    texts = write(tmp_path / "t.csv", [("a", "1.5"), ("c", "-2")], ("text", "label"))
    assert sorted(load(CSV(texts), TextRegression(sequence_length=8), batch_size=2).train[0]["label"]) == [-2, 1.5]
    assert load(CSV(texts), TextClassification(sequence_length=8), batch_size=1).facts.class_names == ("-2", "1.5")
    assert load(CSV(texts), CausalLM(sequence_length=2), batch_size=1).facts.tokens == {"train": 4}
    made = schema.build(SOURCES, schema.section(SOURCES, "tsv", path=texts, quotes=False))
    assert (made.quotes, made.delimiter, made.name) == (False, "\t", "tsv")


def test_values_that_are_not_strings(tmp_path):
    path = tmp_path / "a.json"
    rows = [{"text": 7, "label": True}, {"text": 0.5, "label": -1}]
    path.write_text("\n".join(map(json.dumps, rows)))
    part = JSONLines(str(path)).labeled_texts()["train"]
    assert (part.texts, part.labels) == ([("7",), ("0.5",)], ["True", "-1"])


def test_columns_of_objects_in_columns(tmp_path):
    path = tmp_path / "wmt.jsonl"
    path.write_text('{"translation": {"de": "Haus", "en": "house"}}\n{"translation": {"de": "zwei", "en": "two"}}\n')
    source = JSONLines(str(path), input_key="translation.en", target_key="translation.de")
    assert source.pairs()["train"] == (["house", "two"], ["Haus", "zwei"])
    path.write_text('{"a.b": "whole"}\n')
    assert list(JSONLines(str(path), text_key="a.b").documents()["train"]) == ["whole"]


def test_quotes_without_meaning(tmp_path):
    path = tmp_path / "sst.tsv"
    path.write_text('text\tlabel\n"good\t1\nso 5" long\t0\n')
    part = TSV(str(path), quotes=False).labeled_texts()["train"]
    assert part.texts == [('"good',), ('so 5" long',)]
    with pytest.raises(ValueError, match=r"sst\.tsv, line 3 cannot be read: .*; with --config.source.quotes=false"):
        TSV(str(path)).labeled_texts()
    path.write_text('text\tlabel\n"so good\t1\nso long"\t0\n')
    with pytest.raises(
        ValueError, match=r"sst\.tsv, line 3 is joined to the line before by .*, but both have 2 columns"
    ):
        TSV(str(path)).labeled_texts()
    path.write_text('text\tlabel\n"a\tb\nc\n"\t1\n')  # a tab and two ends of lines in a field
    assert TSV(str(path)).labeled_texts()["train"].texts == [("a\tb\nc\n",)]


def test_long_fields(tmp_path):
    path = write(tmp_path / "a.csv", [("x" * 300_000, "y")], ("text", "label"))
    assert [len(text) for text in CSV(path).documents()["train"]] == [300_000]


def test_held_out_rows_are_evenly_spread(tmp_path):
    path = write(tmp_path / "a.jsonl", [(str(i), str(i % 2)) for i in range(25)], ("text", "label"))
    source = JSONLines(path, validation_fraction=0.1)
    documents = {split: list(part) for split, part in source.documents().items()}
    assert documents["validation"] == ["9", "19"]
    assert documents["train"] == [str(i) for i in range(25) if i not in (9, 19)]
    assert [text for (text,) in source.labeled_texts()["validation"].texts] == ["9", "19"]
    given = JSONLines(path, validation_path=path, validation_fraction=0.1).documents()
    assert [len(list(part)) for part in given.values()] == [25, 25]
    with pytest.raises(ValueError, match=r"a\.jsonl has no rows for the split validation"):
        JSONLines(path, validation_fraction=0.01).labeled_texts()
    with pytest.raises(ValueError, match=r"source.validation_fraction is 1\.0: it must be 0 or more and below 1"):
        JSONLines(path, validation_fraction=1.0)


def test_documents_are_read_anew_and_limited(tmp_path, monkeypatch):
    path = write(tmp_path / "a.csv", [("äb",), ("cd",), ("e",)], ("text",))
    read = []
    monkeypatch.setattr(
        "lineage.data.sources.tables.numbered_lines", lambda file: read.append(file) or numbered_lines(file)
    )
    part = CSV(path, max_bytes=5).documents()["train"]
    assert read == []
    assert list(part) == list(part) == ["äb", "cd"]
    assert len(read) == 2
    tokens = load(CSV(path), CausalLM(sequence_length=2), Characters(), batch_size=1).facts.tokens
    assert tokens == {"train": 8}  # an end of text follows each document


def test_fingerprints_of_documents_and_files(tmp_path):
    path = write(tmp_path / "a.csv", [("a", "b")], ("text", "other"))

    def identity(**options):
        return CSV(path, **options).documents()["train"].fingerprint()

    known = [identity(), identity(text_key="other"), identity(max_bytes=1), identity(validation_fraction=0.5)]
    assert identity() == known[0]
    assert len(set(known)) == 4
    write(tmp_path / "a.csv", [("a", "c")], ("text", "other"))
    assert identity() not in known
    both = CSV(path, validation_fraction=0.5).documents()
    assert both["train"].fingerprint() != both["validation"].fingerprint()
    (tmp_path / "notes.txt").write_text("x")
    for name in ("train", "test"):
        write(tmp_path / f"{name}.csv")
    assert set(fingerprint(CSV(str(tmp_path)).files())) == {f"{tmp_path}/train.csv", f"{tmp_path}/test.csv"}


@tiered("read_first", [0, 1, 2])
def test_token_cache_of_rows_that_are_held_out_or_not(tmp_path, read_first):
    """The training rows that `validation_fraction` holds out are training rows again with a `validation_path`."""
    rows = {name: [(f"{name} {number}",) for number in range(10)] for name in "ab"}
    a, b = (str(write(tmp_path / f"{name}.csv", rows[name], ("text",))) for name in "ab")
    sources = [CSV(a, validation_fraction=0.2), CSV(a, b, validation_fraction=0.2), CSV(b, validation_fraction=0.2)]
    task, counts = CausalLM(sequence_length=2, cache_dir=str(tmp_path / "cache")), {}
    for number in [read_first, *{0, 1, 2} - {read_first}]:
        counts[number] = load(sources[number], task, Bytes(), batch_size=1).facts.tokens
    held = {"train": 8 * 4, "validation": 2 * 4}
    assert counts == {0: held, 1: {"train": 10 * 4, "validation": 10 * 4}, 2: held}


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


SPLITS = {
    "train": "train-00000-of-00002.parquet c4-train.00000-of-01024.json.gz my_train1.csv partial-train train_1.csv",
    "validation": "c4-validation.00000-of-00008.json.gz en_ewt-ud-dev.conllu instances_val2017.json eng.testa",
    "test": "eng.testb Test.csv",
    "": "validation_matched-0-of-1.parquet constrained.csv latest.csv trainer.csv unsupervised-00000-of-00001.parquet",
}


def test_split_of_a_name():
    for split, names in SPLITS.items():
        assert {name: split_of(name) for name in names.split()} == dict.fromkeys(names.split(), split)


def test_splits_of_a_folder(tmp_path):
    touch(tmp_path / "a", "train-1.csv", "train-0.csv.gz", "test-0.csv", "dev.csv", "train.txt", "README.md")
    touch(tmp_path / "a", ".cache/huggingface/train-1.csv", "other.csv")
    actual = find_splits(f"{tmp_path}/a", (".csv",))
    names = {"train": ["train-0.csv.gz", "train-1.csv"], "validation": ["dev.csv"], "test": ["test-0.csv"]}
    assert actual == {split: [f"{tmp_path}/a/{name}" for name in files] for split, files in names.items()}
    touch(tmp_path / "b", "default/partial-train/0000.csv", "default/partial-train/0001.csv", "default/test/train.csv")
    with pytest.raises(ValueError, match=r"files of the split train in .*/default/partial-train and .*/default/test"):
        find_splits(f"{tmp_path}/b")
    (tmp_path / "b/default/test/train.csv").rename(tmp_path / "b/default/test/0.csv")
    assert {split: len(files) for split, files in find_splits(f"{tmp_path}/b").items()} == {"train": 2, "test": 1}
    touch(tmp_path / "c", "a.csv", "test.csv", "train.jsonl")
    with pytest.raises(FileNotFoundError, match=r"c has no file named after the split train, such as train\.csv\.$"):
        find_splits(f"{tmp_path}/c", (".csv",))


@pytest.mark.parametrize("path", ["", "s3://bucket/rows"])
def test_evaluation_needs_no_training_files(path, tmp_path, monkeypatch):
    write(tmp_path / "test.csv")
    monkeypatch.setattr("lineage.data.sources.base.local", lambda path, suffixes: str(tmp_path))
    source = evaluating(CSV(path or str(tmp_path), text_key="de", label_key="good"), Facts())
    assert list(source.read("labeled_texts")) == ["test"]


def test_paths_are_files_globs_and_folders(tmp_path):
    for name in ("in/train-0", "in/train-1", "in/test", "more/one", "more/two", "x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / f"{name}.csv", [(name,)], ("text",))

    def texts(*paths):
        source = CSV(*(f"{tmp_path}/{path}" if path else "" for path in paths))
        return {split: list(part) for split, part in source.documents().items()}

    assert texts("in") == {"train": ["in/train-0", "in/train-1"], "test": ["in/test"]}
    assert texts("in", "more", "x.csv") == {
        "train": ["in/train-0", "in/train-1"],
        "validation": ["more/one", "more/two"],
        "test": ["x"],
    }
    assert texts("in/train-*.csv", "*.csv") == {"train": ["in/train-0", "in/train-1"], "validation": ["x"]}
    for path in ("nothing.csv", "nothing-*.csv"):
        with pytest.raises(FileNotFoundError, match=rf"There is no file {tmp_path}/nothing"):
            texts("in", path.replace("*", "[*]"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "words,label\nx,y\n", "has no column 'text': its columns are words, label"),
        ("a.csv", "", "is empty: its first line must be a header"),
        ("a.csv", "\n", "has no column 'text': its columns are none"),
        ("a.csv", "text,label\n", "has no rows for the split train"),
        ("a.csv", "text,label\nx,y\nx\n", "line 3 has 1 columns: the header has 2"),
        ("a.csv", "text,label\nx,\n", "line 2: the column 'label' has no value"),
        ("a.csv", 'text,label\n"x,y\nz,w\n', "line 3 cannot be read: unexpected end of data"),
        ("a.csv", b"text,label\nx,y\ncaf\xe9,z\n", "line 3 is not UTF-8 text: byte 0xe9 at offset 3 of the line"),
        ("a.csv", "text,label\r\nx,y\r\n".encode("utf-16"), "line 1 is not UTF-8 text: byte 0xff at offset 0"),
        (
            "a.csv",
            "text,label\nx\rz,y\n",
            r"line 2 cannot be read: new-line character \\r in a field that is not in double quotes\.",
        ),
        ("a.csv.gz", gzip.compress(TWO_COLUMNS, mtime=0)[:-9], r"is not a complete \.gz file"),
        ("a.csv.gz", b"", r"is not a complete \.gz file: it has 0 bytes\."),
        ("a.csv.zst", b"", r"is not a complete \.zst file: it has 0 bytes\."),
        ("a.csv.bz2", b"rubbish", r"is not a complete \.bz2 file"),
        ("a.csv.xz", lzma.compress(TWO_COLUMNS)[:-9], r"is not a complete \.xz file"),
        ("a.csv.zst", b"rubbish", r"is not a complete \.zst file"),
        ("a.csv.bz2", bz2.compress(TWO_COLUMNS) + b"BZi9rubbish", r"is not a complete \.bz2 file"),
        ("a.csv.xz", lzma.compress(TWO_COLUMNS) + b"rubbish", r"is not a complete \.xz file"),
        ("a.jsonl", '{"text": "x"}\n', "line 1 has no column 'label': its columns are text"),
        ("a.jsonl", '\n{"text": "x", "label": null}\n', "line 2: the column 'label' has no value"),
        ("a.jsonl", '{"text": "x\\ud83d", "label": 1}\n', "line 1: the column 'text' is not UTF-8 text: surrogates"),
        ("a.jsonl", '{"text": ["x"], "label": 1}\n', "line 1: the column 'text' is of type list: it must be a text or"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": "x"\n', "line 2 is not JSON: Expecting"),
        ("a.jsonl", '[{"text": "x"}]', "line 1 is not a JSON object"),
    ],
)
def test_errors_name_the_file_and_the_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    kind = KINDS[name.split(".")[1]]
    with pytest.raises(ValueError, match=rf"{tmp_path}/{name}.* ?{message}") as caught:
        kind(f"{tmp_path}/{name}").labeled_texts()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_numbers_too_large_for_floats_are_texts(tmp_path):
    (path := tmp_path / "a.jsonl").write_text(f'{{"text": "x", "label": 1{"0" * 400}}}\n')
    assert JSONLines(str(path)).labeled_texts()["train"].labels == [f"1{'0' * 400}"]


def test_missing_and_nested_columns_of_objects(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"translation": {"de": "Haus"}}\n')
    pairs = partial(JSONLines, str(path), target_key="translation.de")
    with pytest.raises(ValueError, match=r"line 1: the column 'translation\.en' has no value"):
        pairs(input_key="translation.en").pairs()
    with pytest.raises(ValueError, match=r"line 1 has no column 'text': its columns are translation"):
        pairs(input_key="text.en").pairs()


@pytest.mark.thorough
@pytest.mark.parametrize("compressed", [suffix for suffix in OPENED if suffix])
def test_compressed_line_that_fills_the_memory_raises(compressed, tmp_path):
    path = f"{tmp_path}/a.csv{compressed}"
    with OPENED[compressed](path, "wb") as file:
        file.write(b"x" * 120_000_000)
    for read in (
        CSV(path).labeled_texts,
        CSV(path).documents()["train"].__iter__().__next__,
        partial(read_lines, path),
    ):
        with pytest.raises(
            ValueError, match=rf"a\.csv\{compressed}, line 1 has more than [12]\d,\d+,\d+ bytes: at most 10 MB"
        ):
            read()


@pytest.mark.thorough
@tiered("kind", KINDS)
def test_compressed_lines_that_fill_the_memory_raise(kind, tmp_path):
    """Check that a compressed file of 120 MB can be read as a stream, but not at once; a plain one can."""
    rows = [("x" * 5000, "y" * 5000)] * 12_000
    options = {"text_key": "a", "label_key": "b", "input_key": "a", "target_key": "b"}
    path = write(tmp_path / f"a.{kind}", rows, "ab", ".zst")
    source = KINDS[kind](path, **options)
    for read in (source.pairs, source.labeled_texts, partial(read_lines, path)):
        with pytest.raises(
            ValueError, match=rf"a\.{kind}\.zst needs more than 10\d,\d+,\d+ bytes: at most 100 MB and 100"
        ):
            read()
    assert sum(map(len, source.documents()["train"])) == 12_000 * 5000
    plain = KINDS[kind](write(tmp_path / f"b.{kind}", rows, "ab"), **options)
    assert len(plain.pairs()["train"].inputs) == 12_000


def test_lines_end_with_newlines_only(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeff one \r\ntwo\u2028 \x0b\x85three\rfour\n\nfive".encode())
    assert read_lines(f"{tmp_path}/a.txt") == [" one ", "two\u2028 \x0b\x85three\rfour", "", "five"]


@pytest.mark.parametrize("path", ["", "*.csv"])
def test_links_to_missing_files_are_not_left_out(path, tmp_path):
    """Check a folder and a glob; such a link of the training split does not matter to an evaluation."""
    (tmp_path / "train-0.csv").write_text("text,label\na,x\n")
    (tmp_path / "train-1.csv").symlink_to(tmp_path / "gone")
    source = CSV(str(tmp_path / path))
    readers = [source.labeled_texts, *([SOURCES["text"](str(tmp_path / path)).documents] if path else [])]
    for read in readers:
        with pytest.raises(FileNotFoundError, match=rf"There is no file {tmp_path}/train-1\.csv"):
            read()
    (tmp_path / "test.csv").write_text("text,label\na,x\n")
    if not path:
        assert list(evaluating(source, Facts()).labeled_texts()) == ["test"]


def test_uppercase_suffixes_in_a_folder(tmp_path):
    for name in ("train-0.csv", "TRAIN-1.CSV", "Test.Csv", "notes.CSV", "dev.TSV"):
        (tmp_path / name).write_text("text,label\na,x\n")
    source = CSV(str(tmp_path))
    assert {split: len(part.labels) for split, part in source.labeled_texts().items()} == {"train": 2, "test": 1}
    assert source.unread() == [str(tmp_path / "notes.CSV")]
    (tmp_path / "a.TSV").write_text("a\tx\n")
    assert SOURCES["labels"](path=str(tmp_path / "a.TSV")).labeled_texts()["train"].labels == ["x"]


def test_compressed_copies_of_files_are_not_read(tmp_path):
    for name, text in (("train", "a\nb"), ("train_2", "c"), ("dev", "d")):
        content = f"text\n{text}\n".encode()
        (tmp_path / f"{name}.csv").write_bytes(content)
        (tmp_path / f"{name}.csv.gz").write_bytes(gzip.compress(content))
        (tmp_path / f"{name}.csv.xz").write_bytes(lzma.compress(content))
    (tmp_path / "train_2.csv").unlink()
    for path in (tmp_path, tmp_path / "train*"):
        source = CSV(str(path))
        assert list(source.documents()["train"]) == ["a", "b", "c"]
        assert source.unread() == []
    assert list(CSV(str(tmp_path)).documents()["validation"]) == ["d"]
