"""Float rows times a quantized matrix, the rows quantized in the kernel: the bits of quantizing them before."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.kernels import pallas
from octavo.qarray import Quantizer


@functools.cache
def rows(qtype):
    how = Quantizer(qtype, channelwise_axes=(0,))

    def quantize(x):
        q = how.quantize(x)
        return q.qvalue, q.scale.astype(jnp.float32)

    return quantize


def problem(m, k, n, qtype, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(m, k)) * rng.uniform(0.01, 100, (m, 1)), dtype)
    w = Quantizer(qtype, channelwise_axes=(1,)).quantize(jnp.asarray(rng.normal(size=(k, n)), jnp.float32))
    return x, w


@functools.partial(jax.jit, static_argnames="qtype")
def reference(x, w, scale, qtype):
    codes, row_scale = rows(qtype)(x)
    wide, out = (jnp.int8, jnp.int32) if qtype == "int8" else (jnp.bfloat16, jnp.float32)
    sums = jax.lax.dot(codes.astype(wide), w.astype(wide), preferred_element_type=out)
    return sums.astype(jnp.float32) * row_scale * scale


SHAPES = {"odd": (40, 300, 200), "few": (5, 64, 30), "deep": (70, 512, 150)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_integers_bit_for_bit(shape, dtype, transposed):
    x, w = problem(*SHAPES[shape], "int8", dtype)
    tiling = (32, 128, 128) if shape == "deep" else None
    matrix = w.qvalue.T if transposed else w.qvalue
    how = {
        "quantize": rows("int8"),
        "rhs_scale": w.scale,
        "transposed": transposed,
        "tiling": tiling,
        "interpret": True,
    }
    got = pallas.quantized_matmul(x, matrix, dtype=jnp.float32, **how)
    np.testing.assert_array_equal(got, reference(x, w.qvalue, w.scale, "int8"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("qtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8(qtype):
    x, w = problem(40, 256, 130, qtype, jnp.bfloat16)
    how = {"quantize": rows(qtype), "rhs_scale": w.scale, "interpret": True}
    got = pallas.quantized_matmul(x, w.qvalue, dtype=jnp.float32, **how)
    expected = np.asarray(reference(x, w.qvalue, w.scale, qtype))
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_a_row_that_is_not_finite_spoils_itself_alone():
    x, w = problem(40, 300, 200, "int8", jnp.float32)
    bad = np.array(x)
    bad[7, 3], bad[12, 5] = np.nan, np.inf
    how = {"quantize": rows("int8"), "rhs_scale": w.scale, "interpret": True}
    clean, got = (np.asarray(pallas.quantized_matmul(jnp.asarray(a), w.qvalue, **how)) for a in (x, bad))
    spoilt = np.isin(np.arange(40), (7, 12))
    assert not np.isfinite(got[spoilt]).any()
    np.testing.assert_array_equal(got[~spoilt], clean[~spoilt])


CODES = jnp.zeros((4, 3), jnp.int8)
ERRORS = {
    "floats": (jnp.zeros((2, 4), jnp.int8), CODES, jnp.ones((1, 3)), "must be of floats, not int8"),
    "types": (jnp.zeros((2, 4), jnp.float16), CODES, jnp.ones((1, 3)), "not an lhs of float16"),
    "shapes": (jnp.zeros((2, 5)), CODES, jnp.ones((1, 3)), r"\[m, k\] and \[k, n\], got \(2, 5\) and \(4, 3\)"),
    "scale": (jnp.zeros((2, 4)), CODES, jnp.ones((3, 1)), r"\[1, 1\] or \[1, 3\], got \(3, 1\)"),
    "long": (
        jax.ShapeDtypeStruct((8, 1 << 20), jnp.float32), jax.ShapeDtypeStruct((1 << 20, 8), jnp.int8),
        jax.ShapeDtypeStruct((1, 1), jnp.float32), "too long to be quantized as a whole",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    x, w, scale, message = ERRORS[case]
    with pytest.raises(ValueError, match=f"quantized_matmul: .*{message}"):
        jax.eval_shape(lambda x, w, s: pallas.quantized_matmul(x, w, quantize=rows("int8"), rhs_scale=s), x, w, scale)
    assert (
        pallas.quantized_matmul(jnp.zeros((0, 4)), CODES, quantize=rows("int8"), rhs_scale=jnp.ones((1, 3))).size == 0
    )
