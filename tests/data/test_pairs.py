import gzip
import json

import numpy as np
import pytest

from lineage.configs import schema
from lineage.data.examples import pairs
from lineage.data.sources.lines import LabelFiles, PairFiles, read_pairs
from lineage.data.sources.packages import Dates
from lineage.data.tokenizers.kinds import Characters
from lineage.tasks import TASKS
from lineage.tasks.sequence_to_sequence import ConditionalLM, SequenceToSequence
from tests.data.conftest import load, train, train_batches

LEFT, RIGHT = ["ein Haus", "zwei", "drei Bäume im Wald"], ["a house", "two", "three trees"]


@pytest.fixture
def coder():
    return train("characters", LEFT + RIGHT)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("layout", ["tsv", "jsonl", "parallel"])
def test_every_layout_of_files_gives_the_same_pairs(layout, zipped, tmp_path):
    end = ".gz" if zipped else ""

    def write(name, lines):
        content = "".join(f"{line}\n" for line in lines).encode()
        path = tmp_path / f"{name}{end}"
        path.write_bytes(gzip.compress(content) if zipped else content)
        return str(path)

    if layout == "parallel":
        path = ",".join([write("a.de", LEFT), write("a.en", RIGHT)])
    elif layout == "tsv":
        path = write("a.tsv", [f"{left}\t{right}" for left, right in zip(LEFT, RIGHT)])
    else:
        path = write("a.jsonl", [json.dumps({"input": left, "target": right}) for left, right in zip(LEFT, RIGHT)])
    assert read_pairs(path) == (LEFT, RIGHT)


def test_tokens_are_the_targets_shifted_right(coder):
    encoded = pairs.encode((LEFT, RIGHT), coder, 20, drop=False, start=0)
    batch = encoded.take(np.array([2, 0]))
    end = coder.end_of_text
    for row, number in enumerate([2, 0]):
        targets = batch["targets"][row][batch["mask"][row]]
        assert coder.decode(targets[:-1]) == RIGHT[number]
        assert targets[-1] == end
        np.testing.assert_array_equal(batch["tokens"][row, : len(targets)], [0, *targets[:-1]])
        inputs = batch["inputs"][row][batch["inputs_mask"][row]]
        assert coder.decode(inputs[:-1]) == LEFT[number]
        assert inputs[-1] == end
    np.testing.assert_array_equal(encoded[0]["targets"], batch["targets"][1])


def test_long_pairs_are_dropped_or_truncated_but_references_are_not(coder):
    assert len(pairs.encode((LEFT, RIGHT), coder, 12, drop=True, start=0)) == 2
    cut = pairs.encode((LEFT, RIGHT), coder, 12, drop=False, start=0)
    assert len(cut) == 3
    assert cut.references == RIGHT
    last = cut[2]
    assert last["inputs_mask"].all()
    assert coder.decode(last["inputs"][:-1]) == LEFT[2][:11]
    assert last["inputs"][-1] == coder.end_of_text


def test_cldr_contains_every_day_once_in_babel_formats():
    splits = Dates().pairs()
    days = [day for _, targets in splits.values() for day in targets]
    assert len(days) == len(set(days)) == 36_525
    sizes = {name: len(targets) for name, (_, targets) in splits.items()}
    assert 0.79 < sizes["train"] / 36_525 < 0.81
    assert abs(sizes["validation"] - sizes["test"]) < 100
    actual = dict(zip(*(splits["test"])))
    assert actual["19 gennaio 1950"] == "1950-01-19"
    assert actual["May 19, 1950"] == "1950-05-19"
    assert Dates().pairs() == splits


def test_load(tmp_path):
    (tmp_path / "a.tsv").write_text("".join(f"{left}\t{right}\n" for left, right in zip(LEFT, RIGHT)))
    (tmp_path / "b.tsv").write_text("Haus\thouse\n")
    source = PairFiles(f"{tmp_path}/a.tsv", test_path=f"{tmp_path}/b.tsv")
    assert source.files() == [f"{tmp_path}/a.tsv", f"{tmp_path}/b.tsv"]
    loaded = load(source, SequenceToSequence(sequence_length=20), Characters(), batch_size=2)
    assert loaded.facts.examples == {"train": 3, "test": 1}
    assert loaded.train[0]["inputs"].shape == (2, 20)
    batch = loaded.splits["test"][0]
    assert batch["mask"].any(axis=1).tolist() == [True, False]
    with pytest.raises(ValueError, match="SequenceToSequence has no key 'image_size'"):
        schema.section(TASKS, "sequence_to_sequence", image_size=8)
    with pytest.raises(ValueError, match=r"None of 3 pairs fits task.sequence_length, which is 3"):
        load(source, SequenceToSequence(sequence_length=3), Characters())
    with pytest.raises(ValueError, match=r"task.sequence_length is 0: it must be 2 or more, for a token and"):
        load(source, SequenceToSequence(), Characters())


def test_files_of_parallel_texts():
    assert PairFiles("a.en,a.de", "b.en,b.de").files() == ["a.en,a.de", "b.en,b.de"]


def test_start_token_of_outputs(tmp_path):
    (tmp_path / "a.tsv").write_text("".join(f"{left}\t{right}\n" for left, right in zip(LEFT, RIGHT)))
    source = PairFiles(f"{tmp_path}/a.tsv")
    for role in ("end_of_text", "pad"):
        task = SequenceToSequence(sequence_length=20, start_token=role)
        loaded = load(source, task, Characters(), batch_size=3)
        assert loaded.facts.start_token == getattr(loaded.tokenizer, role) is not None
        assert (loaded.train[0]["tokens"][:, 0] == loaded.facts.start_token).all()
        targets, mask = loaded.train[0]["targets"], loaded.train[0]["mask"]
        assert {row[real][-1] for row, real in zip(targets, mask)} == {loaded.tokenizer.end_of_text}
    with pytest.raises(ValueError, match=r"task.start_token is 'cls'. Available: end_of_text, pad"):
        schema.build(TASKS, schema.section(TASKS, "sequence_to_sequence", start_token="cls"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "x\ty\nx\n", "a.tsv, line 2 has 1 columns: it must have 2"),
        ("a.jsonl", '{"input": "x"}\n', "a.jsonl, line 1: the column 'target' has no value"),
        ("a.jsonl", '{"input": "x", "target": null}\n', "a.jsonl, line 1: the column 'target' has no value"),
        ("a.jsonl", '{"input": "x", "target": ["y"]}\n', "a.jsonl, line 1: the column 'target' is of type list"),
        ("a.txt", "x\n", "must be a .tsv or .jsonl file, or two files separated by a comma"),
    ],
)
def test_files_without_pairs_raise(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_pairs(str(tmp_path / name))


def test_unequal_missing_or_binary_files_raise(tmp_path):
    one, two, bad = tmp_path / "a", tmp_path / "b", tmp_path / "c.tsv"
    one.write_text("x\ny\n"), two.write_text("x\n"), bad.write_bytes(b"\xff\ty\n")
    with pytest.raises(ValueError, match=r"has 2 lines and .* 1: they must be equal"):
        read_pairs(f"{one},{two}")
    with pytest.raises(FileNotFoundError, match=r"There is no file .*nowhere"):
        read_pairs(f"{one},{tmp_path}/nowhere")
    with pytest.raises(ValueError, match=r"c\.tsv, line 1 is not UTF-8 text: byte 0xff at offset 0 of the line"):
        read_pairs(str(bad))


def of_lengths(*counts):
    """Return the given numbers of pairs whose longer side has 1, 2, ... tokens; the input token identifies the pair."""
    rows = [np.full(length, length) for length, count in enumerate(counts, 1) for _ in range(count)]
    inputs = [np.array([1000 + number]) for number in range(len(rows))]
    return pairs.EncodedPairs(inputs, rows, [""] * len(rows), 12, 0, 0)


def bucketed(**options):
    source = of_lengths(10, 0, 31, 20, 0, 0, 0, 41)
    settings = {"batch_size": 10, "seed": 3, "buckets": (3, 5, 6)} | options
    return source, train_batches(source=source, **settings)


def test_bucketed_batches_have_pairs_of_similar_length():
    source, batches = bucketed()
    lengths = {3: (2,), 5: (4, 5), 12: (9,)}  # including the end token
    widths = []
    for step in range(30):
        batch = batches[step]
        width = batch["tokens"].shape[1]
        widths.append(width)
        assert {value.shape for value in batch.values()} == {(10, width)}
        assert set(batch["mask"].sum(axis=1).tolist()) <= set(lengths[width])
        for row, number in enumerate(batch["inputs"][:, 0] - 1000):
            np.testing.assert_array_equal(batch["targets"][row], source[number]["targets"][:width])
    # 10, 51 and 41 pairs give 1, 5 and 4 batches per round; no pair has a length between the second and last bucket.
    assert batches.lengths == {3: 0.1, 5: 0.5, None: 0.4}
    assert batches.examples_per_epoch == 100
    for start in (0, 10, 20):
        assert np.bincount(widths[start : start + 10])[[3, 5, 12]].tolist() == [1, 5, 4]
    assert widths[:10] != widths[10:20]


def test_pairs_of_a_bucket_occur_equally_often():
    """Check 20 rounds, each of which draws 10, 50 and 40 pairs from buckets of 10, 51 and 41."""
    _, batches = bucketed()
    seen = {3: [], 5: [], 12: []}
    for step in range(200):
        batch = batches[step]
        seen[batch["tokens"].shape[1]] += (batch["inputs"][:, 0] - 1000).tolist()
    for width, first, size, times in ((3, 0, 10, {20}), (5, 10, 51, {19, 20}), (12, 61, 41, {19, 20})):
        counts = np.bincount(seen[width], minlength=102)
        assert set(counts[first : first + size].tolist()) == times
        assert counts.sum() == counts[first : first + size].sum()
    assert seen[5][:50] != seen[5][50:100]


def test_processes_share_a_bucketed_batch():
    _, whole = bucketed()
    parts = [bucketed(process_index=index, process_count=2)[1] for index in range(2)]
    for step in (0, 7, 23):
        for name, value in whole[step].items():
            np.testing.assert_array_equal(np.concatenate([part[step][name] for part in parts]), value)


def test_pairs_as_single_texts(tmp_path):
    """Check that only the target and its end token are predicted, and that long inputs are truncated."""
    (tmp_path / "a.tsv").write_text("ab\txyz\nabcdefgh\txy\na\tx\n")
    source = PairFiles(f"{tmp_path}/a.tsv", validation_path=f"{tmp_path}/a.tsv")
    loaded = load(source, ConditionalLM(sequence_length=7), batch_size=2, evaluation_batch_size=3)
    assert loaded.facts.examples == {"train": 2, "validation": 3}  # one pair is too long
    truncated = load(source, ConditionalLM(sequence_length=7, truncate=True), batch_size=2)
    assert truncated.facts.examples == {"train": 3, "validation": 3}
    (batch,) = loaded.splits["validation"]
    end = loaded.tokenizer.end_of_text
    for row, text, target in zip(range(3), ["ab", "abcd", "a"], ["xyz", "xy", "x"]):
        mask = batch["mask"][row]
        assert batch["targets"][row][mask].tolist() == [*target.encode(), end]
        assert batch["tokens"][row][: mask.argmax() + 1].tolist() == [*text.encode(), end]
        np.testing.assert_array_equal(batch["tokens"][row, 1:], batch["targets"][row, :-1])
    assert loaded.splits["validation"].source.lengths.tolist() == [6, 7, 3]
    assert loaded.splits["validation"].source.references == ["xyz", "xy", "x"]


def test_labels_as_target_texts(tmp_path):
    (tmp_path / "a.tsv").write_text("one\ttwo\tyes\n")
    loaded = load(LabelFiles(f"{tmp_path}/a.tsv"), SequenceToSequence(sequence_length=10), batch_size=1)
    batch = loaded.train[0]
    assert loaded.tokenizer.decode(batch["inputs"][0][batch["inputs_mask"][0]]) == "one two<|endoftext|>"
    assert loaded.tokenizer.decode(batch["targets"][0][batch["mask"][0]]) == "yes<|endoftext|>"


def test_truncated_files_byte_order_marks_and_ends_of_lines(tmp_path):
    whole = gzip.compress(b"ein Haus\ta house\n" * 100)
    (tmp_path / "a.tsv.gz").write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"a\.tsv\.gz is not a complete \.gz file"):
        read_pairs(f"{tmp_path}/a.tsv.gz")
    (tmp_path / "a.tsv").write_bytes(b"ein Haus\ta house\rein Baum\ta tree\r")
    with pytest.raises(ValueError, match=r"a\.tsv has lines that end with \\r only: they must end with \\n or"):
        read_pairs(f"{tmp_path}/a.tsv")
    (tmp_path / "a.tsv").write_bytes(b"one\ttwo\r\n\r\n\t\n \t\n")
    assert read_pairs(f"{tmp_path}/a.tsv") == (["one", "", " "], ["two", "", ""])
    (tmp_path / "b.tsv").write_text("ein Haus\ta house\n", encoding="utf-8-sig")
    assert read_pairs(f"{tmp_path}/b.tsv") == (["ein Haus"], ["a house"])
