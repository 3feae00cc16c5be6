"""The shuffle is a permutation with random access, different in every epoch; random numbers are splitmix64's."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.data.shuffle import Permutation, fold_key, random_bits, shuffle_epochs, to_uniform

KEYS = st.integers(0, 2**64 - 1)


@given(st.integers(1, 3000), KEYS)
@example(1, 5)
@example(2, 5)
@example(3, 5)
@example(64, 5)
def test_a_permutation_has_every_number_once(size, key):
    assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == list(range(size))


@given(st.integers(1, 2**40), KEYS, st.data())
def test_lookups_are_independent(size, key, data):
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5)))
    together = Permutation(size, key)(index)
    assert (together < size).all()
    assert (together >= 0).all()
    assert together.tolist() == [Permutation(size, key)(index[i : i + 1]).item() for i in range(index.size)]


def test_an_empty_permutation_raises():
    with pytest.raises(ValueError, match=r"of one number or more, got size=0"):
        Permutation(0, 1)


def test_orders_look_random():
    size, orders = 512, np.stack([Permutation(512, fold_key(7, epoch))(np.arange(512)) for epoch in range(200)])
    # Where the first place goes is spread over the range; index and neighbours are hardly correlated.
    assert abs(orders[:, 0].mean() - size / 2) < 4 * size / np.sqrt(12 * 200)
    ranks = np.arange(size)
    assert max(abs(np.corrcoef(ranks, order)[0, 1]) for order in orders) < 5 / np.sqrt(size)
    neighbours = [np.corrcoef(order[:-1], order[1:])[0, 1] for order in orders]
    assert abs(np.mean(neighbours)) < 0.05
    fixed = (orders == ranks).sum(axis=1).mean()
    assert 0.5 < fixed < 2  # one is expected of a random permutation


@given(st.integers(1, 60), st.integers(0, 5), st.integers(1, 9))
def test_every_epoch_has_all_rows_whatever_the_batch_size(size, seed, step):
    rows = np.arange(3 * size)
    whole = shuffle_epochs(rows, size, seed)
    for epoch in whole.reshape(3, size):
        assert sorted(epoch.tolist()) == list(range(size))
    cut = [shuffle_epochs(rows[i : i + step], size, seed) for i in range(0, rows.size, step)]
    assert np.concatenate(cut).tolist() == whole.tolist()


def test_epochs_and_seeds_differ():
    rows = np.arange(200)
    first, second = shuffle_epochs(rows, 100, 0).reshape(2, 100)
    assert first.tolist() != second.tolist()
    assert first.tolist() != shuffle_epochs(rows[:100], 100, 1).tolist()


def test_random_numbers_are_uniform_and_portable():
    values = to_uniform(random_bits(fold_key(3), 20_000))
    assert ((values >= 0) & (values < 1)).all()
    assert abs(values.mean() - 0.5) < 0.01
    assert np.histogram(values, 10, (0, 1))[0].min() > 1800
    # splitmix64 from state 0 begins with this number: Steele, Lea and Flood, 2014.
    assert random_bits(0, 1).item() == 0xE220A8397B1DCDAF
