"""NVFP4 by four-over-six, and by MS-EDEN: unbiased, with half the error of stochastic rounding."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from octavo import QtRule, Quantizer, dot
from octavo.numerics import Eden, get_rounding
from octavo.ops import DotConfig, Matmul, Operand
from octavo.ops.hadamard import random_signs, rotate
from octavo.rules import dot_config, recipe
from octavo.rules.compile import EDEN_RANGE
from tests.arrays import normal


def to_e2m1(x):
    return x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)


def to_e4m3(x):
    return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def four_over_six(x):
    """The published definition, block by block: the tensor's scale has room for 1.5 times a block's."""
    outer = np.float32(np.abs(x).max() / (6 * 256))
    blocks = x.reshape(-1, 16)
    best = None
    for factor in (1.0, 1.5):
        scale = to_e4m3(np.abs(blocks).max(1, keepdims=True) / 6 * np.float32(factor) / outer)
        value = to_e2m1(np.clip(blocks / (scale * outer), -6, 6)) * scale * outer
        error = ((blocks - value) ** 2).sum(1, keepdims=True)
        best = (
            (error, value)
            if best is None
            else tuple(np.where(error < best[0], new, old) for new, old in ((error, best[0]), (value, best[1])))
        )
    return best[1].reshape(x.shape)


def test_four_over_six_is_the_published_choice():
    x = normal(0, 64, 256)
    found = np.asarray(Quantizer("nvfp4", calibration="four_over_six").quantize(x).dequantize())
    plain = np.asarray(Quantizer("nvfp4").quantize(x).dequantize())
    np.testing.assert_allclose(found, four_over_six(np.asarray(x)), rtol=1e-6)
    assert np.square(found - x).sum() < 0.85 * np.square(plain - x).sum()


def test_four_over_six_keeps_other_blocks_apart():
    """A block that is not finite is NaN, and takes no part in the scale of the tensor."""
    x = normal(1, 4, 64)
    broken = x.at[2, 20].set(jnp.inf)
    quantizer = Quantizer("nvfp4", calibration="four_over_six")
    clean, found = quantizer.quantize(x.at[2, 16:32].set(0)).dequantize(), quantizer.quantize(broken).dequantize()
    other = np.ones((4, 64), bool)
    other[2, 16:32] = False
    assert np.isnan(np.asarray(found)[~other]).all()
    np.testing.assert_array_equal(np.asarray(found)[other], np.asarray(clean)[other])
    assert not np.asarray(quantizer.quantize(jnp.zeros((2, 32))).dequantize()).any()


@functools.cache
def draws(count=10_000):
    """Estimates of one tensor: MS-EDEN after random rotations, rotated back, and stochastic rounding."""
    x = normal(2, 2, 128)
    eden = Quantizer("nvfp4", calibration=EDEN_RANGE, rounding=Eden(32))

    def draw(key):
        first, second = jax.random.split(key)
        signs = random_signs(first, x.shape[-1])
        q = eden.quantize(rotate(x, 32, axis=-1, signs=signs), key=second)
        noisy = Quantizer("nvfp4", rounding="stochastic").quantize(x, key=second)
        return rotate(q.dequantize(), 32, axis=-1) * signs[None], noisy.dequantize()

    keys = jax.random.split(jax.random.key(4), count)
    return (np.asarray(x), *(np.asarray(a) for a in jax.jit(lambda: jax.lax.map(draw, keys, batch_size=500))()))


def test_ms_eden_is_unbiased():
    """The mean of 10,000 draws is within three standard errors of the value, as often as that of a normal variable."""
    x, eden, _ = draws()
    z = (eden.mean(0) - x) / (eden.std(0) / np.sqrt(len(eden)))
    assert np.mean(np.abs(z) > 3) < 0.02
    assert abs(z.mean()) < 3 / np.sqrt(z.size)
    # Along the tensor itself the error of plain rounding to nearest would accumulate; this estimate has none.
    along = (eden * x).sum((1, 2)) / (x * x).sum()
    assert abs(along.mean() - 1) < 3 * along.std() / np.sqrt(len(along))


def test_ms_eden_has_half_the_error_of_stochastic_rounding():
    x, eden, stochastic = draws()
    assert np.square(eden - x).mean() < 0.5 * np.square(stochastic - x).mean()


def test_the_correction_is_the_inner_product():
    """With exact scales, a block's inner product with its own values would be exact: scales are within one rounding."""
    x = normal(5, 1, 32)
    plain = Quantizer("nvfp4", calibration=EDEN_RANGE).quantize(x)
    found = Quantizer("nvfp4", calibration=EDEN_RANGE, rounding="eden").quantize(x, key=jax.random.key(6))
    np.testing.assert_array_equal(np.asarray(found.qvalue), np.asarray(plain.qvalue))
    value = np.asarray(plain.dequantize())
    ratio = float((np.asarray(x) ** 2).sum() / (np.asarray(x) * value).sum())
    wanted = ratio * np.asarray(plain.scale, np.float32)
    assert np.all(np.abs(np.asarray(found.scale, np.float32) - wanted) <= wanted / 8)


def test_random_rotations_cancel_in_a_matmul():
    """In float the gradient is that of the plain matmul, whatever the signs."""
    rotated = Matmul(residual="original", rotate=16, random_signs=True)
    config = DotConfig(Matmul(Operand("int8"), Operand("int8")), rotated, rotated)
    plain = DotConfig(Matmul(Operand("int8"), Operand("int8")))
    x, w = (normal(i, 32, 32) for i in (7, 8))

    def gradients(config, key):
        return jax.jit(jax.grad(lambda x, w: jnp.sum(dot(x, w, config=config, key=key) ** 2), (0, 1)))(x, w)

    for found, wanted in zip(gradients(config, jax.random.key(9)), gradients(plain, None), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "calibration"), [("quartet2", "four_over_six"), ("tetrajet2", "absmax")])
def test_gradients_are_unbiased_for_the_forward_codes(name, calibration):
    """The mean of many gradients is the gradient of the matmul of the forward's codes."""
    config = dot_config(recipe(name)[-1], lhs_weight=False, rhs_weight=True)
    x, w, g = (normal(i, 64, 64) for i in (10, 11, 12))
    quantizer = Quantizer("nvfp4", calibration=calibration)
    codes = quantizer.quantize(x).dequantize(), quantizer.quantize(w.T).dequantize().T

    def gradient(key):
        return jax.vjp(lambda x, w: dot(x, w, config=config, key=key), x, w)[1](g)

    keys = jax.random.split(jax.random.key(13), 400)
    found = [np.asarray(a) for a in jax.jit(lambda: jax.lax.map(gradient, keys, batch_size=50))()]
    for all_draws, wanted in zip(found, (g @ codes[1].T, codes[0].T @ g), strict=True):
        z = (all_draws.mean(0) - np.asarray(wanted)) / (all_draws.std(0) / np.sqrt(len(all_draws)))
        assert abs(np.sqrt(np.mean(z**2)) - 1) < 0.15


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quantizer("mxfp4", rounding="eden"), "scale of the tensor, as in nvfp4; mxfp4 has none"),
        (lambda: Quantizer("int8", rounding="eden"), "int8 has none"),
        (lambda: Eden(24), "power of two"),
        (lambda: get_rounding("eden,x"), "unknown rounding"),
        (lambda: Quantizer("nvfp4", rounding="eden").quantize(jnp.ones((2, 32))), "needs a random key"),
        (lambda: Matmul(random_signs=True), "give its block size"),
        (
            lambda: QtRule(weight_qtype="nvfp4", act_qtype="nvfp4", bwd_qtype="nvfp4", bwd_stochastic_rounding="eden"),
            "give bwd_rotate=32",
        ),
        (
            lambda: Quantizer("nvfp4", rounding="eden,64").quantize(jnp.ones((2, 96)), key=jax.random.key(0)),
            "6 scales are not a multiple",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
