from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.data import shuffle
from lineage.data.examples import packing
from lineage.data.examples.packing import Packed, pack
from lineage.data.sources.text import StandardLibrary, Text
from lineage.data.tokens import Stream, tokenize
from lineage.tasks.causal_lm import CausalLM
from tests.data.conftest import load, train


def stream(lengths):
    """Return documents of some lengths; token n has the number n."""
    ends = np.cumsum(np.array(lengths, np.int64))
    return Stream(np.arange(ends[-1] if len(ends) else 0, dtype=np.int32), 0, 0, ends)


def parts(row):
    """Return the tokens, and the targets, of each part of a row."""
    numbers = range(1, row["segments"].max() + 1)
    return [
        (row["tokens"][row["segments"] == n].tolist(), row["targets"][row["segments"] == n].tolist()) for n in numbers
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 16))
def test_rows_have_each_target_once_with_the_whole_text_before_it(lengths, length):
    text = stream(lengths)
    if max(lengths) < 2:
        with pytest.raises(ValueError, match="No text has two tokens or more"):
            Packed(text, length)
        return
    packed = Packed(text, length)
    found = []
    for number in range(len(packed)):
        row, count = packed[number], packed[number]["mask"].sum()
        assert row["mask"].tolist() == [True] * count + [False] * (length - count)
        assert not any(row[name][count:].any() for name in ("tokens", "targets", "segments", "positions"))
        assert (np.diff(row["segments"][:count]) >= 0).all()
        for tokens, targets in parts(row):
            assert targets == [token + 1 for token in tokens]
            found.append((tokens[0], len(tokens)))
        np.testing.assert_array_equal(row["positions"][:count] == 0, np.diff(row["segments"][:count], prepend=0) == 1)
        np.testing.assert_array_equal(np.diff(row["positions"][:count])[np.diff(row["segments"][:count]) == 0], 1)
    expected = [
        (int(end - size + first), min(length, size - 1 - first))
        for end, size in zip(text.ends, lengths)
        for first in range(0, size - 1, length)
    ]
    assert sorted(found) == expected


def best_fit_decreasing(lengths, size):
    """Return the sorted lengths of the parts in each row, part by part."""
    rows = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= size]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


@given(st.lists(st.integers(1, 20), min_size=1, max_size=80), st.integers(20, 40))
def test_rows_are_those_of_best_fit_decreasing(lengths, size):
    order, firsts = pack(np.array(lengths), size)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    rows = [np.array(lengths)[order[start:stop]] for start, stop in pairwise(firsts)]
    assert all(0 < row.sum() <= size for row in rows)
    # Rows with the same room are interchangeable, so that only the sums must be the same.
    assert Counter(int(row.sum()) for row in rows) == Counter(map(sum, best_fit_decreasing(lengths, size)))


def test_packing_time_does_not_depend_on_the_number_of_documents(monkeypatch):
    steps = []
    insert = packing.insort
    monkeypatch.setattr(packing, "insort", lambda *args: steps.append(1) or insert(*args))
    counts = []
    for copies in (1, 100):
        pack(np.tile(np.arange(1, 100), copies), 256)
        counts.append(len(steps))
        steps.clear()
    assert counts[1] < 2 * counts[0]


def test_batches_are_rows():
    packed = Packed(stream([5, 3, 9, 2, 4, 4]), 8)
    batch = packed.take(np.array([1, 0, 1]))
    for name, value in batch.items():
        np.testing.assert_array_equal(value, np.stack([packed[1][name], packed[0][name], packed[1][name]]))


def test_shards_and_processes_give_the_same_rows(tmp_path):
    what, tokenizer = (StandardLibrary(max_bytes=300_000), CausalLM(64, packing=True)), train("bytes", [])
    whole = load(*what, batch_size=8, seed=3)
    kept = CausalLM(sequence_length=64, packing=True, cache_dir=str(tmp_path))
    shares = [load(what[0], kept, batch_size=8, seed=3, process_index=i, process_count=2) for i in range(2)]
    for step in (0, 7, 100_000):
        for name, value in whole.train[step].items():
            np.testing.assert_array_equal(np.concatenate([share.train[step][name] for share in shares]), value)
    split = tokenize(what[0].documents()["validation"], tokenizer)
    counts = sum(batch["mask"].sum() for batch in whole.splits["validation"])
    assert counts == len(split.tokens) - len(split.ends)


def test_long_document_is_split(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 25)
    loaded = load(Text(str(tmp_path / "a.txt"), validation_fraction=0.0), CausalLM(sequence_length=10, packing=True))
    rows = loaded.train.source.take(np.arange(3))
    assert sorted(rows["mask"].sum(axis=1)) == [4, 10, 10]
    assert (rows["positions"].max(axis=1) == rows["mask"].sum(axis=1) - 1).all()


@pytest.mark.parametrize("options", [{"stride": 4}, {"evaluation_stride": 4}, {"order": "stream"}])
def test_options_that_packing_does_not_allow_raise(options):
    loader = {"order": options["order"]} if "order" in options else {}
    task = CausalLM(sequence_length=8, packing=True, **({} if loader else options))
    with pytest.raises(ValueError, match=r"task.packing is True: loader.order must be '', and the strides"):
        load(StandardLibrary(max_bytes=100_000), task, batch_size=2, **loader)


def test_invalid_length_raises():
    with pytest.raises(ValueError, match=r"task.sequence_length is 0: it must be 1 or more"):
        Packed(stream([3, 4]), 0)


def test_little_is_padding():
    lengths = 2 + shuffle.draw(shuffle.keys(np.arange(5000), 0), 1)[:, 0] % 200
    packed = Packed(stream(lengths.astype(int)), 256)
    assert packed.lengths.sum() / (len(packed) * 256) > 0.99
