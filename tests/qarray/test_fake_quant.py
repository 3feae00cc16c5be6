"""Fake quantization: the values of quantize-dequantize, the gradient straight through, zero where clipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo import Quantizer, fake_quant

X = jnp.asarray(np.random.default_rng(0).standard_t(3, size=(5, 48)), jnp.float32)


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "nf4", "nvfp4"])
def test_values_are_those_of_the_quantizer(name):
    run = jax.jit(lambda x: (fake_quant(x, name), Quantizer(name).quantize(x).dequantize()))
    np.testing.assert_array_equal(*run(X))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_gradient_is_straight_through_without_clipping(dtype):
    how = Quantizer("int4", channelwise_axes=(0,))
    grad = jax.grad(lambda x: jnp.sum(fake_quant(x, how).astype(jnp.float32) * 3))(X.astype(dtype))
    assert grad.dtype == dtype
    np.testing.assert_array_equal(grad, 3)


@pytest.mark.parametrize(
    "calibration", ["fixed,1", "absmax,0.5", "rms,1", "percentile,90", "mse,9,0.3", "fixed,-0.5,1"]
)
def test_gradient_is_zero_exactly_where_values_are_clipped(calibration):
    how = Quantizer(
        "int2" if "mse" in calibration else "int8", calibration=calibration, channelwise_axes=(0,), tiled_axes={1: 16}
    )
    total = lambda x, clip: jnp.sum(fake_quant(x, how, clip_gradient=clip))  # noqa: E731
    run = jax.jit(lambda x: (*(jax.grad(total)(x, clip) for clip in (True, False)), how.measure(x)))
    grad, unclipped, measured = run(X)
    bounds = {k: np.repeat(np.broadcast_to(v, (5, v.shape[1])), 48 // v.shape[1], axis=1) for k, v in measured.items()}
    high = bounds.get("absmax", bounds.get("max"))
    low = -high if "absmax" in bounds else bounds["min"]
    clipped = (np.asarray(X) > high) | (np.asarray(X) < low)
    assert clipped.any()
    np.testing.assert_array_equal(grad, ~clipped)
    np.testing.assert_array_equal(unclipped, 1)


def test_the_maximum_itself_keeps_its_gradient():
    """AQT masks at code 127 although the maximum maps to 127.5, so every row's largest entry gets no gradient."""
    grad = jax.grad(
        lambda x: jnp.sum(fake_quant(x, Quantizer("int8", channelwise_axes=(0,), calibration="absmax,0.999999")))
    )
    assert np.asarray(grad(jnp.ones((2, 8)))).sum() in (0, 16)
    every = jax.grad(lambda x: jnp.sum(fake_quant(x, Quantizer("int8", channelwise_axes=(0,)))))(X)
    np.testing.assert_array_equal(every, 1)


def test_forward_mode_and_second_derivatives():
    how = Quantizer("int8")
    _, tangent = jax.jvp(lambda x: fake_quant(x, how), (X,), (jnp.ones_like(X),))
    np.testing.assert_array_equal(tangent, 1)
    # The straight-through slope is constant, so the second derivative of a square is that of the square: 2.
    second = jax.grad(lambda x: jax.grad(lambda y: fake_quant(y, how) ** 2)(x))(jnp.float32(1.0))
    assert second == pytest.approx(2.0)


def test_stochastic_with_a_key():
    how = Quantizer("int4", rounding="stochastic")
    a, b = fake_quant(X, how, key=jax.random.key(0)), fake_quant(X, how, key=jax.random.key(1))
    assert np.any(np.asarray(a) != np.asarray(b))
    with pytest.raises(ValueError, match="needs a random key"):
        fake_quant(X, how)
