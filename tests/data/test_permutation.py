"""Every place gets a number, no number comes twice, and orders differ."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.data.mixing import draws, key_of, uniform
from octavo.data.permutation import Permutation, shuffled

KEYS = st.integers(0, 2**64 - 1)


@given(st.integers(1, 3000), KEYS)
def test_a_permutation_has_every_number_once(size, key):
    assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == list(range(size))


@given(st.integers(1, 2**40), KEYS, st.data())
def test_a_place_is_looked_up_alone_as_among_others(size, key, data):
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5)))
    together = Permutation(size, key)(places)
    assert (together < size).all()
    assert (together >= 0).all()
    assert together.tolist() == [Permutation(size, key)(places[i : i + 1]).item() for i in range(places.size)]


@pytest.mark.parametrize("size", [1, 2, 3, 64, 1000])
def test_sizes_at_and_beside_powers_of_two(size):
    assert len(set(Permutation(size, 5)(np.arange(size)).tolist())) == size


def test_an_empty_permutation_is_refused():
    with pytest.raises(ValueError, match=r"of one number or more, got size=0"):
        Permutation(0, 1)


def test_orders_look_random():
    size, orders = 512, np.stack([Permutation(512, key_of(7, epoch))(np.arange(512)) for epoch in range(200)])
    # Where the first place goes is spread over the range; places and neighbours are hardly correlated.
    assert abs(orders[:, 0].mean() - size / 2) < 4 * size / np.sqrt(12 * 200)
    ranks = np.arange(size)
    assert max(abs(np.corrcoef(ranks, order)[0, 1]) for order in orders) < 5 / np.sqrt(size)
    neighbours = [np.corrcoef(order[:-1], order[1:])[0, 1] for order in orders]
    assert abs(np.mean(neighbours)) < 0.05
    fixed = (orders == ranks).sum(axis=1).mean()
    assert 0.5 < fixed < 2  # one is expected of a random permutation


@given(st.integers(1, 60), st.integers(0, 5), st.integers(1, 9))
def test_an_endless_shuffle_has_all_rows_in_every_epoch_however_it_is_cut(size, seed, step):
    rows = np.arange(3 * size)
    whole = shuffled(rows, size, seed)
    for epoch in whole.reshape(3, size):
        assert sorted(epoch.tolist()) == list(range(size))
    cut = [shuffled(rows[i : i + step], size, seed) for i in range(0, rows.size, step)]
    assert np.concatenate(cut).tolist() == whole.tolist()


def test_epochs_and_seeds_have_orders_of_their_own():
    rows = np.arange(200)
    first, second = shuffled(rows, 100, 0).reshape(2, 100)
    assert first.tolist() != second.tolist()
    assert first.tolist() != shuffled(rows[:100], 100, 1).tolist()


def test_draws_are_uniform_and_the_same_everywhere():
    values = uniform(draws(key_of(3), 20_000))
    assert ((values >= 0) & (values < 1)).all()
    assert abs(values.mean() - 0.5) < 0.01
    assert np.histogram(values, 10, (0, 1))[0].min() > 1800
    # splitmix64 from state 0 begins with this number: Steele, Lea and Flood, 2014.
    assert draws(0, 1).item() == 0xE220A8397B1DCDAF
