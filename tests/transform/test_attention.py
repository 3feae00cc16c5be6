"""Attention in int8 as in SageBwd: what is recognized, what it changes, and that it trains."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import octavo
from octavo import QtRule
from octavo.models.attention import AttentionOptions, attend
from octavo.transform.softmax import center, find_keys

LENGTH, HEADS, DIM = 64, 2, 16
PLAIN = QtRule(scope="activations", act_qtype="int8", bwd_qtype="int8")
SAGE = PLAIN.replace(attention=True)
MASK = jnp.tril(jnp.ones((2, 1, 1, LENGTH, LENGTH), bool))


def normalized_before(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def normalized_after(q, k, v):
    return attend(q, k, v, jnp.broadcast_to(MASK[:1], (q.shape[0], *MASK.shape[1:])))


@jax.jit
def biased_softmax(scores, bias):
    return jax.nn.softmax(scores * 0.5 + bias)


def keys_first(q, k, v):
    """Scores by key and query; softmax over the keys in a function of its own."""
    scores = jnp.einsum("bkhd,bqhd->bhkq", k, q).swapaxes(-1, -2)
    weights = biased_softmax(jnp.where(MASK[:, 0], scores, -1e9), jnp.ones((1, 1, LENGTH, LENGTH)))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def capped(q, k, v):
    return attend(q, k, v, MASK, AttentionOptions(softcap=5.0))


def with_sinks(q, k, v):
    return attend(q, k, v, MASK, AttentionOptions(sinks=jnp.zeros(HEADS)))


def scores_returned(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v) + jnp.mean(scores)


def scaled_by_key(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.arange(1.0, LENGTH + 1)[None, None, None]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def over_queries(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-2), v)


FOUND = {normalized_before: 1, normalized_after: 1, keys_first: 0, over_queries: 0}
NOT_FOUND = (capped, with_sinks, scores_returned, scaled_by_key)


@pytest.fixture(scope="module")
def qkv():
    """Queries, keys whose mean over tokens is large, values, and a cotangent."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, g = (jax.random.normal(key, (2, LENGTH, HEADS, DIM)) for key in keys[:4])
    return q, k + 20 * jax.random.normal(keys[4], (1, 1, HEADS, DIM)), v, g


def results(fn, q, k, v, g):
    """The output and the three gradients."""

    @jax.jit
    def run(*args):
        out, vjp = jax.vjp(fn, *args[:3])
        return out, *vjp(args[3])

    return run(q, k, v, g)


def errors(ours, exact):
    return [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(ours, exact, strict=True)]


@pytest.mark.parametrize("fn", [*FOUND, *NOT_FOUND], ids=lambda fn: fn.__name__)
def test_scores_are_found_where_a_softmax_is_their_only_use(fn, qkv):
    found = find_keys(jax.make_jaxpr(fn)(*qkv[:3]).jaxpr)
    assert list(found.values()) == ([FOUND[fn]] if fn in FOUND else [])


@pytest.mark.parametrize("fn", FOUND, ids=lambda fn: fn.__name__)
def test_the_mean_of_the_found_operand_changes_nothing(fn, qkv):
    q, k, v, g = qkv
    k = k / 20  # in float32 large means cost precision
    exact = results(fn, q, k, v, g)
    moved = (lambda q, k, v: fn(q, center(k, (0, 2, 3)), v)) if fn is not over_queries else (
        lambda q, k, v: fn(center(q, (0, 2, 3)), k, v)
    )  # fmt: skip
    for ours, reference in zip(results(moved, q, k, v, g), exact, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-5 * float(jnp.max(jnp.abs(reference))))


@pytest.mark.parametrize("fn", [normalized_before, normalized_after], ids=lambda fn: fn.__name__)
def test_errors_of_the_output_and_of_three_gradients(fn, qkv):
    exact = results(fn, *qkv)
    plain, sage = (errors(results(octavo.quantized(fn, [r], weights=()), *qkv), exact) for r in (PLAIN, SAGE))
    assert max(sage) < 0.03
    assert min(plain) > 0.06


@pytest.mark.parametrize(
    ("fn", "values"),
    [(normalized_before, ("rhs", "int8 x int8", "float")), (normalized_after, ("lhs", "float", "int8 x int8"))],
    ids=["before", "after"],
)
def test_the_plan_says_what_was_found(fn, values, qkv):
    scores, weighted = octavo.plan(octavo.quantized(fn, [SAGE], weights=()), None, *qkv[:3]).rows
    assert scores.note == "scores: the mean of keys (rhs) is subtracted"
    assert (scores.dlhs, scores.drhs) == ("int8 x int8", "int8 x int8")
    assert (weighted.note, weighted.dlhs, weighted.drhs) == (f"{values[0]} is a softmax", *values[1:])


def test_the_plan_says_that_no_softmax_was_found(qkv):
    scores, _ = octavo.plan(octavo.quantized(capped, [SAGE], weights=()), None, *qkv[:3]).rows
    assert scores.note == "no softmax found"


@pytest.mark.parametrize(
    "fields",
    [
        {"weight_qtype": "int8", "act_qtype": "int8", "scope": "weights"},
        {"weight_qtype": "int8"},
        {"act_qtype": "int8", "scope": "activations", "act_static_scale": True},
    ],
)
def test_a_rule_that_leaves_attention_alone(fields):
    with pytest.raises(ValueError, match="attention=True chooses the ranges of matmuls of two activations: set act_qt"):
        QtRule(**fields, attention=True)


def test_nan_in_a_score_is_not_hidden_by_the_fixed_range(qkv):
    q, k, v, _ = qkv
    out = octavo.quantized(normalized_after, [SAGE], weights=())(q.at[0, 3, 0, 0].set(jnp.nan), k, v)
    assert np.isnan(out[0, 3, 0]).all()
    assert np.isfinite(out[0, 4:]).all()


@functools.partial(jax.jit, static_argnums=0)
def train(attention, params, tokens):
    """The losses of steps in which every position learns to attend to the token before it."""
    optimizer = optax.adam(1e-2)

    def loss(params, tokens):
        x = params["embed"][tokens] + params["place"][None]
        # A large mean of the keys, as trained models have.
        q, k, v = (jnp.einsum("btd,dhc->bthc", x, params[name]) + 40.0 * (name == "k") for name in "qkv")
        out = jnp.einsum("bthc,hcd->btd", attention(q, k, v), params["o"])
        logits = jnp.einsum("btd,vd->btv", out[:, 1:], params["embed"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, :-1]))

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        updates, moments = optimizer.update(grads, state[1])
        return (optax.apply_updates(state[0], updates), moments), value

    return jax.lax.scan(step, (params, optimizer.init(params)), tokens)[1]


@pytest.mark.slow
@pytest.mark.standard_promotion  # optax
def test_the_loss_of_training_is_that_of_float():
    size, vocab, steps = HEADS * DIM, 16, 80
    keys = iter(jax.random.split(jax.random.key(1), 8))
    shapes = {"embed": (vocab, size), "place": (LENGTH, size), "o": (HEADS, DIM, size)}
    shapes |= dict.fromkeys("qkv", (size, HEADS, DIM))
    params = {name: 0.3 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    tokens = jax.random.randint(next(keys), (steps, 8, LENGTH), 0, vocab)
    losses = {}
    for name, rule in (("float", None), ("plain", PLAIN), ("sage", SAGE)):
        attention = normalized_after if rule is None else octavo.quantized(normalized_after, [rule], weights=())
        losses[name] = float(jnp.mean(train(attention, params, tokens)[-20:]))
    assert losses["float"] < 0.1, losses  # it learns
    assert abs(losses["sage"] / losses["float"] - 1) < 0.02, losses
    assert losses["plain"] / losses["float"] > 1.3, losses
