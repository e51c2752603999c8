"""Mixtures of sources: proportions, order, splits and errors."""

import json
from collections import Counter

import numpy as np
import pytest

from lineage.data import shuffle
from lineage.data.content import Arrays
from lineage.data.examples.mixture import Mixed, assign
from lineage.data.sources import SOURCES
from lineage.data.tokenizers.kinds import Characters, Words
from lineage.tasks.causal_lm import CausalLM
from lineage.tasks.image_classification import ImageClassification
from lineage.tasks.sequence_to_sequence import SequenceToSequence
from lineage.tasks.text_classification import TextClassification
from tests.data.conftest import load, train_batches

WEIGHTS = [(1.0, 1.0), (3.0, 1.0), (0.1, 0.7, 0.2), (1, 2**0.5, 5, 1e-3), (np.pi, 1.0, 1.0, 1.0, 40.0)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_source_has_its_share_of_any_number_of_examples(weights):
    count = 20_000
    part, ranks = assign(np.arange(count), weights)
    shares = np.arange(1, count + 1)[:, None] * np.array(weights) / sum(weights)
    actual = np.cumsum(part[:, None] == np.arange(len(weights)), axis=0)
    assert abs(actual - shares).max() < len(weights)
    for number in range(len(weights)):  # the examples of a source are numbered without gaps
        np.testing.assert_array_equal(ranks[part == number], np.arange(actual[-1, number]))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_position_is_assigned_without_those_before(weights):
    part, ranks = assign(np.arange(5000), weights)
    some = np.random.default_rng(0).permutation(5000)[:300]
    for whole, alone in zip((part, ranks), assign(some, weights)):
        np.testing.assert_array_equal(whole[some], alone)
    far = 10**12 + np.arange(1000)
    part, ranks = assign(far, weights)
    shares = np.array(weights) / sum(weights)
    for number, share in enumerate(shares):
        assert abs(ranks[part == number] - far[part == number] * share).max(initial=0) < len(weights)
        assert (np.diff(ranks[part == number]) == 1).all()


def numbered(*sizes):
    """Return a source for each size, whose examples have the `number` of the source and their `index`."""
    return [Arrays({"number": np.full(size, k), "index": np.arange(size)}) for k, size in enumerate(sizes)]


def test_each_source_is_shuffled_anew_in_each_of_its_epochs():
    mixed = Mixed(numbered(10, 7), (3, 1))
    batches = train_batches(source=mixed, batch_size=8, seed=5)
    rows = [batches[step] for step in range(50)]
    number, index = (np.concatenate([batch[name] for batch in rows]) for name in ("number", "index"))
    assert Counter(number.tolist()) == {0: 300, 1: 100}
    for part, size in enumerate((10, 7)):
        own = index[number == part]
        epochs = [tuple(own[start : start + size]) for start in range(0, len(own) - size + 1, size)]
        assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(range(size))}
        assert len(set(epochs)) > len(epochs) // 2
        np.testing.assert_array_equal(own, shuffle.permute(np.arange(len(own)), size, 5 + part))


def test_any_number_of_processes_reads_the_same_batches():
    mixed = Mixed(numbered(10, 7, 50), (3, 1, 0.5))
    whole = train_batches(source=mixed, batch_size=12, seed=5)
    for count in (2, 3, 4):
        parts = [
            train_batches(source=mixed, batch_size=12, seed=5, process_index=index, process_count=count)
            for index in range(count)
        ]
        for step in (0, 1, 977, 10**9):
            batch = whole[step]
            for name in ("number", "index"):
                np.testing.assert_array_equal(batch[name], np.concatenate([part[step][name] for part in parts]))


def test_texts_that_are_truncated_or_left_out_are_counted():
    class Long(Arrays):
        cut, left_out = 2, 1

    mixed = Mixed([Long({"index": np.arange(4)}), *numbered(3), Long({"index": np.arange(2)})], (1, 1, 1))
    assert (mixed.cut, mixed.left_out) == (4, 2)


def test_examples_of_different_shapes_are_lists():
    class Ragged(Arrays):
        def take(self, indices):
            return {"image": [np.full((index + 1, 2), index) for index in indices]}

    mixed = Mixed([Ragged({"image": np.zeros(4)}), Arrays({"image": 10.0 + np.zeros((3, 5, 2))})], (1, 1))
    assert [len(image) for image in mixed.take(np.array([6, 2, 4, 0]))["image"]] == [5, 3, 5, 1]
    assert [len(image) for image in mixed.shuffled(np.arange(4), 0)["image"]][::2] == [5, 5]


@pytest.fixture
def files(tmp_path):
    """Return the parts of a mixture of two files of pairs, which have 30 and 10 of them, and of labels."""
    for name, count in (("up", 30), ("down", 10)):
        for split, size in (("train", count), ("dev", 5)):
            rows = [{"input": f"{name} {k}", "target": f"{k}"} for k in range(size)]
            (tmp_path / f"{name}.{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "labels.tsv").write_text("good\tyes\nbad\tno\n")
    parts = [
        {"source": f"pairs:{tmp_path}/{name}.train.jsonl", "validation_path": f"{tmp_path}/{name}.dev.jsonl"}
        for name in ("up", "down")
    ]
    return (
        parts[0] | {"name": "up", "prefix": "shout: "},
        parts[1] | {"name": "down"},
        {"source": f"labels:{tmp_path}/labels.tsv", "prefix": "label: "},
    )


def decoded(loaded, batch):
    """Return the inputs and targets of a batch as texts."""
    sides = (("inputs", "inputs_mask"), ("targets", "mask"))
    rows = [[row[mask][:-1] for row, mask in zip(batch[a], batch[b])] for a, b in sides]
    return list(zip(*([loaded.tokenizer.decode(row) for row in side] for side in rows)))


def test_tasks_with_prefixes_are_mixed(files):
    source = SOURCES.build("mixture", parts=files, weights=(2, 1, 1))
    loaded = load(source, SequenceToSequence(sequence_length=24), Characters(), batch_size=16, seed=0)
    assert loaded.facts.examples == {"train": 42, "validation_up": 5, "validation_down": 5}
    assert loaded.train.examples_per_epoch == 42
    for step in (0, 1000):
        pairs = decoded(loaded, loaded.train[step])
        kinds = Counter(given.split()[0] for given, _ in pairs)
        assert kinds == {"shout:": 8, "down": 4, "label:": 4}
        for given, target in pairs:
            words = given.split()
            assert target == {"good": "yes", "bad": "no"}.get(words[-1], words[-1])
    ups = decoded(loaded, loaded.splits["validation_up"][0])[:5]
    assert ups == [(f"shout: up {k}", str(k)) for k in range(5)]
    content = source.read("pairs")  # as `lineage predict --split=NAME` reads it
    assert list(content) == ["train_up", "validation_up", "train_down", "validation_down", "train_labels"]
    assert content["validation_up"].inputs[1] == "shout: up 1"
    assert source.files() == [
        files[0]["source"].partition(":")[2],
        files[0]["validation_path"],
        files[1]["source"].partition(":")[2],
        files[1]["validation_path"],
        files[2]["source"].partition(":")[2],
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (30, 10, 2)),
        ({"limit": 10}, (10, 10, 2)),
        ({"temperature": 2.0}, (30**0.5, 10**0.5, 2**0.5)),
        ({"temperature": 4.0, "limit": 16}, (2, 10**0.25, 2**0.25)),
        ({"weights": (1, 2, 3)}, (1, 2, 3)),
    ],
)
def test_weights_by_size(files, options, expected):
    source = SOURCES.build("mixture", parts=files, **options)
    loaded = load(source, SequenceToSequence(sequence_length=24), Characters(), batch_size=16)
    assert loaded.train.source.weights == pytest.approx(expected)


def test_documents_are_mixed(tmp_path):
    for name, letter in (("a", "x"), ("b", "y")):
        (tmp_path / name).write_text(letter * 1000)
    parts = [{"source": f"text:{tmp_path}/{name}", "name": name} for name in "ab"]
    source = SOURCES.build("mixture", parts=tuple(parts), weights=(1, 3))
    loaded = load(source, CausalLM(sequence_length=8), Characters(), batch_size=8)
    assert loaded.tokenizer.vocab_size >= 2
    for step in (0, 999):
        letters = [loaded.tokenizer.decode(row) for row in loaded.train[step]["tokens"]]
        assert Counter(letters) == {"x" * 8: 2, "y" * 8: 6}
    assert loaded.facts.tokens == {"train_a": 900, "validation_a": 100, "train_b": 900, "validation_b": 100}
    assert list(loaded.splits) == ["validation_a", "validation_b"]


def test_images_are_mixed():
    parts = ("digits", {"source": "digits", "name": "again"})
    loaded = load(SOURCES.build("mixture", parts=parts), ImageClassification(), batch_size=16)
    assert loaded.facts.examples == {"train": 2 * 1438, "test_digits": 359, "test_again": 359}
    assert loaded.train[3]["image"].shape == (16, 8, 8, 1)
    assert SOURCES.build("mixture", parts=parts).read("images").splits.keys() == {
        "train_digits",
        "test_digits",
        "train_again",
        "test_again",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"source.parts is \(\): a mixture needs two or more"),
        ({"parts": ("cldr",)}, "a mixture needs two or more"),
        ({"parts": ("cldr", "cldr")}, "source.parts has the name 'cldr': it must be unique"),
        ({"parts": ("cldr", {"source": "cldr", "name": "a/b"})}, "has the name 'a/b': it must be unique, of letters"),
        ({"parts": ("cldr", {"source": "cldr", "name": 3})}, "source.parts has the name 3: it must be a text"),
        ({"parts": ("cldr", {"source": "cldr", "prefix": 3})}, "source.parts has the prefix 3: it must be a text"),
        ({"parts": ("cldr", {"name": "x"})}, "must be a source, or a dictionary with a `source`"),
        ({"parts": ("cldr", 3)}, "source.parts has 3: it must be a source"),
        ({"parts": ("cldr", "digits:PATH")}, "source.parts has 'digits:PATH': the source 'digits' has no options"),
        ({"parts": ("cldr", "digitz")}, "Unknown source 'digitz'. Did you mean 'digits'"),
        ({"parts": ("cldr", {"source": "stdlib", "max_byte": 3})}, "of stdlib 'max_byte'. Did you mean 'max_bytes'"),
        ({"parts": ("cldr", "stdlib"), "weights": (1,)}, "source.weights has 1 numbers for 2 source.parts"),
        ({"parts": ("cldr", "stdlib"), "weights": (1, 0)}, r"source.weights is \(1, 0\): it must be above 0"),
        ({"parts": ("cldr", "stdlib"), "weights": (1, "a")}, r"source.weights is \(1, 'a'\): it must be above 0"),
        ({"parts": ("cldr", "stdlib"), "temperature": 0.5}, "source.temperature is 0.5: it must be 1 or more"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message) as error:
        SOURCES.build("mixture", **options)
    assert len(str(error.value)) < 400


@pytest.mark.thorough
def test_sources_that_do_not_fit_are_refused(files, tmp_path):
    source = SOURCES.build("mixture", parts=("cldr", "stdlib"))
    assert source.content_kinds() == ["pairs"]
    with pytest.raises(ValueError, match="The source 'cldr' provides pairs, not documents"):
        load(source, CausalLM(sequence_length=8))
    with pytest.raises(ValueError, match=r"loader.buckets is \(8,\): a mixture does not allow it"):
        load(source, SequenceToSequence(sequence_length=24), Characters(), buckets=(8,))
    (tmp_path / "other.tsv").write_text("fine\tmaybe\nbad\tno\n")
    labels = {"source": f"labels:{tmp_path}/other.tsv", "name": "other"}
    source = SOURCES.build("mixture", parts=({"source": files[2]["source"]}, labels))
    with pytest.raises(ValueError, match=r"must have the same class_names: it is \('no', 'yes'\) in 'labels' and"):
        load(source, TextClassification(sequence_length=8), Words())
    parts = [{"source": f"text:{tmp_path}/other.tsv", "name": name, "prefix": "a"} for name in "ab"]
    source = SOURCES.build("mixture", parts=parts)
    with pytest.raises(ValueError, match="The prefix of a source in a mixture is 'a': only pairs of texts can have"):
        load(source, CausalLM(sequence_length=8))
