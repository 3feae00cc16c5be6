"""Against Qwix 0.1.8 and AQT 0.9: equal bit for bit where they are right, and right where they are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import octavo
from octavo import Quantizer, get_format
from octavo.numerics import IntFormat
from tests.cases import slow_except

qwix = pytest.importorskip("qwix", reason="the oracles group is not installed: pip install qwix==0.1.8")
from aqt.jax.v2 import aqt_quantizer, calibration, utils  # noqa: E402
from aqt.jax.v2.numerics import int_numerics  # noqa: E402
from aqt.jax.v2.numerics.utils import get_numerics  # noqa: E402

pytestmark = [
    pytest.mark.standard_promotion,
    # aqtp 0.9 converts arrays to dtypes implicitly, which JAX warns about.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

QWIX_TYPES = [
    "int2", "int3", "int4", "int5", "int6", "int7", "int8", "nf4", "float8_e4m3fn", "float8_e5m2", "float8_e4m3",
    "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e3m4", "float4_e2m1fn",
]  # fmt: skip
SHAPE = (6, 64)
GRAINS = {
    "tensor": {},
    "row": {"channelwise_axes": (0,)},
    "tile": {"channelwise_axes": (0,), "tiled_axes": {1: 16}},
    "square": {"tiled_axes": {0: 3, 1: 32}},
    "fraction": {"tiled_axes": {1: 1 / 4}},
}


def data(seed, dtype, kind="normal"):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=SHAPE) if kind == "normal" else rng.integers(-20, 20, SHAPE) / 4
    return jnp.asarray(x, dtype)


def equal_to_qwix(ours, theirs):
    np.testing.assert_array_equal(np.asarray(ours.qvalue, np.float32), np.asarray(theirs.qvalue, np.float32))
    np.testing.assert_array_equal(ours.scale, theirs.scale)
    assert ours.scale.dtype == theirs.scale.dtype
    if theirs.zero_point is not None:
        np.testing.assert_array_equal(np.asarray(ours.zero_point, int), np.asarray(theirs.zero_point, int))


GRAINS_AND_DTYPES = [(g, jnp.float32) for g in GRAINS] + [(g, jnp.bfloat16) for g in ("tensor", "tile")]


@pytest.mark.parametrize(
    ("qtype", "grain", "dtype"),
    slow_except(
        [("int8", "row", jnp.float32), ("nf4", "tile", jnp.bfloat16), ("float8_e4m3fn", "tensor", jnp.bfloat16)],
        [(qtype, *case) for qtype in QWIX_TYPES for case in GRAINS_AND_DTYPES],
    ),
)
def test_qwix_arithmetic_is_qwix_bit_for_bit(qtype, grain, dtype):
    for seed, method in enumerate(["absmax", "absmax,0.8", "rms,3", "fixed,2"]):
        x = data(seed, dtype, "normal" if seed % 2 else "steps")
        theirs = qwix.quantize(x, qtype, calibration_method=method, **GRAINS[grain])
        ours = octavo.quantize(x, qtype, calibration_method=method, arithmetic="qwix", **GRAINS[grain])
        equal_to_qwix(ours, theirs)
        back = octavo.dequantize(ours, arithmetic="qwix")
        assert back.dtype == dtype
        np.testing.assert_array_equal(back, qwix.dequantize(theirs))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("qtype", slow_except(["int8"], ["int8", "int4"]))
@pytest.mark.parametrize("method", ["minmax", "minmax,0.9", "fixed,-1,3"])
def test_qwix_zero_points_bit_for_bit(qtype, dtype, method):
    x = data(3, dtype)
    theirs = qwix.quantize(x, qtype, calibration_method=method, channelwise_axes=(0,))
    ours = octavo.quantize(x, qtype, calibration_method=method, channelwise_axes=(0,), arithmetic="qwix")
    equal_to_qwix(ours, theirs)
    np.testing.assert_array_equal(octavo.dequantize(ours, arithmetic="qwix"), qwix.dequantize(theirs))


@pytest.mark.parametrize(("qtype", "tile"), [("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_qwix_block_formats_bit_for_bit(qtype, tile, dtype):
    x = data(4, dtype)
    theirs = qwix.quantize(x, qtype, channelwise_axes=(0,), tiled_axes={1: tile})
    ours = octavo.quantize(x, qtype, channelwise_axes=(0,), arithmetic="qwix")
    equal_to_qwix(ours, theirs)


@pytest.mark.parametrize("grain", ["row", "tile"])
@pytest.mark.parametrize("qtype", slow_except(["int8", "float8_e4m3fn", "nf4"], QWIX_TYPES))
@settings(max_examples=5)
@given(seed=st.integers(0, 999))
def test_our_own_arithmetic_equals_qwix_in_float32(qtype, grain, seed):
    x = data(seed, jnp.float32, "steps" if seed % 3 == 0 else "normal")
    equal_to_qwix(octavo.quantize(x, qtype, **GRAINS[grain]), qwix.quantize(x, qtype, **GRAINS[grain]))


def test_our_own_arithmetic_is_closer_than_qwix_in_bfloat16():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 512)), jnp.bfloat16)
    kwargs = {"channelwise_axes": (0,), "scale_dtype": jnp.float32}
    exact = np.asarray(x, np.float64)

    def error(q, dequantize):
        return np.sqrt(np.mean((np.asarray(dequantize(q), np.float64) - exact) ** 2))

    ours = error(octavo.quantize(x, "int8", **kwargs), octavo.dequantize)
    theirs = error(qwix.quantize(x, "int8", **kwargs), qwix.dequantize)
    assert ours < 0.97 * theirs


# Where Qwix is wrong.


def test_float16_does_not_turn_to_zeros():
    """Qwix B2: its zero guard is 0.0078 in float16, so any tensor below 0.996 quantizes to zeros."""
    x = jnp.full((4, 8), 0.5, jnp.float16)
    assert not np.any(qwix.dequantize(qwix.quantize(x, "int8")))
    np.testing.assert_allclose(octavo.dequantize(octavo.quantize(x, "int8")), 0.5, rtol=1 / 254)


@pytest.mark.parametrize("std", [1e-12, 1e-3, 1.0, 1e4, 1e12])
def test_nvfp4_has_its_tensor_scale(std):
    """Qwix B3: without a second scale, values of std 1e-3 vanish and of 1e4 saturate."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 64)) * std, jnp.float32)
    off = octavo.dequantize(octavo.quantize(x, "nvfp4")) - x
    assert float(jnp.linalg.norm(off) / jnp.linalg.norm(x)) < 0.11
    theirs = qwix.dequantize(qwix.quantize(x, "nvfp4", channelwise_axes=(0,), tiled_axes={1: 16})) - x
    if std != 1.0:
        assert float(jnp.linalg.norm(theirs) / jnp.linalg.norm(x)) > 0.5


def test_int1_is_not_garbage():
    """Qwix accepts int1 and returns zeros; one bit has two values, and neither is zero."""
    x = jnp.asarray([[0.3, -0.2, 1.0, -0.7]])
    np.testing.assert_array_equal(octavo.dequantize(octavo.quantize(x, "int1")), [[0.5, -0.5, 0.5, -0.5]])
    got = octavo.dequantize(octavo.quantize(x, "binary", calibration_method="absmean"))
    np.testing.assert_allclose(got, [[0.55, -0.55, 0.55, -0.55]], rtol=1e-6)


def test_a_scale_type_raises_as_a_value_type():
    """Qwix gives NaN for float8_e8m0fnu."""
    with pytest.raises(ValueError, match="holds powers of two only"):
        octavo.quantize(jnp.ones(4), jnp.float8_e8m0fnu)


def test_unsigned_types_raise_for_signed_data():
    """Qwix clips the negative half of the data to zero."""
    with pytest.raises(ValueError, match="no negative values"):
        octavo.quantize(jnp.ones(4), "uint8")


def test_tiny_tensors_are_not_zeroed():
    """Qwix replaces scales below 1e-19 by one."""
    x = jnp.asarray([1e-25, -5e-26], jnp.float32)
    assert not np.any(qwix.dequantize(qwix.quantize(x, "int8")))
    np.testing.assert_allclose(octavo.dequantize(octavo.quantize(x, "int8")), x, rtol=1 / 100)


def test_a_padded_tile_is_not_an_error():
    """Qwix refuses an axis that the tile does not divide (google/qwix#145)."""
    with pytest.raises(ValueError, match="cannot be tiled"):
        qwix.quantize(jnp.ones((4, 50)), "int4", tiled_axes={1: 16})
    assert octavo.quantize(jnp.ones((4, 50)), "int4", tiled_axes={1: 16}).shape == (4, 50)


# AQT.


def aqt(x, bits, *, preserve_zero=None, preserve_max=False, shared_axes=(1,)):
    quantizer = aqt_quantizer.quantizer_make(bits, preserve_max_val=preserve_max, initialize_calibration=False)
    if preserve_zero is not None:
        numerics = int_numerics.IntSymmetric(
            bits=bits, preserve_zero=preserve_zero, preserve_max_val=preserve_max, clip=True, clip_gradient=False,
            round=True, noise_fn=None, dtype=utils.infer_dtype_from_bits(bits) if preserve_zero else None,
        )  # fmt: skip
        quantizer.numerics = numerics
    quantizer.init_calibration()
    q, _ = quantizer.quant(x, calibration_axes=shared_axes)
    return q


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, "e4m3", "e5m2"])
def test_aqt_arithmetic_is_aqt_bit_for_bit(bits, dtype):
    for seed in range(4):
        x = data(seed, dtype, "normal" if seed % 2 else "steps")
        theirs = aqt(x, bits)
        ours = octavo.quantize(
            x, bits if isinstance(bits, str) else f"int{bits}", channelwise_axes=(0,), arithmetic="aqt"
        )
        np.testing.assert_array_equal(np.asarray(ours.qvalue, np.float32), np.asarray(theirs.qvalue, np.float32))
        np.testing.assert_array_equal(ours.scale, theirs.scale[0])
        np.testing.assert_array_equal(octavo.dequantize(ours, arithmetic="aqt"), theirs.dequant())


@pytest.mark.parametrize("preserve_max", [False, True])
@pytest.mark.parametrize(
    ("bits", "preserve_zero"),
    [(b, z) for b in (1, 2, 4, 8) for z in (False, True) if b > 1 or not z],  # one bit and a zero: AQT's bound is zero
)
def test_aqt_bucket_conventions_bit_for_bit(bits, preserve_zero, preserve_max):
    x = data(5, jnp.float32)
    theirs = aqt(x, bits, preserve_zero=preserve_zero, preserve_max=preserve_max)
    fmt = IntFormat(bits=bits, preserve_zero=preserve_zero, preserve_max=preserve_max)
    ours = octavo.quantize(x, fmt, channelwise_axes=(0,), arithmetic="aqt")
    np.testing.assert_array_equal(ours.qtype.decode(ours.qvalue), np.asarray(theirs.qvalue, np.float32))
    np.testing.assert_array_equal(octavo.dequantize(ours, arithmetic="aqt"), theirs.dequant())


def aqt_scale(method, x, fmt):
    numerics = get_numerics(8, False)
    return method.get_scale_and_bias_and_sparsity(x, (1,), numerics)[0][0]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("absmax,0.7", functools.partial(calibration.AbsMaxCalibration, clipping_scale=0.7)),
        ("absmean", functools.partial(calibration.AbsMeanCalibration, clipping_scale=1.0, p=1.0)),
        ("absmean,2,3", functools.partial(calibration.AbsMeanCalibration, clipping_scale=2.0, p=3.0)),
        ("constant,1.5", functools.partial(calibration.ConstantCalibration, bound=1.5)),
        (
            "snr,0.5,0.9",
            functools.partial(calibration.SnrBasedAutoCalibration, auto_clip_search_config=[0.5, 0.9, 1.0]),
        ),
    ],
)
def test_aqt_calibrations(ours, theirs):
    x = jnp.asarray(np.random.default_rng(1).standard_t(2, size=SHAPE), jnp.float32)
    fmt = get_format("int8").replace(narrow=True)
    got = Quantizer(fmt, channelwise_axes=(0,), calibration=ours).quantize(x).scale
    np.testing.assert_allclose(got, aqt_scale(theirs(), x, fmt), rtol=1e-6)


def test_aqt_power_of_two_scale():
    x = data(6, jnp.float32)
    want = aqt_scale(calibration.AbsMaxCalibration(po2_scale=True), x, None)
    got = octavo.quantize(x, "int8", channelwise_axes=(0,), scale_dtype=jnp.float8_e8m0fnu).scale
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)


def test_stochastic_rounding_is_not_biased_in_bfloat16():
    """AQT bug 4: noise is rounded to bfloat16, so that E[SR(100.5)] = 100.25."""
    how = Quantizer("int8", calibration="fixed,127", rounding="stochastic")
    x = jnp.full((100_000,), 100.5, jnp.bfloat16)
    mean = float(jnp.mean(how.quantize(x, key=jax.random.key(0)).qvalue.astype(jnp.float32)))
    assert abs(mean - 100.5) < 0.01


def test_stochastic_rounding_is_not_biased_in_the_top_bucket():
    """AQT bug 4: the maximum always becomes 127/127.5 of itself."""
    how = Quantizer("int4", rounding="stochastic")
    x = jnp.asarray([1.0] + [0.95] * 50_000, jnp.float32)
    got = how.quantize(x, key=jax.random.key(0)).dequantize()
    assert float(got[0]) == 1.0
    assert abs(float(jnp.mean(got[1:])) - 0.95) < 0.002
