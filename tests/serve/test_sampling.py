"""Sampling, against plain NumPy with a sort."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.serve import SamplingParams
from octavo.serve.sampling import (
    MAX_LOGPROBS,
    Settings,
    pack_mask,
    sample_tokens,
    threshold,
    top_logprobs,
    unpack_mask,
)


def reference(logits, params, seen, counts=0):
    """The distribution of the next token."""
    x = logits.astype(np.float64).copy()
    x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
    x -= params.frequency_penalty * counts + params.presence_penalty * (counts > np.zeros_like(x))
    if params.temperature == 0:
        return (np.arange(len(x)) == x.argmax()).astype(float)
    x = x / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = np.zeros(len(x), bool)
    total = 0.0
    for rank, token in enumerate(order):
        if rank and (
            (params.top_k and rank >= params.top_k) or total >= params.top_p or p[token] < params.min_p * p[order[0]]
        ):
            break
        kept[token] = True
        total += p[token]
    return np.where(kept, p, 0) / p[kept].sum()


@functools.partial(jax.jit, static_argnums=2)
def draw(logits, settings, count, seen, counts):
    """Many tokens of one request: as if at many steps."""
    rows = jnp.broadcast_to(logits, (count, logits.shape[0]))
    many = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (count, *x.shape[1:])), settings)
    spread = lambda x: jnp.broadcast_to(x, rows.shape)  # noqa: E731
    return sample_tokens(rows, many, jnp.arange(count), spread(seen), spread(counts))


CASES = {
    "plain": SamplingParams(seed=1),
    "greedy": SamplingParams(temperature=0.0, seed=1),
    "cold": SamplingParams(temperature=0.5, seed=1),
    "top_k": SamplingParams(top_k=5, seed=1),
    "top_p": SamplingParams(top_p=0.6, seed=1),
    "min_p": SamplingParams(min_p=0.2, seed=1),
    "penalty": SamplingParams(repetition_penalty=1.8, top_p=0.9, seed=1),
    "presence": SamplingParams(presence_penalty=1.5, seed=1),
    "frequency": SamplingParams(frequency_penalty=-0.4, presence_penalty=0.3, top_k=9, seed=1),
    "all": SamplingParams(temperature=1.3, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=1),
    "top_p of nearly all": SamplingParams(top_p=0.995, temperature=1.7, seed=1),
    "top_k beyond the candidates": SamplingParams(top_k=150, temperature=3.0, seed=1),
}


@pytest.mark.parametrize("params", list(CASES.values()), ids=list(CASES))
def test_distributions(params):
    rng = np.random.default_rng(0)
    logits = (2 * rng.standard_normal(300)).astype(np.float32)
    seen = rng.random(300) < 0.2
    counts = seen * rng.integers(0, 4, 300)
    want = reference(logits, params, seen, counts)
    count = 4000
    choice = draw(jnp.asarray(logits), Settings.of([params]), count, jnp.asarray(seen), jnp.asarray(counts, jnp.int32))
    tokens = np.asarray(choice.token)
    assert (want[tokens] > 0).all()
    share = np.bincount(tokens, minlength=300) / count
    # Total variation of a sample of this size from its own distribution, with room.
    spread = 0.5 * np.sqrt(2 / np.pi) * np.sum(np.sqrt(want * (1 - want) / count))
    assert 0.5 * np.abs(share - want).sum() < 1.3 * spread + 1e-9
    plain = logits.astype(np.float64)
    np.testing.assert_allclose(choice.logprob, (plain - np.log(np.sum(np.exp(plain))))[tokens], atol=1e-5)


lowest_kept = jax.jit(threshold)


@pytest.mark.parametrize("name", [name for name, p in CASES.items() if p.temperature])
def test_what_is_kept(name):
    params = CASES[name].replace(repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
    logits = (2 * np.random.default_rng(3).standard_normal(300)).astype(np.float32)
    want = reference(logits, params, np.zeros(300, bool)) > 0
    scaled = jnp.asarray(logits / params.temperature)[None]
    low = lowest_kept(scaled, Settings.of([params]))
    np.testing.assert_array_equal(np.asarray(scaled[0] >= low[0]), want)


def test_equal_tokens_stay_together():
    logits = jnp.asarray([[1.0, 3.0, 3.0, 3.0, 0.0]])
    low = lowest_kept(logits, Settings.of([SamplingParams(top_k=2)]))
    assert (logits[0] >= low[0]).tolist() == [False, True, True, True, False]


run = jax.jit(sample_tokens)


def test_rows_are_independent_and_seeds_repeat():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((4, 300)), jnp.float32)
    many = [
        SamplingParams(seed=7),
        SamplingParams(temperature=0),
        SamplingParams(seed=7, top_p=0.5),
        SamplingParams(seed=2**40 + 3),
    ]
    seen, number = jnp.zeros((4, 300), bool), jnp.asarray([3, 0, 3, 9])
    together = run(logits, Settings.of(many), number, seen).token
    for row, params in enumerate(many):
        # In the company of others, whose rows are hotter.
        others = [SamplingParams(seed=99, temperature=5.0)] * 4
        others[row] = params
        assert run(logits, Settings.of(others), number, seen).token[row] == together[row]
    same = [run(logits, Settings.of([SamplingParams(seed=s)] * 4), number, seen).token[0] for s in range(20)]
    assert len(set(map(int, same))) > 5
    assert jnp.argmax(logits[1]) == together[1]


def test_only_allowed_tokens_are_sampled():
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.standard_normal((3, 300)), jnp.float32)
    masks = np.ones((3, 300), bool)
    masks[1] = rng.random(300) < 0.03
    masks[2] = np.arange(300) == 299
    bits = jnp.asarray(np.stack([pack_mask(mask) for mask in masks]))
    np.testing.assert_array_equal(unpack_mask(bits, 300), masks)
    for params in (SamplingParams(temperature=0), SamplingParams(seed=2, temperature=3.0, top_p=0.9)):
        for number in range(10):
            given = (Settings.of([params] * 3), jnp.full(3, number), jnp.zeros((3, 300), bool), None)
            sample, free = masked(logits, *given, bits), masked(logits, *given, jnp.full_like(bits, 255))
            assert sample.token[0] == free.token[0]
            assert masks[1][sample.token[1]]
            assert sample.token[2] == 299
            # Probabilities are those of the model.
            total = jax.nn.logsumexp(logits[1])
            np.testing.assert_allclose(sample.logprob[1], logits[1, sample.token[1]] - total, rtol=1e-5)
        if not params.temperature:
            assert sample.token[1] == jnp.argmax(jnp.where(masks[1], logits[1], -jnp.inf))


masked = jax.jit(sample_tokens)


def test_parameters_are_no_reason_to_compile():
    traced = []

    @jax.jit
    def traced_run(logits, settings, number, seen):
        traced.append(1)
        return sample_tokens(logits, settings, number, seen)

    for params in CASES.values():
        traced_run(jnp.zeros((1, 300)), Settings.of([params]), jnp.zeros(1, jnp.int32), jnp.zeros((1, 300), bool))
    assert len(traced) == 1


def test_nan_shows():
    logits = jnp.zeros((4, 300)).at[0, 17].set(jnp.nan)
    for params in (SamplingParams(temperature=0), SamplingParams(seed=0, top_p=0.9)):
        sample = run(logits, Settings.of([params] * 4), jnp.zeros(4, jnp.int32), jnp.zeros((4, 300), bool))
        assert np.isnan(sample.logprob).tolist() == [True, False, False, False]
        assert 0 <= sample.token[0] < 300


def test_top_logprobs():
    logits = jnp.asarray([[0.0, 2.0, 1.0, -1.0]])
    tokens, values = top_logprobs(logits, 2)
    assert tokens.tolist() == [[1, 2]]
    np.testing.assert_allclose(values[0], np.log(np.exp([2, 1]) / np.exp([0, 2, 1, -1]).sum()), rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"temperature": -1.0}, "temperature is 0 or more, got -1.0"),
        ({"top_k": -1}, "top_k is 0 or more"),
        ({"top_p": 0.0}, "top_p is above 0 and at most 1"),
        ({"min_p": 2.0}, "min_p is from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is positive"),
        ({"presence_penalty": float("inf")}, "presence_penalty is finite"),
        ({"max_tokens": 0}, "max_tokens is at least 1"),
        ({"logprobs": MAX_LOGPROBS + 1}, f"logprobs is from 0 to {MAX_LOGPROBS}"),
        ({"stop": "end"}, "stop is a tuple of texts"),
        ({"stop": ("",)}, "stop is a tuple of texts that are not empty"),
    ],
)
def test_errors(fields, text):
    with pytest.raises(ValueError, match=text):
        SamplingParams(**fields)
