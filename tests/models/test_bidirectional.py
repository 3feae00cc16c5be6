"""Attention to both sides: against softmax as written, in blocks as in one."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models.bidirectional import attend_bidirectional, relative_bias, relative_bucket
from tests.arrays import normal

LENGTH = 21
MASK = np.arange(LENGTH)[None] < np.asarray([LENGTH, 9])[:, None]
QUERY, KEY, VALUE = (normal(seed, 2, LENGTH, 3, 4) for seed in range(3))


def reference(window, bias=None):
    scores = np.einsum("bqhd,bkhd->bhqk", QUERY, KEY) / 2
    scores = scores if bias is None else scores + bias
    position = np.arange(LENGTH)
    near = np.abs(position[:, None] - position) <= (window or LENGTH)
    scores = np.where(MASK[:, None, None] & near, scores, -np.inf)
    weights = np.exp(scores)
    with np.errstate(invalid="ignore"):  # padding beyond all windows
        return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), VALUE)


@pytest.mark.parametrize("window", [0, 1, 5, 30])
@pytest.mark.parametrize("block", [512, 8, 7, 4])
def test_attention_is_the_softmax_over_a_window(window, block):
    found = jax.jit(attend_bidirectional, static_argnames=("window", "block"))(
        QUERY, KEY, VALUE, jnp.asarray(MASK), window=window, block=block
    )
    np.testing.assert_allclose(found[MASK], reference(window)[MASK], rtol=0, atol=1e-5)
    assert np.isfinite(found).all()


def test_a_bias_is_added_to_scores():
    bias = normal(3, 3, LENGTH, LENGTH)
    found = attend_bidirectional(QUERY, KEY, VALUE, jnp.asarray(MASK), bias=bias, block=4)
    np.testing.assert_allclose(found[MASK], reference(0, np.asarray(bias))[MASK], rtol=0, atol=1e-5)


def test_a_bias_is_that_of_the_relative_position():
    table = normal(4, 32, 3)
    bias = relative_bias(table, 200)
    for query, key in ((0, 0), (0, 1), (7, 3), (0, 199), (150, 20)):
        wanted = table[relative_bucket(np.asarray([key - query]), 32)[0]]
        np.testing.assert_array_equal(bias[:, query, key], wanted)


def test_buckets_grow_by_logarithm():
    buckets = relative_bucket(-np.arange(200), 32)
    assert buckets[:8].tolist() == list(range(8))
    assert (np.diff(buckets) >= 0).all()
    for bucket in range(9, 16):  # between 8 and 128 in eight steps of equal ratio
        first = int(np.argmax(buckets == bucket))
        assert first == math.ceil(8 * 16 ** ((bucket - 8) / 8))
    np.testing.assert_array_equal(relative_bucket(np.arange(1, 200), 32), 16 + buckets[1:])
