"""The kernel that quantizes is bit-equal to `Quantizer`, in every instruction set that this machine has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo import kernels
from octavo.numerics import Stochastic
from octavo.ops.lowerings.quantize import Decoder, Kernel
from octavo.qarray import Quantizer
from octavo.rules.compile import EDEN_RANGE

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.status())

# The shape, the axes with scales, and the shape of the factor.
CASES = [
    ((33,), (0,), None),
    ((33, 70), (0,), None),
    ((70, 129), (1,), None),
    ((3, 17, 19), (0, 2), (3, 17, 1)),
    ((4, 128, 2, 32), (0, 2, 3), (4, 128, 1, 1)),
    ((4, 9, 8, 32), (0, 1, 2), (1, 1, 1, 32)),
    ((1, 40), (0, 1), (1, 40)),
    ((300, 16), (0,), (300, 16)),
]


def values(shape, seed, special=0.0):
    """Values over many orders of magnitude, with zeros, subnormal and special ones."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))).astype(np.float32)
    x[rng.random(shape) < 0.05] = 0
    x.flat[rng.integers(0, x.size, 4)] = [special, -special, 1e-42, -1e-38]
    x[: shape[0] // 4] *= np.float32(1e-38)
    x[-1] = 0
    return x


def bits(q):
    return np.asarray(q[0]), np.asarray(q[1]).view(np.uint32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bit_equal_to_the_quantizer_on_any_instruction_set_and_threads(case):
    shape, axes, factor = case
    # Not both in one program: XLA's operations lose a NaN beside values above 1e30.
    x = jnp.asarray(values(shape, 0, special=np.nan if len(shape) % 2 else np.inf))
    f = None if factor is None else jnp.asarray(values(factor, 1))
    q = Quantizer("int8", channelwise_axes=axes).quantize(x if f is None else x * f)
    for isa in kernels.versions():
        for threads in (1, 2):
            static = {"scale_shape": q.scale.shape, "unit": 1 / 127.5, "low": -128, "high": 127}
            got = kernels.quantize_absmax(x, f, **static, isa=isa, threads=threads)
            for have, want in zip(bits(got), bits((q.qvalue, q.scale)), strict=True):
                np.testing.assert_array_equal(have, want, err_msg=f"{isa}, {threads} threads")


E4M3, E5M2, E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
# Scales per row, per column, per tensor, in tiles along either axis and both; each format and kind of scale.
SMALL = [
    Quantizer(E4M3, (0,)),
    Quantizer(E5M2, (1,)),
    Quantizer(E4M3),
    Quantizer(E5M2, (0,), rounding="stochastic"),
    Quantizer(E2M1, (0,), {1: 64}),
    Quantizer("int8", (1,), rounding="stochastic,8"),
    Quantizer("mxfp8", rounding="stochastic,16"),
    Quantizer("mxfp8_e5m2", tiled_axes={0: 32}),
    Quantizer("mxfp4", tiled_axes={0: 32, 1: 32}),
    Quantizer("nvfp4"),
    Quantizer("nvfp4", tiled_axes={0: 16}, rounding="stochastic"),
    Quantizer("nvfp4", tiled_axes={0: 16, 1: 16}, calibration="absmax,1,1.75"),
    Quantizer("nvfp4", calibration="four_over_six"),
    Quantizer("nvfp4", tiled_axes={0: 16}, calibration="four_over_six"),
    Quantizer("nvfp4", calibration=EDEN_RANGE, rounding="eden,32"),
    Quantizer("nvfp4", tiled_axes={0: 16}, calibration=EDEN_RANGE, rounding="eden,128"),
]


@pytest.mark.parametrize("quantizer", SMALL, ids=str)
def test_small_floats_are_bit_equal_to_the_quantizer(quantizer):
    key = jax.random.key(5) if quantizer.rounding.stochastic else None

    @jax.jit
    def both(x, key):
        kernel = Kernel.of(quantizer, x, None, key)
        q = kernel.result(kernel.run(x, *(() if key is None else (key,))))
        decoder = Decoder.of(q, jnp.float32)
        with kernels.disabled():
            want = quantizer.quantize(x, key=key)
        values = q.dequantize() if decoder is None else decoder.run(*jax.tree.leaves(q))[0]
        return q, want, values, want.dequantize()

    q, want, values, wanted = jax.tree.map(np.asarray, both(jnp.asarray(values_of_rows((128, 192))), key))
    assert q.qtype == want.qtype
    assert q.dtype == want.dtype
    same = _bits(values) == _bits(wanted)
    if quantizer.calibration != Quantizer("nvfp4", calibration="four_over_six").calibration:
        np.testing.assert_array_equal(_bits(q.qvalue), _bits(want.qvalue))
        np.testing.assert_array_equal(_bits(q.scale), _bits(want.scale))
        assert same.all()
    # Where two scales have the same error, XLA's sums of squares decide by their last bit; the values are the same.
    assert same.mean() > 0.9999


def values_of_rows(shape):
    """`values`, of which the last quarter is of one magnitude, as blocks are."""
    x = values(shape, 2, special=1.0)
    x[-shape[0] // 4 : -1] = np.random.default_rng(3).standard_normal((shape[0] // 4 - 1, shape[1]))
    return x


def _bits(x):
    return (
        np.asarray(x).view(f"uint{8 * x.dtype.itemsize}") if x.dtype.itemsize > 1 else np.asarray(x).astype(np.float32)
    )


@pytest.mark.parametrize("quantizer", [SMALL[0], SMALL[6], SMALL[8], SMALL[10]], ids=str)
def test_all_instruction_sets_and_threads_give_the_same_codes(quantizer):
    x, words = jnp.asarray(values_of_rows((128, 192))), jax.random.key_data(jax.random.key(5))

    @jax.jit
    def every(x, words):
        kernel = Kernel.of(quantizer, x, None, jax.random.wrap_key_data(words))
        rounding, tiles = kernel.rounding, kernel.tiles
        static = {"rounding": rounding, "scale_shape": tiles.counts, "split": kernel.split}
        key = words if rounding.noise_bits else None
        return [
            kernels.quantize_groups(x, None, key, **static, isa=isa, threads=threads)
            for isa in kernels.versions()
            for threads in (1, 2)
        ]

    first, *others = every(x, words)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(_bits(a), _bits(b))


def test_non_finite_values_make_the_scales_of_their_groups_nan():
    x = np.ones((64, 64), np.float32)
    x[3, 5], x[9, 40] = np.nan, np.inf
    for quantizer in (Quantizer("mxfp8"), Quantizer("nvfp4"), Quantizer("mxfp4"), Quantizer(E4M3, (0,))):
        q = jax.jit(lambda x, q=quantizer: (k := Kernel.of(q, x, None)).result(k.run(x)))(jnp.asarray(x))
        bad = np.isnan(np.asarray(q.dequantize()))
        assert bad[3, 5]
        assert bad[9, 40] or quantizer.qtype.tile is None
        assert not bad[np.setdiff1d(np.arange(64), [3, 9])].any()


def test_noise_is_that_of_jax():
    key, words = jax.random.key(11), jax.random.key_data(jax.random.key(11))
    for bits in (8, 16, 24):
        want = Stochastic(bits=bits).noise(key, (5, 301))  # eager: drawn by JAX
        for isa in kernels.versions():
            for threads in (1, 2):
                got = kernels.noise(words, (5, 301), bits, isa=isa, threads=threads)
                np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
        np.testing.assert_array_equal(jax.jit(lambda k, b=bits: Stochastic(bits=b).noise(k, (5, 301)))(key), want)
        many = jax.random.split(key, 3)
        stacked = jax.jit(jax.vmap(lambda k, b=bits: Stochastic(bits=b).noise(k, (7,))))(many)
        np.testing.assert_array_equal(stacked, jnp.stack([Stochastic(bits=bits).noise(k, (7,)) for k in many]))


def test_operands_that_do_not_fit_are_errors():
    x, static = jnp.ones((4, 32)), {"unit": 1.0, "low": -128, "high": 127}
    for scale, dtype, message in (
        ((1, 1), jnp.float32, "there is an axis with scales"),
        ((2, 1), jnp.float32, "do not fit the sizes"),
        ((4, 1), jnp.bfloat16, "values are float32, codes int8"),
    ):
        with pytest.raises(Exception, match=message):
            kernels.quantize_absmax(x.astype(dtype), scale_shape=scale, **static)
    with pytest.raises(Exception, match="no avx9"):
        kernels.quantize_absmax(x, scale_shape=(4, 1), **static, isa="avx9")


def test_shapes_for_which_it_is_used():
    assert kernels.can_quantize((64, 32), (64, 1), (1, 32))
    assert not kernels.can_quantize((64, 32), (1, 1))  # no axis to distribute
    assert not kernels.can_quantize((64, 8), (64, 1))  # too few adjacent values
    assert not kernels.can_quantize((0, 32), (1, 32))
    assert not kernels.can_quantize((2, 1 << 20), (2, 1))
