import gzip
import json

import numpy as np
import pytest

import data
from data import pairs, tokenizers

LEFT, RIGHT = ["ein Haus", "zwei", "drei Bäume im Wald"], ["a house", "two", "three trees"]


@pytest.fixture
def coder():
    return tokenizers.train("characters", LEFT + RIGHT)


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
    assert pairs.read(path) == (LEFT, RIGHT)


def test_tokens_are_the_targets_one_place_later(coder):
    made = pairs.encode((LEFT, RIGHT), coder, 20, drop=False)
    batch = made.take(np.array([2, 0]))
    end = coder.end_of_text
    for row, number in enumerate([2, 0]):
        targets = batch["targets"][row][batch["mask"][row]]
        assert coder.decode(targets[:-1]) == RIGHT[number]
        assert targets[-1] == end
        np.testing.assert_array_equal(batch["tokens"][row, : len(targets)], [end, *targets[:-1]])
        inputs = batch["inputs"][row][batch["inputs_mask"][row]]
        assert coder.decode(inputs[:-1]) == LEFT[number]
        assert inputs[-1] == end
    np.testing.assert_array_equal(made[0]["targets"], batch["targets"][1])


def test_long_pairs_are_dropped_or_cut_and_the_reference_stays_whole(coder):
    assert len(pairs.encode((LEFT, RIGHT), coder, 12, drop=True)) == 2
    cut = pairs.encode((LEFT, RIGHT), coder, 12, drop=False)
    assert len(cut) == 3
    assert cut.references == RIGHT
    last = cut[2]
    assert last["inputs_mask"].all()
    assert coder.decode(last["inputs"][:-1]) == LEFT[2][:11]
    assert last["inputs"][-1] == coder.end_of_text


def test_cldr_has_every_day_once_and_reads_as_babel_writes():
    splits = pairs.cldr()
    days = [day for _, targets in splits.values() for day in targets]
    assert len(days) == len(set(days)) == 36_525
    sizes = {name: len(targets) for name, (_, targets) in splits.items()}
    assert 0.79 < sizes["train"] / 36_525 < 0.81
    assert abs(sizes["validation"] - sizes["test"]) < 100
    found = dict(zip(*(splits["test"])))
    assert found["19 gennaio 1950"] == "1950-01-19"
    assert found["May 19, 1950"] == "1950-05-19"
    assert pairs.cldr() == splits


def test_load(tmp_path):
    (tmp_path / "a.tsv").write_text("".join(f"{left}\t{right}\n" for left, right in zip(LEFT, RIGHT)))
    (tmp_path / "b.tsv").write_text("Haus\thouse\n")
    source = {"source": f"pairs:{tmp_path}/a.tsv", "test_split": f"{tmp_path}/b.tsv", "tokenizer": "characters"}
    loaded = data.load(**source, sequence_length=20, batch_size=2)
    assert loaded.info["examples"] == {"train": 3, "test": 1}
    assert loaded.info["kind"] == "pairs"
    assert loaded.train[0]["inputs"].shape == (2, 20)
    batch = loaded.splits["test"][0]
    assert batch["mask"].any(axis=1).tolist() == [True, False]
    with pytest.raises(ValueError, match=r"image_size=8 has no meaning for source=.*, which is read as pairs"):
        data.load(**source, sequence_length=20, batch_size=2, image_size=8)
    with pytest.raises(ValueError, match=r"no pair of 3 fits sequence_length=3"):
        data.load(**source, sequence_length=3, batch_size=2)
    with pytest.raises(ValueError, match=r"sequence_length=0: pairs need at least 2"):
        data.load(**source, batch_size=2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "x\ty\nx\n", "a.tsv, line 2 has 1 columns: it must have 2"),
        ("a.jsonl", '{"input": "x"}\n', "a.jsonl, line 1 must be a JSON object with `input` and `target`"),
        ("a.txt", "x\n", "must be a .tsv or .jsonl file, or two files with a comma between"),
    ],
)
def test_files_that_hold_no_pairs(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        pairs.read(str(tmp_path / name))


def test_files_that_are_not_parallel_not_there_or_not_text(tmp_path):
    one, two, bad = tmp_path / "a", tmp_path / "b", tmp_path / "c.tsv"
    one.write_text("x\ny\n"), two.write_text("x\n"), bad.write_bytes(b"\xff\ty\n")
    with pytest.raises(ValueError, match=r"has 2 lines and .* 1: they must be parallel"):
        pairs.read(f"{one},{two}")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere"):
        pairs.read(f"{one},{tmp_path}/nowhere")
    with pytest.raises(ValueError, match=r"c\.tsv is not UTF-8 text"):
        pairs.read(str(bad))
