"""Stochastic rounding of bfloat16 weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from octavo import optim

pytestmark = pytest.mark.standard_promotion
DRAWS = 10**4


@pytest.mark.parametrize("value", [1.001, -1.001, 3.14159, 1e-30, -7e20, 0.1])
def test_rounding_has_no_bias(value):
    x = np.float32(value)
    down = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    up = ((x.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    rounded = optim.stochastic_round(jnp.full(DRAWS, x), key=jax.random.key(0))
    found = np.asarray(rounded, np.float64)
    assert rounded.dtype == jnp.bfloat16
    assert set(found) <= {float(down), float(up)}
    fraction = (float(x) - float(down)) / (float(up) - float(down))
    sigma = abs(float(up) - float(down)) * (fraction * (1 - fraction) / DRAWS) ** 0.5
    assert abs(found.mean() - float(x)) < 3 * sigma


def test_values_of_bfloat16_and_those_that_are_not_finite_stay():
    x = jnp.asarray([0.0, -0.0, 1.0, -2.5, jnp.inf, -jnp.inf, jnp.nan], jnp.bfloat16)
    found = optim.stochastic_round(x, key=jax.random.key(0))
    np.testing.assert_array_equal(found.astype(jnp.float32), x.astype(jnp.float32))
    nan = jax.lax.bitcast_convert_type(jnp.full(100, 0x7FFFFFFF, jnp.uint32), jnp.float32)
    assert jnp.all(jnp.isnan(optim.stochastic_round(nan, key=jax.random.key(0))))


def run(optimizer, params, grads, steps):
    @jax.jit
    def train(params, state):
        def body(carry, _):
            params, state = carry
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, state), None, length=steps)[0]

    return train(params, optimizer.init(params))


def test_weight_decay_alone_shrinks_weights_by_the_right_mean():
    """Rounded to nearest, lr * wd * w is below half a unit in the last place and no weight changes."""
    w, steps, rate, decay = jnp.full(DRAWS, 1.3, jnp.bfloat16), 100, 1e-3, 0.1
    optimizer = optax.adamw(rate, weight_decay=decay)
    nearest, _ = run(optimizer, w, jnp.zeros_like(w), steps)
    assert jnp.all(nearest == w)
    found, _ = run(optim.with_stochastic_rounding(optimizer), w, jnp.zeros_like(w), steps)
    values = np.asarray(found, np.float64)
    expected = float(w[0]) * (1 - rate * decay) ** steps
    assert abs(values.mean() - expected) < 3 * values.std() / DRAWS**0.5


def test_updates_add_up_to_bfloat16_exactly():
    keys = jax.random.split(jax.random.key(0), 3)
    w = (
        jax.random.normal(keys[0], (999,)) * 10 ** jax.random.uniform(keys[1], (999,), minval=-12.0, maxval=3.0)
    ).astype(jnp.bfloat16)
    params, grads = (
        {"w": w, "scale": jnp.ones(3)},
        {"w": jax.random.normal(keys[2], (999,)).astype(jnp.bfloat16), "scale": jnp.ones(3)},
    )
    optimizer = optim.with_stochastic_rounding(optax.sgd(1.0), seed=3)
    state = optimizer.init(params)
    updates, following = optimizer.update(grads, state, params)
    assert jax.tree.map(lambda x: x.dtype.name, updates) == {"w": "float32", "scale": "float32"}
    found = optax.apply_updates(params, updates)
    exact = np.asarray(w, np.float64) - np.asarray(grads["w"], np.float64)
    below, above = (np.asarray(exact * (1 + s * 2.0**-7), np.float64) for s in (-1, 1))
    assert np.all((np.asarray(found["w"], np.float64) - below) * (np.asarray(found["w"], np.float64) - above) <= 0)
    sums = w.astype(jnp.float32) + updates["w"]
    np.testing.assert_allclose(sums, found["w"].astype(jnp.float32), rtol=2.0**-22)
    np.testing.assert_array_equal(found["scale"], 0.0)
    assert not np.array_equal(state.key, following.key)


def test_moments_of_bfloat16_weights_are_float32_or_quantized():
    params = {"w": jnp.ones((64, 64), jnp.bfloat16), "bias": jnp.ones(8, jnp.bfloat16)}
    optimizer = optim.with_stochastic_rounding(optim.adamw(1e-3))
    state = optimizer.init(params).inner_state[0]
    assert (state.mu["w"].dtype.name, state.mu["bias"].dtype.name) == ("float32", "float32")
    params, state = run(optimizer, params, jax.tree.map(jnp.ones_like, params), 3)
    assert params["w"].dtype == jnp.bfloat16
    assert abs(float(jnp.mean(params["w"].astype(jnp.float32))) - (1 - 3e-3)) < 1e-4


def test_parameters_are_needed():
    optimizer = optim.with_stochastic_rounding(optax.sgd(1.0))
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update(jnp.ones(3), optimizer.init(jnp.ones(3)))
