"""AQT's configs: equal to aqtp 0.9 where it is right, and its bugs that are not here."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo import DotConfig, Matmul, Operand
from octavo.calibration import RunningMean
from octavo.compat import aqt
from octavo.numerics import IntFormat, Stochastic
from octavo.ops import init_scaling
from tests.cases import slow_except
from tests.ops.walk import dot_types

theirs = pytest.importorskip("aqt.jax.v2.config", reason="the oracles group is not installed: pip install aqtp==0.9.0")

pytestmark = [
    pytest.mark.standard_promotion,
    # aqtp 0.9 converts arrays to dtypes implicitly, which JAX warns about.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

# Where each bug of aqtp 0.9 that concerns configs and matmuls is tested:
#
#  1 smoothing quantizes the unsmoothed operands    test_aqt_1_smoothing_lowers_the_error
#  2 float16 overflows                              test_aqt_2_float16_sums_do_not_overflow; ops/test_dot.py
#  3 bfloat16 arithmetic                            test_aqt_3_bfloat16_is_as_good_as_float32
#  4 stochastic rounding is biased                  test_aqt_4_gradients_of_the_constructors_are_unbiased;
#                                                   qarray/test_peers.py, test_stochastic_rounding_is_not_biased_*
#  5 clip_gradient masks the maximum                test_aqt_5_the_maximum_keeps_its_gradient; qarray/test_fake_quant.py
#  6 the scale's dtype is not set                   test_aqt_6_the_dtype_of_scales
#  7 small floats: no clipping, no noise            test_aqt_7_small_floats_clip_gradients_and_round_stochastically
#  8 local scales of a square matmul                ops/test_peers.py, test_aqt_8_*
#  9 a convolution has no gradient                  ops/test_conv.py, test_aqt_9_*; below, from the constructor
# 11 einsum with an index to sum out first          ops/test_peers.py, test_aqt_11_*
# 12 a moving average starts biased                 calibration/test_trackers.py, test_ema_has_no_bias_at_the_start
# 13 setters change what others hold                ops/test_peers.py, test_aqt_13_*; test_aqt_13_setters_leave_alone
# 14 slicing by a traced index, and of biases       qarray/test_structure.py, test_a_traced_index_works and
#                                                   test_slicing_is_slicing_the_values
# 15 residuals are saved three times                test_aqt_15_one_residual_per_operand; ops/test_dot.py
# 16 serving quantizes the float weight again       frameworks/test_linen_ops.py, test_aqt_16_*
# 17 a config is copied at every call               test_aqt_17_configs_are_hashable_and_traced_once
# 18 int4 is widened on CPUs by a stale workaround  test_aqt_18_int4_runs_as_the_plan_says_on_every_platform
# 19 interception replaces jax.lax.dot_general      transform/test_peer_bugs.py, test_aqt_19_*

PLAIN = (((1,), (0,)), ((), ()))
BATCH = (((2,), (1,)), ((0,), (0,)))


def data(*shapes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def even(shape, bits, exponent, seed):
    """Values whose rows and columns all have the largest magnitude bound * 2**exponent: the scale is 2**exponent."""
    bound = 2.0 ** (bits - 1) - 0.5
    x = np.random.default_rng(seed).integers(-2 * bound, 2 * bound + 1, shape) / 2
    x[0], x[:, 0] = bound, -bound
    return jnp.asarray(x * 2.0**exponent, jnp.float32)


dot = jax.jit(octavo.dot, static_argnames=("config", "preferred_element_type"))
dot_general = jax.jit(octavo.dot_general, static_argnums=2, static_argnames="config")


def three(f, x, w, g):
    """Value and gradients, in one program: primitive by primitive they would be sixty."""

    @jax.jit
    def run(x, w, g):
        out, vjp = jax.vjp(f, x, w)
        return out, *vjp(g.astype(out.dtype))

    return run(x, w, g)


def off(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def smoothed(config, alpha):
    return config.replace(fwd=config.fwd.replace(smooth=alpha))


def both(their_config, our_config, x, w, g, numbers=PLAIN):
    """Value and gradients of theirs and ours, neither with stochastic rounding."""
    theirs.set_stochastic_rounding(their_config, False, False, implementation="jax.uniform")
    our_config = aqt.set_stochastic_rounding(our_config, False, False)
    want = three(lambda x, w: their_config(x, w, numbers), x, w, g)
    got = three(lambda x, w: octavo.dot_general(x, w, numbers, config=our_config), x, w, g)
    return got, want


# Name: the constructor, its arguments, the bits of the forward.
CONFIGS = {
    "v3": ("config_v3", {}, 8),
    "v3 int4": ("config_v3", {"fwd_bits": 4, "dlhs_bits": 4}, 4),
    "v3 float gradients": ("config_v3", {"dlhs_bits": None, "dlhs_accumulator_dtype": None}, 8),
    "v4": ("config_v4", {}, 8),
    "v4 all": ("config_v4", {"drhs_bits": 8}, 8),
    "v4 mixed": ("config_v4", {"fwd_bits": 4, "dlhs_bits": 8, "drhs_bits": 4}, 4),
    "v4 int2": ("config_v4", {"fwd_bits": 2, "dlhs_bits": None}, 2),
    "v4 int1": ("config_v4", {"fwd_bits": 1, "dlhs_bits": None}, 2),
    "full": ("fully_quantized", {"use_stochastic_rounding": False}, 8),
    "full original": ("fully_quantized", {"use_fwd_quant": False, "use_stochastic_rounding": False}, 8),
    "full int4": ("fully_quantized", {"fwd_bits": 4, "bwd_bits": 4, "use_stochastic_rounding": False}, 4),
    "full forward": ("fully_quantized", {"bwd_bits": None, "use_stochastic_rounding": False}, 8),
    "make": ("dot_general_make", {"lhs_bits": 8, "rhs_bits": 4, "bwd_bits": 8, "use_fwd_quant": False}, 4),
    "make weights": ("dot_general_make", {"rhs_bits": 8}, 8),
    "float": ("default_unquantized_config", {}, 8),
}


def make(name, module=aqt):
    maker, arguments, _ = CONFIGS[name]
    return getattr(module, maker)(**arguments)


def pair(name):
    return make(name, theirs), make(name)


@pytest.mark.parametrize("name", slow_except(("v4 all", "make"), CONFIGS))
def test_bit_for_bit_with_scales_that_are_powers_of_two(name):
    bits = CONFIGS[name][2]
    x, w, g = even((64, 128), bits, 1, 0), even((128, 32), bits, -2, 1), even((64, 32), bits, -3, 2)
    for got, want in zip(*both(*pair(name), x, w, g), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", slow_except(("v3", "full"), CONFIGS))
def test_values_bit_for_bit_and_gradients_to_rounding(name):
    x, w, g = data((64, 128), (128, 32), (64, 32))
    got, want = both(*pair(name), x, w, g)
    if name in ("float", "make weights", "v4 int1"):  # summed as floats, in an order of its own
        assert off(got[0], want[0]) < 1e-6
    else:
        np.testing.assert_array_equal(got[0], want[0])
    # AQT moves the scale of a low-bit residual into the gradient first, so that other values are rounded: both are
    # then as near to each other as two roundings of the gradient are.
    step = 2.0 ** (1 - CONFIGS[name][2])
    again = "requantize" in (make(name).dlhs.residual, make(name).drhs.residual)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert off(a, b) < (2 * step if again else 1e-6)


@pytest.mark.slow
def test_batches():
    x, w, g = data((3, 16, 32), (3, 32, 8), (3, 16, 8))
    for a, b in zip(*both(*pair("v4 all"), x, w, g, BATCH), strict=True):
        assert off(a, b) < 1e-6


@pytest.mark.parametrize("bits", ["e4m3", "e5m2"])
def test_fp8_bit_for_bit_with_scales_that_are_powers_of_two(bits):
    largest = {"e4m3": 448, "e5m2": 57344}[bits]
    rng = np.random.default_rng(0)
    x, w, g = (jnp.asarray(rng.integers(-4, 5, s), jnp.float32) for s in ((16, 32), (32, 8), (16, 8)))
    x, w = x.at[:, 0].set(largest), w.at[1].set(-largest)  # two largest values never meet: their sums are exact
    x, w, g = x / 4, w * 2, g / 8
    for got, want in zip(*both(theirs.config_fwd_fp8(bits), aqt.config_fwd_fp8(bits), x, w, g), strict=True):
        np.testing.assert_array_equal(got, want)


def test_fp8_gradients_to_rounding():
    bits = {"fwd_bits": "e4m3", "dlhs_bits": "e5m2", "drhs_bits": "e5m2"}
    x, w, g = data((64, 128), (128, 32), (64, 32))
    for a, b in zip(*both(theirs.config_v4(**bits), aqt.config_v4(**bits), x, w, g), strict=True):
        assert off(a, b) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("maker", ["config_v4", "fully_quantized"])
def test_local_scales(maker):
    more = {"drhs_bits": 8} if maker == "config_v4" else {"use_fwd_quant": False}
    x, w, g = data((128, 128), (128, 128), (128, 128))
    x, g = x.at[:64].multiply(50), g.at[64:].multiply(50)
    their_shards, our_shards = (
        dict.fromkeys(("dlhs_local_aqt", "drhs_local_aqt"), module.LocalAqt(contraction_axis_shard_count=2))
        for module in (theirs, aqt)
    )
    got, want = both(getattr(theirs, maker)(**more, **their_shards), getattr(aqt, maker)(**more, **our_shards), x, w, g)
    for a, b in zip(got, want, strict=True):
        assert off(a, b) < 1e-6
    one = both(getattr(theirs, maker)(**more), getattr(aqt, maker)(**more), x, w, g)[0]
    assert off(got[2], x.T @ g) < off(one[2], x.T @ g)


def test_constant_calibration_and_no_mask():
    x, w, g = data((64, 128), (128, 32), (64, 32))
    arguments = {"drhs_bits": 8, "use_dummy_static_bound": True}
    for a, b in zip(*both(theirs.config_v4(**arguments), aqt.config_v4(**arguments), x, w, g), strict=True):
        assert off(a, b) < 1e-6


SIX = ("fwd", "dlhs", "drhs")


def each(**fields):
    return lambda config: config.with_operands(**dict.fromkeys(SIX, fields))


THIS = "THIS_INPUT"


def fake(config, module, **sides):
    """The setter for where scales are applied; theirs changes the config and returns None."""
    modes = {f"{side}_dequant_mode": module.DequantMode[mode] for side, mode in sides.items()}
    return module.set_fwd_dequant_mode(config, **modes) or config


def along(config, module):
    remaining = {"rhs_calibration_mode": module.CalibrationMode.REMAINING_AXIS}
    return module.set_fwd_calibration_mode(fake(config, module, rhs=THIS), **remaining)


# Name: a setter, as a function of a config and the module, one more on theirs, and whether gradients are compared too.
FLOAT_SUMS = lambda c: theirs.set_accumulator_dtype(c, None, theirs.SKIP, theirs.SKIP)  # noqa: E731
SETTERS = {
    "set_fwd_dequant_mode": (lambda c, m: fake(c, m, lhs=THIS, rhs=THIS), FLOAT_SUMS, True),
    "set_fwd_calibration_mode": (along, FLOAT_SUMS, True),
    "set_constant_calibration": (lambda c, m: m.set_constant_calibration(c, 2.0), None, True),
    "set_absmax_calib_scale": (lambda c, m: m.set_absmax_calib_scale(c, 0.7), None, False),
    "set_auto_calib_scale": (lambda c, m: m.set_auto_calib_scale(c, [0.5, 0.9, 1.0]), None, True),
    "set_int_numerics_preserve_zero": (
        lambda c, m: m.set_int_numerics_preserve_zero(c, False),
        lambda c: theirs.set_accumulator_dtype(c, None, None, None),
        True,
    ),
    "set_use_fwd_quant": (lambda c, m: m.set_use_fwd_quant(c, False, False), None, True),
    "set_use_fwd_quant to True": (lambda c, m: m.set_use_fwd_quant(c, True, True), None, False),
    "set_local_aqt": (
        lambda c, m: m.set_local_aqt(c, m.SKIP, None, m.LocalAqt(contraction_axis_shard_count=2)), None, True,
    ),
    "set_bits": (lambda c, m: m.set_bits(c, 8, 4, 8, 4, 8, 4), None, True),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_except(("set_bits", "set_use_fwd_quant"), SETTERS))
def test_each_setter_has_a_counterpart(name):
    change, more, gradients = SETTERS[name]
    their_config, our_config = theirs.config_v4(drhs_bits=8), aqt.config_v4(drhs_bits=8)
    change(their_config, theirs)
    if more is not None:
        more(their_config)
    x, w, g = data((64, 128), (128, 32), (64, 32))
    got, want = both(their_config, change(our_config, aqt), x, w, g)
    for a, b in zip(got[: 3 if gradients else 1], want, strict=False):
        assert off(a, b) < 1e-6


def test_setters_raise_where_aqt_asserts():
    config = aqt.config_v4()
    with pytest.raises(ValueError, match="call set_fwd_dequant_mode first, with THIS_INPUT or OTHER_INPUT"):
        aqt.set_fwd_calibration_mode(config, rhs_calibration_mode=aqt.CalibrationMode.REMAINING_AXIS)
    with pytest.raises(ValueError, match="use fwd_bits=2"):
        aqt.set_fwd_rhs_dtype_int2(config)
    assert aqt.set_fwd_rhs_dtype_int2(aqt.config_v4(2, None)).fwd.rhs.qtype.storage == jnp.int2
    with pytest.raises(ValueError, match="an int32 accumulator needs integers"):
        aqt.set_accumulator_dtype(aqt.config_v4(None, None), jnp.int32, aqt.SKIP, aqt.SKIP)


def test_a_scale_moved_into_a_float_operand():
    their_config = theirs.dot_general_make(None, 8)
    theirs.set_fwd_dequant_mode(their_config, rhs_dequant_mode=theirs.DequantMode.OTHER_INPUT)
    theirs.set_fwd_calibration_mode(their_config, rhs_calibration_mode=theirs.CalibrationMode.REMAINING_AXIS)
    theirs.set_use_fwd_quant(their_config, False, False)
    ours = aqt.dot_general_make(None, 8, use_fwd_quant=False).with_operands(fwd_rhs={"dequant": "other"})
    x, w, g = data((64, 128), (128, 32), (64, 32))
    for a, b in zip(*both(their_config, ours, x, w, g), strict=True):
        assert off(a, b) < 1e-6


@pytest.mark.slow
def test_more_setters_of_the_documentation_run():
    x, w = data((64, 128), (128, 32))
    config = aqt.config_v4(drhs_bits=8)
    changes = [
        each(calibration="constant,4,0.5", arithmetic="float32"),
        each(scale_dtype="float8_e8m0fnu", arithmetic="float32"),
        lambda c: aqt.set_scale_and_bias_dtype(c, jnp.bfloat16),
        lambda c: c.with_operands(fwd={"per_tensor": True}),
        lambda c: aqt.set_accumulator_dtype(c, jnp.bfloat16, aqt.SKIP, None),
        lambda c: c.replace(fwd=aqt.set_numerics(c.fwd, "int8", "int8")),
        lambda c: aqt.set_fwd_calibration(c, "absmax"),
    ]
    for change in changes:
        assert off(dot(x, w, config=change(config)), x @ w) < 0.05
    assert config.with_operands(fwd_rhs={"qtype": "int2"}).fwd.rhs.qtype.storage == jnp.int2


def test_a_convolution_is_that_of_aqt():
    conv = pytest.importorskip("aqt.jax.v2.aqt_conv_general")
    x, w = data((2, 8, 8, 3), (3, 3, 3, 4))
    layout = jax.lax.conv_dimension_numbers(x.shape, w.shape, ("NHWC", "HWIO", "NHWC"))
    geometry = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": layout}
    want = conv.make_conv_general_dilated(conv.conv_general_dilated_make(2, 8, 4))(x, w, **geometry)
    got = octavo.conv_general_dilated(x, w, **geometry, config=aqt.conv_general_dilated_make(2, 8, 4))
    assert off(got, want) < 1e-6


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bounds_of_the_four_conventions(bits):
    half = 2.0 ** (bits - 1)
    bounds = [aqt.int_symmetric(bits, zero, top).bound for zero in (True, False) for top in (False, True)]
    assert bounds == [half - 0.5, half - 1, half, half - 0.5]
    assert [aqt.int_symmetric(1, False, top).bound for top in (False, True)] == [1.0, 0.5]
    fmt = aqt.int_symmetric(bits)
    assert fmt.smallest == -fmt.largest


def test_stochastic_rounding_where_aqt_has_it():
    def rounded(config):
        six = [getattr(getattr(config, m), s) for m in SIX for s in ("lhs", "rhs")]
        return [o is not None and o.rounding.stochastic for o in six]

    gradient_only = [False, False, True, False, True, False]
    assert rounded(aqt.config_v3(drhs_bits=8)) == gradient_only
    assert rounded(aqt.config_v4(drhs_bits="e5m2")) == gradient_only
    assert rounded(aqt.fully_quantized()) == [False, False, True, True, True, True]
    apart = {"use_stochastic_rounding": None, "vjp_lhs_stochastic_rounding": False, "vjp_rhs_stochastic_rounding": True}
    assert rounded(aqt.fully_quantized(**apart)) == [False, False, False, True, False, True]
    for config in (aqt.config_fwd_fp8(), aqt.dot_general_make(8, 8, 8), aqt.conv_general_dilated_make(2, 8, 8)):
        assert not any(rounded(config))
    shared = aqt.set_stochastic_rounding(aqt.config_v4(), True, False, "custom-1", noise_sharing_axes=(1,))
    assert shared.dlhs.lhs.rounding == Stochastic(bits=16, shared_axes=(1,))


def test_accumulators():
    config = aqt.config_v4("e4m3", fwd_accumulator_dtype=jnp.bfloat16, dlhs_accumulator_dtype=jnp.int32)
    assert (config.fwd.accumulator, config.dlhs.accumulator, config.drhs.accumulator) == ("bfloat16", None, None)
    with pytest.raises(ValueError, match="int32 accumulator needs integers on both sides"):
        aqt.config_v3(fwd_bits=None)
    with pytest.raises(ValueError, match="summed in int32, got int16"):
        aqt.config_v4(fwd_accumulator_dtype=jnp.int16)


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: aqt.config_v4(9), ValueError, "bits are None, 1 to 8"),
        (lambda: aqt.config_v4("e3m4"), ValueError, "bits are None, 1 to 8"),
        (lambda: aqt.config_v3("e4m3"), ValueError, "config_v3 has integers only, got 'e4m3'"),
        (lambda: aqt.config_fwd_fp8("int8"), ValueError, "takes 'e4m3' or 'e5m2', got 'int8'"),
        (lambda: aqt.LocalAqt(0), ValueError, "at least one shard, got 0"),
        (lambda: aqt.int_symmetric(1), ValueError, "one-bit format needs preserve_zero=False"),
        (lambda: aqt.config_v4(rng_type="mine"), ValueError, "the noise is one of"),
        (lambda: aqt.config_v4(None, 8, dlhs_use_fwd_quant=True), ValueError, "the forward is in float"),
        (lambda: aqt.config_v4(fwd_mid_alpha_both=3.0), ValueError, "from 0 to 1"),
        (lambda: aqt.fully_quantized(vjp_lhs_stochastic_rounding=True), ValueError, "pass None for it and both"),
        (lambda: aqt.fully_quantized(use_stochastic_rounding=None), ValueError, "pass None for it and both"),
        (lambda: aqt.conv_general_dilated_make(0), ValueError, "at least one spatial dimension"),
        (lambda: aqt.config_v4().with_operands(lhs=None), ValueError, "'lhs' is no operand"),
        (lambda: aqt.config_v4().with_operands(drhs_lhs={"tile": 2}), ValueError, "drhs_lhs is left in float"),
        (lambda: smoothed(DotConfig.qat("int8"), 2.0), ValueError, "alpha, from 0 to 1, .*got 2.0"),
        (lambda: Matmul(smooth=0.5), ValueError, "this matmul quantizes none"),
        (lambda: smoothed(DotConfig.qt("int8"), 0.5), ValueError, "smoothed forward leaves smoothed codes"),
        (
            lambda: DotConfig(dlhs=Matmul(Operand("int8"), smooth=0.5)),
            ValueError,
            "dlhs is smoothed, so it cannot reuse",
        ),
        (lambda: Operand("int8", channelwise_axes="rows"), ValueError, "axes of the operand, or 'contracted'"),
        (lambda: Operand("int8", channelwise_axes=(0,), per_tensor=True), ValueError, "no per_tensor"),
        (lambda: Operand("int8", channelwise_axes=(5,)).quantizer(2, contracting=(1,)), ValueError, "has 2 axes"),
    ],
)
def test_what_makes_no_sense_raises(build, error, text):
    with pytest.raises(error, match=text):
        build()


def test_with_operands():
    config = aqt.config_v4()
    changed = config.with_operands(
        fwd={"per_tensor": True}, fwd_rhs={"qtype": "int4"}, drhs_lhs=Operand("int8"), dlhs=None
    )
    assert changed.fwd.lhs == config.fwd.lhs.replace(per_tensor=True)
    assert changed.fwd.rhs.qtype.name == "int4"
    assert changed.fwd.rhs.per_tensor
    assert changed.drhs.lhs == Operand("int8")
    assert changed.dlhs == Matmul(residual="original")
    assert config.with_operands() == config
    assert aqt.config_v4(dlhs_use_fwd_quant=True).dlhs.residual == "requantize"
    assert config.with_operands(drhs={"per_tensor": True}) == config


# Smoothing.

QAT = DotConfig.qat("int8")


def smoothed_by_hand(x, w, alpha):
    """SmoothQuant's equations in float64, then fake quantization."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    s = np.abs(x).max(0) ** alpha / np.abs(w).max(1) ** (1 - alpha)
    left, right = (
        octavo.quantize(jnp.asarray(a, jnp.float32), aqt.int_symmetric(8), channelwise_axes=(axis,)).dequantize()
        for axis, a in enumerate((x / s, w * s[:, None]))
    )
    return np.asarray(left, np.float64) @ np.asarray(right, np.float64)


def outlier():
    x, w, g = data((64, 128), (128, 64), (64, 64))
    return x.at[:, 5].multiply(100), w, g


def test_aqt_1_smoothing_lowers_the_error():
    """AQT takes the scales of smoothed operands and quantizes those that are not: an error of 0.9."""
    x, w, _ = outlier()
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    plain, smooth = (off(dot(x, w, config=smoothed(QAT, alpha)), exact) for alpha in (None, 0.5))
    assert smooth < plain
    assert smooth < 0.0085
    ours = aqt.config_v4(dlhs_bits=None, fwd_mid_alpha_both=0.5)
    assert ours.fwd.smooth == (0.5, 0.5)
    assert off(dot(x, w, config=ours), exact) < 0.009
    broken = theirs.config_v4(dlhs_bits=None, fwd_mid_alpha_both=0.5)
    assert off(broken(x, w, PLAIN), exact) > 0.5


@pytest.mark.parametrize("alpha", [0.25, 0.5, 1.0])
def test_smoothing_is_smoothquant(alpha):
    x, w, _ = outlier()
    # Symmetric codes: the smallest value of a row is a tie between -127 and -128 otherwise.
    config = smoothed(DotConfig.qat(aqt.int_symmetric(8)), alpha)
    got = jax.jit(lambda x, w: octavo.dot(x, w, config=config))(x, w)
    assert off(got, smoothed_by_hand(x, w, alpha)) < 3e-4


def test_smoothing_leaves_the_gradients_alone():
    x, w, g = outlier()
    gradient = Matmul(Operand("int8"), Operand("int8"), residual="original")
    for config in (QAT, QAT.replace(dlhs=gradient, drhs=gradient)):
        plain = three(lambda x, w, c=config: octavo.dot(x, w, config=c), x, w, g)
        smooth = three(lambda x, w, c=config: octavo.dot(x, w, config=smoothed(c, 0.5)), x, w, g)
        for a, b in zip(smooth[1:], plain[1:], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("shapes", "numbers"),
    [
        (((2, 16, 3, 32), (2, 8, 16)), (((1,), (2,)), ((0,), (0,)))),
        (((24, 32, 8), (8, 32, 16)), (((2, 1), (0, 1)), ((), ()))),
        (((32, 24, 2), (16, 2, 32)), (((0,), (2,)), ((2,), (1,)))),
        (((32,), (32,)), (((0,), (0,)), ((), ()))),
    ],
)
def test_smoothing_along_any_axes(shapes, numbers):
    """With 16 bits, smoothed or not, the product is that of the floats."""
    x, w = data(*shapes)
    config = smoothed(DotConfig.qat("int16", dequant="input"), 0.5)
    want = jax.lax.dot_general(x, w, numbers)
    assert off(dot_general(x, w, numbers, config=config), want) < 3e-4
    assert off(dot_general(x, w, numbers, config=config.with_operands(fwd_lhs=None)), want) < 3e-4


def test_smoothing_by_einsum_and_each_batch_for_itself():
    x, w = data((3, 16, 32), (3, 32, 8))
    x = x.at[1, :, 4].multiply(100)
    config = smoothed(QAT, 0.5)
    got = jax.jit(lambda x, w: octavo.einsum("bij,bjk->bik", x, w, config=config))(x, w)
    for i in range(3):
        assert off(got[i], dot(x[i], w[i], config=config)) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_smoothing_in_half_precision(dtype):
    x, w, g = (a.astype(dtype) for a in outlier())
    got = three(lambda x, w: octavo.dot(x, w, config=smoothed(QAT, 0.5)), x, w, g)
    assert [a.dtype for a in got] == [dtype] * 3
    assert off(got[0], np.asarray(x, np.float64) @ np.asarray(w, np.float64)) < 0.0095


def test_smoothing_of_zeros_and_of_what_is_not_finite():
    x, w, _ = outlier()
    x, w = x.at[:, 3].set(0), w.at[7].set(0)
    config = smoothed(QAT, 0.5)
    assert off(dot(x, w, config=config), x @ w) < 0.0085
    assert not np.any(dot(x, jnp.zeros_like(w), config=config))
    for bad in (jnp.nan, jnp.inf):
        out = np.asarray(dot(x[:, :16].at[0, 0].set(bad), w[:16], config=config))
        assert not np.isfinite(out[0]).any()
        assert np.isfinite(out[1:]).all()
    for size in (1e-30, 1e30):
        assert off(dot(x * size, w / size, config=config), x @ w) < 0.0085


def test_smoothing_masks_the_values_that_were_clipped():
    """The mask is that of the smoothed values, which are the ones that the range is for."""
    x, w, g = outlier()
    config = smoothed(DotConfig.qat("int8", calibration="fixed,30"), 0.5)
    _, dx, _ = three(lambda x, w: octavo.dot(x, w, config=config), x, w, g)
    s = np.sqrt(np.abs(x).max(0) / np.abs(w).max(1))
    outside = np.abs(np.asarray(x) / s) > 30
    np.testing.assert_array_equal(np.asarray(dx) == 0, outside)
    tight = config.with_operands(fwd={"calibration": "fixed,2"})
    _, dx, _ = three(lambda x, w: octavo.dot(x, w, config=tight), x, w, g)
    outside = np.abs(np.asarray(x) / s) > 2
    assert outside.any()
    np.testing.assert_array_equal(np.asarray(dx) == 0, outside)


def test_smoothing_with_a_tracker():
    x, w, _ = outlier()
    config = smoothed(QAT.with_operands(fwd={"per_tensor": True, "tracker": RunningMean()}), 0.5)
    state = init_scaling(config, x, w, PLAIN)
    loss = lambda state: jnp.sum(octavo.dot_general(x, w, PLAIN, config=config, scaling=state))  # noqa: E731
    state = jax.grad(loss, allow_int=True)(state)
    s = np.sqrt(np.abs(x).max(0) / np.abs(w).max(1))
    np.testing.assert_allclose(state["lhs"]["sum_of_absmax"].item(), np.abs(np.asarray(x) / s).max(), rtol=1e-5)


def test_smoothing_raises_in_convolutions_and_ragged_dots():
    config = smoothed(QAT, 0.5)
    with pytest.raises(NotImplementedError, match="leave smooth out of their config"):
        octavo.conv_general_dilated(jnp.ones((1, 2, 4, 4)), jnp.ones((3, 2, 3, 3)), (1, 1), "SAME", config=config)
    with pytest.raises(NotImplementedError, match="leave smooth out of their config"):
        octavo.gmm(jnp.ones((4, 8)), jnp.ones((2, 8, 4)), jnp.asarray([2, 2]), config=config)


# What AQT's own tests express.


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_mid_quantization_with_any_alpha_and_in_gradients(alpha):
    """One bit is the width at which AQT's is right: see test_aqt_1."""
    mid = dict.fromkeys(("fwd_mid_alpha_both", "dlhs_mid_alpha_both", "drhs_mid_alpha_both"), alpha)
    x, w, g = data((16, 32), (32, 8), (16, 8))
    x, g = x.at[:, 5].multiply(100), g.at[:, 2].multiply(30)
    for a, b in zip(
        *both(theirs.config_v4(fwd_bits=1, dlhs_bits=1, drhs_bits=1, **mid), aqt.config_v4(1, 1, 1, **mid), x, w, g),
        strict=True,
    ):
        assert off(a, b) < 2e-6


def test_mid_quantization_lowers_the_error_of_gradients():
    x, w, g = data((64, 32), (32, 32), (64, 32))
    g = g.at[:, 5].multiply(100)
    config = aqt.set_stochastic_rounding(aqt.config_v4(8, 8, 8), False, False)
    plain, smooth = (
        off(three(lambda x, w, c=c: octavo.dot(x, w, config=c), x, w, g)[1], g @ w.T)
        for c in (config, aqt.set_use_mid_quant(config, dlhs_mid_alpha_both=0.5))
    )
    assert smooth < 0.6 * plain


def test_numerics_without_rounding():
    """Only scales and clipping are left: without rounding nothing is lost, with a constant bound what is beyond it."""
    x, w, g = data((16, 32), (32, 8), (16, 8))
    for change, ours in ((lambda c: None, {}), (lambda c: theirs.set_constant_calibration(c, 1.5), "constant,1.5")):
        their_config = theirs.config_v4(drhs_bits=8)
        change(their_config)
        for raw in (their_config.fwd, their_config.dlhs, their_config.drhs):
            raw.dg_accumulator_dtype = None
            for side in (raw.dg_quantizer.lhs, raw.dg_quantizer.rhs):
                side.numerics.round, side.numerics.dtype = False, None
        fields = {"qtype": aqt.int_symmetric(8, round=False), **({"calibration": ours} if ours else {})}
        got, want = both(their_config, each(**fields)(aqt.config_v4(8, 8, 8)), x, w, g)
        for a, b in zip(got, want, strict=True):
            assert off(a, b) < 1e-6
    assert off(got[0], x @ w) > 0.05


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class HalfGradient(IntFormat):
    """Integers with a gradient for positive values only, and half of it above a half."""

    def gradient(self, x):
        return jnp.where(x >= 0, jnp.where(x > 0.5, 0.5, 1.0), 0.0)


def test_numerics_with_a_gradient_of_their_own():
    """As AQT's own test has one, whose gradient is zero below zero; here with a factor as well."""
    base = pytest.importorskip("aqt.jax.v2.numerics.numerics").AqtNumerics

    class Theirs(base):
        get_dtype = staticmethod(lambda: None)
        get_quant_bound = staticmethod(lambda: 1.0)

        def vjp_fwd(self, x, context):
            return jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN), (x,)

        def vjp_bwd(self, res, grad):
            (x,) = res
            return grad * jnp.where(x >= 0, jnp.where(x > 0.5, 0.5, 1.0), 0.0), None

    their_config = theirs.config_v4(drhs_bits=8)
    their_config.fwd.dg_quantizer.lhs.numerics = Theirs()
    their_config.fwd.dg_accumulator_dtype = None
    fmt = HalfGradient(bits=2, preserve_max=True, narrow=True)
    ours = aqt.config_v4(8, 8, 8).with_operands(fwd_lhs={"qtype": fmt})
    x, w, g = data((16, 32), (32, 8), (16, 8))
    got, want = both(their_config, ours, x, w, g)
    for a, b in zip(got, want, strict=True):
        assert off(a, b) < 1e-6
    assert ((np.asarray(got[1]) == 0) == (np.asarray(x) < 0)).all()
    slope = jax.grad(lambda x: octavo.fake_quant(x, octavo.Quantizer(fmt)).sum())(jnp.asarray([-1.0, 0.2, 1.0]))
    assert slope.tolist() == [0.0, 1.0, 0.5]
    clipped = ours.with_operands(fwd_lhs={"calibration": "fixed,1"}).replace(clip_gradient=True)
    _, dx, _ = three(lambda x, w: octavo.dot(x, w, config=clipped, key=jax.random.key(0)), x, w, g)
    assert ((np.asarray(dx) == 0) == ((np.asarray(x) < 0) | (np.asarray(x) > 1))).all()


@pytest.mark.parametrize("name", ["v4 all", "full"])
def test_a_config_next_to_a_qarray(name):
    """The float side and the gradient are quantized as if the codes had been made by the config itself."""
    x, w, g = data((16, 128), (128, 8), (16, 8))
    config = aqt.set_stochastic_rounding(make(name), False, False)
    q = config.fwd.rhs.quantizer(2, contracting=(0,)).quantize(w)
    want = three(lambda x, w: octavo.dot(x, w, config=config), x, w, g)
    out, vjp = jax.vjp(lambda x: octavo.dot(x, q, config=config), x)
    np.testing.assert_array_equal(out, want[0])
    if config.dlhs.residual == "original":  # there is no float but that of the codes
        want = want[0], three(lambda x, w: octavo.dot(x, w, config=config), x, q.dequantize(), g)[1]
    np.testing.assert_allclose(vjp(g)[0], want[1], rtol=1e-5, atol=1e-6)
    assert dot_types(lambda x: octavo.dot(x, q, config=config), x)[0][:2] == ("int8", "int8")
    np.testing.assert_array_equal(octavo.einsum("ij,jk->ik", x, q, config=config), want[0])
    left = octavo.dot(config.fwd.lhs.quantizer(2, contracting=(1,)).quantize(x), w, config=config)
    np.testing.assert_array_equal(left, want[0])


def test_scale_axes_among_the_remaining_ones():
    x, w = data((4, 6, 32), (32, 8))
    numbers = (((2,), (0,)), ((), ()))
    their_config = theirs.config_v4(dlhs_bits=None)
    their_config.fwd.dg_quantizer.lhs.calib_shared_axes = [0, 2]
    ours = aqt.config_v4(8, None).with_operands(fwd_lhs={"channelwise_axes": (1,)})
    np.testing.assert_array_equal(
        dot_general(x, w, numbers, config=ours), their_config(x, w, numbers)
    )  # fmt: skip
    assert ours.fwd.lhs.quantizer(3, contracting=(2,)).quantize(x).scale.shape == (1, 6, 1)


@pytest.mark.parametrize(
    ("shapes", "numbers"),
    [
        (((6, 4, 16), (4, 16, 8)), (((1, 2), (0, 1)), ((), ()))),
        (((3, 6, 16), (3, 16, 8)), BATCH),
    ],
)
def test_a_scale_for_each_contracted_index(shapes, numbers):
    """REMAINING_AXIS with THIS_INPUT, with several contracted axes and with a batch."""
    x, w = data(*shapes)
    their_config = theirs.dot_general_make(None, 8)
    theirs.set_fwd_dequant_mode(their_config, rhs_dequant_mode=theirs.DequantMode.THIS_INPUT)
    theirs.set_fwd_calibration_mode(their_config, rhs_calibration_mode=theirs.CalibrationMode.REMAINING_AXIS)
    theirs.set_use_fwd_quant(their_config, False, False)
    ours = aqt.dot_general_make(None, 8).with_operands(fwd_rhs={"dequant": "input", "channelwise_axes": "contracted"})
    got = dot_general(x, w, numbers, config=ours)
    assert off(got, their_config(x, w, numbers)) < 1e-6


def test_tiles_along_several_contracted_axes():
    """As MaxText's _tiling_fn tiles all of them."""
    tiled = pytest.importorskip("aqt.jax.v2.tiled_dot_general")
    x, w = data((6, 16, 32), (16, 32, 8))
    numbers = (((1, 2), (0, 1)), ((), ()))
    sides = [
        tiled.TensorTiling(
            contraction_axes=[tiled.AxisTiling(axis=a, tile_size=8, tile_count=None) for a in axes], remaining_axes=[]
        )
        for axes in numbers[0]
    ]
    want = tiled.tiled_dot_general(
        tiled.Cfg(lhs=sides[0], rhs=sides[1]), x, w, numbers, dot_general=theirs.config_v4(dlhs_bits=None)
    )
    ours = aqt.config_v4(8, None).with_operands(fwd={"tile": 8, "tile_axis": None})
    got = dot_general(x, w, numbers, config=ours)
    assert off(got, want) < 1e-6
    assert ours.fwd.rhs.quantizer(3, contracting=(0, 1)).quantize(w).scale.shape == (2, 4, 8)


def test_dynamic_update_slice_of_qarrays():
    tensor = pytest.importorskip("aqt.jax.v2.aqt_tensor")
    old, new = data((8, 4, 16), (2, 4, 16))
    ours, mine = (octavo.quantize(x, aqt.int_symmetric(8), channelwise_axes=(0, 1)) for x in (old, new))
    pair = [
        tensor.QTensor(
            qvalue=q.qvalue, sparsity_mask=None, scale=[q.scale], scale_t=None, bias=[], dequant_dtype=jnp.float32
        )
        for q in (ours, mine)
    ]
    want = tensor.dynamic_update_slice(*pair, (3, 0, 0))
    got = jax.jit(octavo.qarray.dynamic_update_slice)(ours, mine, (3, 0, 0))  # traced starts
    np.testing.assert_array_equal(got.qvalue, want.qvalue)
    np.testing.assert_array_equal(got.scale, want.scale[0])
    tiles, more = (octavo.quantize(x, "int4", tiled_axes={2: 4}).pack() for x in (old, new))
    full = octavo.quantize(old, "int4", tiled_axes={2: 4})
    part = octavo.quantize(old[:, :, :8], "int4", tiled_axes={2: 4})
    np.testing.assert_array_equal(
        octavo.qarray.dynamic_update_slice(tiles, part, (0, 0, 4)).scale[:, :, 1:3], part.scale
    )
    assert full.scale.shape == (1, 1, 4)
    with pytest.raises(ValueError, match="axis 2: 8 values from 2 with 2 scales do not replace full tiles of 4"):
        octavo.qarray.dynamic_update_slice(tiles, part, (0, 0, 2))
    with pytest.raises(ValueError, match="axis 0: 2 values from 0 with 1 scales do not replace full tiles of 8"):
        octavo.qarray.dynamic_update_slice(tiles, more, (0, 0, 0))
    with pytest.raises(ValueError, match="has the format, dtype and rank"):
        octavo.qarray.dynamic_update_slice(ours, part, (0, 0, 0))


def test_small_shards_multiply_as_integers():
    x, w, g = data((64, 32), (32, 16), (64, 16))
    shards = {"drhs_bits": 8, "dlhs_bits": None}
    their_config = theirs.config_v4(**shards, drhs_local_aqt=theirs.LocalAqt(contraction_axis_shard_count=4))
    ours = aqt.config_v4(**shards, drhs_local_aqt=aqt.LocalAqt(4))
    got, want = both(their_config, ours, x, w, g)
    assert off(got[2], want[2]) < 1e-6
    ours = aqt.set_stochastic_rounding(ours, False, False)
    found = dot_types(lambda x, w: jax.vjp(lambda x, w: octavo.dot(x, w, config=ours), x, w)[1](g), x, w)
    # dlhs is the only one in float; dots of few rows have a form for each platform.
    assert [t[:2] for t in found if t[0] != "int8"] == [("float32", "float32")]
    assert found[-1][:2] == ("int8", "int8")


def test_weighted_calibration():
    """AQT's static ranges from means of magnitudes; its maximum is a moving average that starts at zero (bug 12)."""
    module = pytest.importorskip("aqt.jax.v2.flax.aqt_flax_calibration")
    x = data((16, 32))[0].at[:, 3].set(0)
    fields = {"l1_dev_coeff": 1.5, "lp_dev_coeff": 0.5, "const_bound_coeff": 0.25, "update_count_prior": 0.0}
    theirs_at = module.WeightedStatsCalibration(quant_collection="aqt", safe_divide=True, **fields)
    bound, _ = theirs_at.apply({}, x, [1], None, method="get_bound", mutable="aqt")
    ours = octavo.Quantizer("int8", channelwise_axes=(0,), calibration="weighted,1.5,0.5,0,0.25")
    np.testing.assert_allclose(ours.measure(x)["absmax"], bound, rtol=1e-5)
    for bad in ("weighted", "weighted,-1", "weighted,0,1,0,0,0"):
        with pytest.raises(ValueError, match="weights are not negative and not all zero"):
            octavo.Quantizer("int8", calibration=bad)


# Bugs of AQT.


def test_aqt_2_float16_sums_do_not_overflow():
    """AQT casts the int32 sum to float16 before scaling: 64 ones make infinity."""
    x, w = jnp.ones((4, 64), jnp.float16), jnp.ones((64, 4), jnp.float16)
    assert not np.isfinite(theirs.config_v4()(x, w, PLAIN)).any()
    np.testing.assert_allclose(dot(x, w, config=aqt.config_v4()), 64, rtol=0.01)


@pytest.mark.slow
def test_aqt_3_bfloat16_is_as_good_as_float32():
    """AQT rounds scales and quotients to bfloat16: a tenth more error than quantizing in float32."""
    x, w = data((256, 128), (128, 256), dtype=jnp.bfloat16)
    wide = x.astype(jnp.float32), w.astype(jnp.float32)
    exact = np.asarray(wide[0], np.float64) @ np.asarray(wide[1], np.float64)
    config = aqt.config_v4(arithmetic="float32")
    ours = off(dot(x, w, config=config, preferred_element_type=jnp.float32), exact)
    best = off(dot(*wide, config=config), exact)
    assert ours < 1.03 * best
    assert off(theirs.config_v4()(x, w, PLAIN), exact) > 1.05 * ours


@pytest.mark.parametrize("bits", [4, 8])
def test_aqt_4_gradients_of_the_constructors_are_unbiased(bits):
    """AQT's largest values become 7/7.5 of themselves, however often they are drawn."""
    config = aqt.config_v4(dlhs_bits=bits, drhs_bits=None)
    g = jnp.tile(jnp.asarray([[1.0, 0.95, 0.3, -0.97]]), (512, 64))
    x, w = jnp.zeros((512, 8)), jnp.zeros((256, 8)).at[:4, :4].set(jnp.eye(4)).T
    # The weights choose single columns of the gradient: rows of dlhs are samples of them.
    _, dx, _ = jax.jit(
        lambda key: three(lambda x, w: octavo.dot(x, w, config=config, key=key), x, w, g)
    )(jax.random.key(0))  # fmt: skip
    residual = np.asarray(octavo.quantize(w, aqt.int_symmetric(bits), channelwise_axes=(0,)).dequantize())[:4, :4]
    np.testing.assert_allclose(np.asarray(dx)[:, :4].mean(0), residual @ np.asarray(g[0, :4]), atol=0.012)


def test_aqt_5_the_maximum_keeps_its_gradient():
    """AQT masks where a code would be beyond 127, and the range ends at 127.5."""
    x, w, g = data((16, 32), (32, 8), (16, 8))
    config = aqt.config_v4(dlhs_bits=None).replace(clip_gradient=True)
    want = three(lambda x, w: octavo.dot(x, w, config=config.replace(clip_gradient=False)), x, w, g)
    got = three(lambda x, w: octavo.dot(x, w, config=config), x, w, g)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    clipped = config.with_operands(fwd={"calibration": "absmax,0.5"})
    _, dx, _ = three(lambda x, w: octavo.dot(x, w, config=clipped), x, w, g)
    outside = np.abs(x) > 0.5 * np.abs(x).max(1, keepdims=True)
    np.testing.assert_array_equal(np.asarray(dx) == 0, outside)


def test_aqt_6_the_dtype_of_scales():
    """AQT's set_scale_and_bias_dtype does nothing."""
    config = each(scale_dtype="bfloat16", arithmetic="float32")(aqt.config_v4())
    x, w = data((16, 32), (32, 8))
    q = config.fwd.lhs.quantizer(2, contracting=(1,)).quantize(x)
    assert q.scale.dtype == jnp.bfloat16
    full = dot(x, w, config=aqt.config_v4())
    got = dot(x, w, config=config)
    assert 0 < off(got, full) < 0.02


@pytest.mark.parametrize("name", ["float4_e2m1fn", "e4m3"])
def test_aqt_7_small_floats_clip_gradients_and_round_stochastically(name):
    """In AQT neither reaches a format such as e2m1: the mask is dead code and the setter raises."""
    config = aqt.config_v4(drhs_bits=8).with_operands(fwd={"qtype": name, "calibration": "absmax,0.5"})
    config = config.with_operands(dlhs={"qtype": name}, drhs={"qtype": name}).replace(clip_gradient=True)
    x, w, g = data((16, 32), (32, 8), (16, 8))
    one, two = (
        three(lambda x, w, k=k: octavo.dot(x, w, config=config, key=jax.random.key(k)), x, w, g) for k in (0, 1)
    )
    outside = np.abs(x) > 0.5 * np.abs(x).max(1, keepdims=True)
    assert not np.asarray(one[1])[outside].any()
    assert (np.asarray(one[1])[~outside] != 0).mean() > 0.9
    assert np.any(np.asarray(one[1]) != np.asarray(two[1]))


def test_aqt_9_a_convolution_in_integers_with_a_gradient():
    x, w = data((2, 3, 8, 8), (4, 3, 3, 3))
    config = aqt.conv_general_dilated_make(2, 8, 8)
    conv = lambda x, w, config=config: octavo.conv_general_dilated(x, w, (1, 1), "SAME", config=config)  # noqa: E731
    assert dot_types(conv, x, w)[0][:2] == ("int8", "int8")
    for got, want in zip(
        jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2), (0, 1))(x, w),
        jax.grad(lambda x, w: jnp.sum(conv(x, w, None) ** 2), (0, 1))(x, w),
        strict=True,
    ):
        assert off(got, want) < 0.02


def test_aqt_13_setters_leave_alone():
    """AQT's setters change the object, and through shared calibrations other objects as well."""
    config = aqt.config_v4(drhs_bits=8)
    before = config.to_json()
    for change, _, _ in SETTERS.values():
        assert change(config, aqt) is not config
    aqt.set_stochastic_rounding(config, False, True)
    assert config.to_json() == before == aqt.config_v4(drhs_bits=8).to_json()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.smooth = 0.5


@pytest.mark.parametrize("name", ["v4", "v4 all", "full"])
def test_aqt_15_one_residual_per_operand(name):
    """AQT saves each operand as it is, divided by its scale, and as codes."""
    x, w = data((128, 256), (256, 128))
    config = aqt.set_stochastic_rounding(make(name), False, False)
    _, vjp = jax.vjp(lambda x, w: octavo.dot(x, w, config=config), x, w)
    saved = sum(a.nbytes for a in jax.tree.leaves(vjp) if getattr(a, "size", 0) > 4096)
    assert saved <= (x.nbytes + w.nbytes) // (4 if name == "full" else 1)


def test_aqt_17_configs_are_hashable_and_traced_once():
    """AQT copies its config at every call."""
    traces = []

    @jax.jit
    def step(x, w):
        traces.append(1)
        return octavo.dot(x, w, config=aqt.config_v4())

    x, w = data((8, 16), (16, 8))
    step(x, w)
    step(x, w)
    assert len(traces) == 1
    for name in CONFIGS:
        one, two = make(name), make(name)
        assert one == two
        assert hash(one) == hash(two)
        assert DotConfig.from_json(one.to_json()) == one
    static = jax.jit(lambda x, w, config: octavo.dot(x, w, config=config), static_argnums=2)
    static(x, w, aqt.config_v4())
    static(x, w, aqt.config_v4())
    assert static._cache_size() == 1


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_aqt_18_int4_runs_as_the_plan_says_on_every_platform(platform):
    """AQT asks for the backend when it traces, and on CPUs multiplies other numbers than elsewhere."""
    x, w = data((8, 64), (64, 16))
    config = aqt.config_v4(4, None, None)
    fn = lambda params, x: octavo.dot(x, params["w"], config=config)  # noqa: E731
    row = octavo.plan(fn, (), {"w": w}, x).rows[0]
    assert row.fwd == "int4 x int4"
    assert row.lowering == "int8 -> int32"
    found = octavo.verify(fn, {"w": w}, x, platform=platform)
    assert [(p.lhs_dtype, p.rhs_dtype, p.out_dtype) for p in found.matmuls] == [("int8", "int8", "int32")]
    assert {tuple(t.split("x")[-1] for t in (r.lhs, r.rhs, r.out)) for r in found.lowered} == {("i8", "i8", "i32")}
    codes = [octavo.quantize(a, config.fwd.lhs.qtype, channelwise_axes=[i]) for i, a in ((0, x), (1, w))]
    assert {str(q.qvalue.dtype) for q in codes} == {"int4"}
    sums = np.asarray(codes[0].qvalue, np.int32) @ np.asarray(codes[1].qvalue, np.int32)
    np.testing.assert_allclose(fn({"w": w}, x), sums * codes[0].scale * codes[1].scale, rtol=1e-6)


def test_formats_of_bits():
    for bits in range(1, 9):
        fmt = aqt.config_v4(bits).fwd.lhs.qtype
        assert isinstance(fmt, IntFormat)
        assert fmt.bits == bits
        assert fmt.has_zero == (bits > 1)
