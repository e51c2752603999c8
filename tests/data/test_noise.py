import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.data import shuffle
from lineage.data.examples import corruption
from lineage.data.sources.text import Text
from lineage.data.tokenizers.kinds import BPE
from lineage.tasks.denoising import Denoising
from tests.data.conftest import load, train

MASK = -1
ROWS = st.integers(1, 120).map(lambda n: np.arange(n))
RATES = st.floats(0.05, 0.8)
SEEDS = st.integers(0, 2**32)


def random(seed=0):
    return np.random.default_rng(seed)


@given(tokens=ROWS, rate=RATES, seed=SEEDS)
def test_mask_replaces_the_given_fraction_in_place(tokens, rate, seed):
    before, new = tokens.copy(), corruption.mask(tokens, random(seed), rate, token=MASK)
    assert (new == MASK).sum() == round(rate * len(tokens))
    np.testing.assert_array_equal(np.where(new == MASK, tokens, new), tokens)
    np.testing.assert_array_equal(tokens, before)


@given(tokens=ROWS, rate=RATES, seed=SEEDS)
def test_delete_keeps_the_order_of_other_tokens(tokens, rate, seed):
    new = corruption.delete(tokens, random(seed), rate)
    assert len(new) == len(tokens) - round(rate * len(tokens))
    assert (np.diff(new) > 0).all()


@given(tokens=ROWS, rate=RATES, mean=st.floats(0.5, 8), seed=SEEDS)
def test_infill_removes_the_given_fraction_in_separate_spans(tokens, rate, mean, seed):
    new = corruption.infill(tokens, random(seed), rate, mean, token=MASK)
    left = new[new != MASK]
    assert (np.diff(left) > 0).all()
    assert len(left) == len(tokens) - round(rate * len(tokens))
    assert len(new) <= len(tokens)  # else the end of an input would be cut off
    masks = np.flatnonzero(new == MASK)
    assert (np.diff(masks) > 1).all()
    # There is exactly one mask for each gap.
    gaps = np.flatnonzero(np.diff(left, prepend=-1, append=len(tokens)) > 1)
    assert len(gaps) <= len(masks)


def test_span_lengths_follow_a_poisson_distribution():
    """Check that span lengths follow a Poisson distribution, including empty spans (5%)."""
    tokens, counts = np.arange(10_000), np.zeros(50)
    for seed in range(10):
        new = corruption.infill(tokens, random(seed), 0.3, 3.0, token=MASK)
        for place in np.flatnonzero(new == MASK):
            before = new[place - 1] if place else -1
            after = new[place + 1] if place + 1 < len(new) else len(tokens)
            counts[after - before - 1] += 1
    expected = np.cumprod([np.exp(-3), *(3 / np.arange(1, 9))]) * counts.sum()
    assert (np.abs(counts[:9] - expected) < 4.5 * expected**0.5).all()
    places = np.flatnonzero(new == MASK) / len(new)
    assert abs(places.mean() - 0.5) < 0.05


@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=60), seed=SEEDS)
def test_permutation_keeps_the_sentences(tokens, seed):
    ends = np.arange(10) == 3
    new = corruption.permute_sentences(np.array(tokens), random(seed), ends=ends)

    def split(tokens):
        cuts = [i + 1 for i, token in enumerate(tokens[:-1]) if token == 3]
        return sorted(tuple(tokens[a:b]) for a, b in zip([0, *cuts], [*cuts, len(tokens)]))

    if tokens[-1] == 3:
        assert split(new.tolist()) == split(tokens)
    assert sorted(new.tolist()) == sorted(tokens)


def test_permutation_produces_all_orders():
    tokens = np.array([0, 3, 1, 3, 2, 3])
    orders = {tuple(corruption.permute_sentences(tokens, random(s), ends=np.arange(10) == 3)[::2]) for s in range(100)}
    assert len(orders) == 6


@given(tokens=ROWS, seed=SEEDS)
def test_rotate_is_a_rotation(tokens, seed):
    new = corruption.rotate(tokens, random(seed))
    np.testing.assert_array_equal(np.roll(new, int(new[0])), tokens)


def test_rotate_starts_at_a_uniformly_random_token():
    firsts = np.bincount([corruption.rotate(np.arange(8), random(seed))[0] for seed in range(4000)])
    assert len(firsts) == 8
    assert (np.abs(firsts - 500) < 5 * 500**0.5).all()


TEXT = "First. Second! Third? fourth\nfifth 5.6 " * 60


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "words"])
def test_parse_applies_steps_in_order(kind):
    sizes = {"bpe": 400, "unigram": 30, "wordpiece": 60, "words": 0}
    coder = train(kind, [TEXT], ("pad", "end_of_text", "mask"), vocab_size=sizes[kind])
    ids = coder.encode(TEXT)[:60]
    permute, mask = corruption.parse("permute_sentences | mask(0.5)", coder)
    new = permute(ids, random())
    assert sorted(new.tolist()) == sorted(ids.tolist())
    sentences = coder.decode(ids).replace("! ", ". ").replace("? ", ". ").count(". ")
    assert 5 < sentences <= permute.keywords["ends"][ids].sum() + 1
    assert (mask(new, random()) == coder.mask).sum() == 30


def test_load(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    source, tokenizer = Text(f"{tmp_path}/a.txt"), BPE(300)
    task = Denoising(sequence_length=33, noise="permute_sentences | infill(0.3, 3)")
    loaded = load(source, task, tokenizer, batch_size=4)
    coder, batch = loaded.tokenizer, loaded.train[0]
    assert {name: value.shape for name, value in batch.items()} == dict.fromkeys(
        ("inputs", "inputs_mask", "tokens", "targets", "mask"), (4, 33)
    )
    assert loaded.facts.start_token == coder.end_of_text
    for row in range(4):
        targets = batch["targets"][row][batch["mask"][row]]
        assert coder.decode(targets[:-1]) in TEXT
        assert batch["tokens"][row, : len(targets)].tolist() == [coder.end_of_text, *targets[:-1]]
        inputs = batch["inputs"][row][batch["inputs_mask"][row]]
        kept = inputs[(inputs != coder.mask) & (inputs != coder.end_of_text)]
        assert len(kept) == len(targets) - 1 - round(0.3 * (len(targets) - 1))
        assert inputs[-1] == targets[-1] == coder.end_of_text
    assert (loaded.train[0]["inputs"] == batch["inputs"]).all()
    assert (loaded.train[1]["inputs"] != batch["inputs"]).any()
    last = list(loaded.splits["validation"])[-1]
    assert last["mask"].any(axis=1).sum() < 4
    task = Denoising(sequence_length=33, noise="delete(0.9) | mask(0.2) | rotate | infill(0.5)")
    every = load(source, task, tokenizer, batch_size=4)
    assert every.train[0]["inputs_mask"].any(axis=1).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "task.noise is '': it must name a function, such as infill"),
        ("masks(0.1)", r"'masks\(0.1\)' is not one of mask\(rate\), delete\(rate\), infill\(rate, mean\), permute"),
        ("mask", "'mask' is not one of"),
        ("infill(1.5)", "rates must be between 0 and 1"),
        ("infill(0.5, 0)", "and lengths above 0"),
    ],
)
def test_invalid_noise_raises(text, message):
    with pytest.raises(ValueError, match=message):
        corruption.parse(text, train("bytes", [], ("mask",)))


def test_noise_depends_on_the_keys_only(tmp_path):
    coder = train("bytes", [], ("end_of_text", "mask"))
    add = corruption.AddNoise(corruption.parse("infill(0.3) | rotate", coder), 21, coder.end_of_text)
    tokens = np.tile(np.arange(20, dtype=np.int32), (3, 1))
    batch, keys = {"tokens": tokens, "mask": np.ones(tokens.shape, bool)}, shuffle.keys(np.arange(3), 0)
    whole, part = add(batch, keys), add({name: value[1:] for name, value in batch.items()}, keys[1:])
    for name in whole:
        np.testing.assert_array_equal(whole[name][1:], part[name])
