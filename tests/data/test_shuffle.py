import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.data import shuffle


@given(length=st.integers(1, 300), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_each_epoch_is_a_permutation(length, seed, epoch):
    indices = shuffle.permute(epoch * length + np.arange(length), length, seed)
    assert sorted(indices) == list(range(length))


def test_indices_do_not_depend_on_other_positions():
    positions = np.array([5, 10**12, 99, 5])
    together = shuffle.permute(positions, 1000, 3)
    assert [shuffle.permute(positions[i : i + 1], 1000, 3)[0] for i in range(4)] == together.tolist()


@pytest.mark.parametrize("other", ["seed", "epoch"])
def test_seeds_and_epochs_differ(other):
    positions = np.arange(1000)
    first = shuffle.permute(positions, 1000, 0)
    second = shuffle.permute(positions, 1000, 1) if other == "seed" else shuffle.permute(positions + 1000, 1000, 0)
    # The number of positions at which two independent permutations agree is Poisson(1).
    assert (first == second).sum() < 8
    assert (first == positions).sum() < 8


def test_positions_and_neighbors_are_uniform():
    length, epochs = 10, 20_000
    orders = shuffle.permute(np.arange(length * epochs), length, 7).reshape(epochs, length)
    counts = np.array([np.bincount(orders[:, place], minlength=length) for place in range(length)])
    pairs = np.bincount(orders[:, 0] * length + orders[:, 1], minlength=length**2).reshape(length, length)
    assert pairs.diagonal().sum() == 0
    # Chi-square: the mean is the number of degrees of freedom f, the standard deviation sqrt(2 f).
    place_statistic = ((counts - epochs / 10) ** 2 / (epochs / 10)).sum()
    assert abs(place_statistic - 81) < 5 * np.sqrt(2 * 81)
    off = pairs[~np.eye(length, dtype=bool)]
    assert abs(((off - epochs / 90) ** 2 / (epochs / 90)).sum() - 89) < 5 * np.sqrt(2 * 89)


def test_more_than_32_bits():
    length = 10**11 + 3
    indices = shuffle.permute(np.arange(100_000), length, 0)
    assert len(set(indices.tolist())) == 100_000
    assert 0 <= indices.min() < length / 1000
    assert length * 0.999 < indices.max() < length
    assert np.mean(indices) == pytest.approx(length / 2, rel=0.01)


def test_keys_are_distinct_and_fold_is_independent():
    keys = shuffle.keys(np.arange(100_000), 5)
    folded = [shuffle.fold(keys, number) for number in range(3)]
    assert len(np.unique(np.concatenate([keys, *folded]))) == 400_000
    ones = np.unpackbits(keys.view(np.uint8)).mean()
    assert ones == pytest.approx(0.5, abs=0.001)
