"""Mismatch of two policies, importance weights, and log probabilities of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.rollout import importance_weights, mismatch, token_logprobs
from tests.arrays import normal


def test_mismatch_is_the_formula_in_float64():
    rng = np.random.default_rng(0)
    train, rollout = np.log(rng.uniform(0.05, 1, (2, 3, 5)))
    mask = rng.integers(0, 2, (3, 5))
    d = (train - rollout)[mask == 1]
    found = mismatch(train, rollout, mask)
    expected = (-d.mean(), (np.exp(d) - d - 1).mean(), np.abs(d).max())
    np.testing.assert_allclose(found[:3], expected, rtol=1e-5)
    share = np.exp(d).sum() ** 2 / (d.size * np.exp(2 * d).sum())
    np.testing.assert_allclose(found.effective_sample_size, share, rtol=1e-5)


def test_small_mismatch_is_not_lost_in_rounding():
    found = mismatch(jnp.full(10, -1.0), jnp.full(10, -1.0 - 2.0**-12))
    np.testing.assert_allclose(found.k3, 2.0**-25, rtol=1e-3)  # d^2 / 2; e^d - d - 1 in float32 would be 0


def test_padding_may_hold_anything():
    train, rollout = jnp.asarray([-1.0, jnp.nan]), jnp.asarray([-1.5, -jnp.inf])
    assert mismatch(train, rollout, jnp.asarray([1, 0])) == mismatch(train[:1], rollout[:1])
    np.testing.assert_allclose(importance_weights(train, rollout, jnp.asarray([1, 0])), [np.exp(0.5), 0], rtol=1e-6)
    empty = mismatch(train, rollout, jnp.zeros(2))
    assert (float(empty.k3), float(empty.max)) == (0.0, 0.0)


def test_weights_are_truncated_finite_and_have_no_gradient():
    rollout = jnp.asarray([-1.0, -500.0, -0.1])
    train = jnp.asarray([-1.2, -1.0, -500.0])
    np.testing.assert_allclose(importance_weights(train, rollout), [np.exp(-0.2), 2.0, np.exp(-20)], rtol=1e-5)
    np.testing.assert_allclose(importance_weights(train, rollout, low=0.5, high=5.0), [np.exp(-0.2), 5.0, 0], rtol=1e-5)
    gradient = jax.grad(lambda t: importance_weights(t, rollout).sum())(train)
    np.testing.assert_array_equal(gradient, np.zeros(3))
    with pytest.raises(ValueError, match=r"low=3 and high=2\.0"):
        importance_weights(train, rollout, low=3)
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\) tokens: give both for the same"):
        mismatch(train, rollout[:2])


def test_token_logprobs_are_log_softmax():
    logits = normal(0, 2, 4, 7)
    tokens = jnp.asarray([[1, 2, 3, 4], [6, 5, 0, 1]])
    logs = jax.nn.log_softmax(logits)
    expected = [[logs[row, i, tokens[row, i + 1]] for i in range(3)] for row in range(2)]
    np.testing.assert_allclose(token_logprobs(logits, tokens), expected, rtol=1e-6)
