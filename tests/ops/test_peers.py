"""Matmuls against Qwix 0.1.8 and AQT 0.9 where they are right, and a named test for each of their bugs here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo import DotConfig, Matmul, Operand
from tests.cases import slow_except
from tests.ops.walk import dot_types

pytest.importorskip("qwix", reason="the oracles group is not installed: pip install qwix==0.1.8 aqtp==0.9.0")
from aqt.jax.v2 import config as aqt_config
from qwix._src.core import dot_general_qt as qwix_qt

pytestmark = [
    pytest.mark.standard_promotion,
    # aqtp 0.9 converts arrays to dtypes implicitly, which JAX warns about.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
PLAIN = (((1,), (0,)), ((), ()))


def data(*shapes, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def three(f, x, w, g):
    out, vjp = jax.vjp(f, x, w)
    return out, *vjp(g.astype(out.dtype))


def off(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


QWIX = {
    "int8 qt": (
        {"lhs_qtype": "int8", "rhs_qtype": "int8", "dlhs_grad_qtype": "int8", "drhs_grad_qtype": "int8"},
        DotConfig.qt("int8"),
    ),
    "int8 qat": ({"lhs_qtype": "int8", "rhs_qtype": "int8", "use_original_residuals": True}, DotConfig.qat("int8")),
    "int8 per tensor": (
        {
            "lhs_qtype": "int8", "rhs_qtype": "int8", "dlhs_grad_qtype": "int8", "drhs_grad_qtype": "int8",
            "lhs_disable_channelwise_axes": True, "rhs_disable_channelwise_axes": True,
            "dlhs_grad_disable_channelwise_axes": True, "drhs_grad_disable_channelwise_axes": True,
        },
        DotConfig.qt("int8", per_tensor=True),
    ),
    "int4 weights": ({"rhs_qtype": "int4", "use_original_residuals": True}, DotConfig.weight_only("int4")),
    "tiled weights": (
        {"rhs_qtype": "int4", "tile_size": 32, "use_original_residuals": True},
        DotConfig.weight_only("int4", tile=32),
    ),
    "tiled forward": (
        {"lhs_qtype": "int8", "rhs_qtype": "int8", "tile_size": 128, "use_original_residuals": True},
        DotConfig.qat("int8", tile=128),
    ),
    "fp8": (
        {
            "lhs_qtype": "float8_e4m3fn", "rhs_qtype": "float8_e4m3fn",
            "dlhs_grad_qtype": "float8_e5m2", "drhs_grad_qtype": "float8_e5m2",
        },
        DotConfig.qt("float8_e4m3fn", "float8_e5m2"),
    ),
    "sharded gradient": (
        {
            "lhs_qtype": "int8", "rhs_qtype": "int8", "dlhs_grad_qtype": "int8", "drhs_grad_qtype": "int8",
            "drhs_tile_size": 128,
        },
        DotConfig.qt("int8").replace(drhs=Matmul(Operand("int8", tile=128))),
    ),
    "clipped": (
        {
            "lhs_qtype": "int8", "rhs_qtype": "int8", "lhs_calibration_method": "rms,2",
            "rhs_calibration_method": "rms,2", "use_original_residuals": True,
        },
        DotConfig.qat("int8", calibration="rms,2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_except(("int8 qt", "fp8", "tiled weights"), QWIX))
def test_values_and_gradients_are_those_of_qwix(name):
    theirs, ours = QWIX[name]
    x, w, g = data((256, 128), (128, 64), (256, 64))
    config = qwix_qt.DotGeneralQtConfig(**theirs)
    # Under jit, where Qwix divides by the same reciprocal per tensor as it does per channel.
    want = jax.jit(lambda *a: three(lambda x, w: qwix_qt.dot_general_qt(x, w, PLAIN, config), *a))(x, w, g)
    got = jax.jit(lambda *a: three(lambda x, w: octavo.dot_general(x, w, PLAIN, config=ours), *a))(x, w, g)
    assert off(got[0], want[0]) < 1e-6
    # The gradient's scale is folded in another order of products, so that a code may differ by one at a tie.
    for a, b in zip(got[1:], want[1:], strict=True):
        assert off(a, b) < 2e-4


@pytest.mark.slow
def test_values_and_gradients_are_those_of_aqt():
    x, w, g = data((64, 128), (128, 32), (64, 32))
    theirs = aqt_config.config_v4(fwd_bits=8, dlhs_bits=8, drhs_bits=8)
    aqt_config.set_stochastic_rounding(theirs, False, False, implementation="jax.uniform")
    operand = Operand("int8", arithmetic="aqt")
    gradient = Matmul(operand, operand, residual="original")
    ours = DotConfig(Matmul(operand, operand), gradient, gradient)
    want = three(lambda x, w: theirs(x, w, PLAIN), x, w, g)
    got = three(lambda x, w: octavo.dot_general(x, w, PLAIN, config=ours), x, w, g)
    for a, b in zip(got, want, strict=True):
        assert off(a, b) < 1e-6


def test_aqt_is_exact_with_power_of_two_scales():
    rng = np.random.default_rng(0)
    x, w, g = (jnp.asarray(rng.integers(-127, 128, s), jnp.float32) for s in ((16, 32), (32, 8), (16, 8)))
    x, w, g = (a.at[:, 0].set(127).at[0].set(127) for a in (x, w, g))
    operand = Operand(octavo.get_format("int8").replace(preserve_max=True), calibration="fixed,127", arithmetic="aqt")
    gradient = Matmul(operand, operand, residual="original")
    config = DotConfig(Matmul(operand, operand), gradient, gradient)
    got = jax.jit(functools.partial(three, lambda x, w: octavo.dot(x, w, config=config)))(x, w, g)
    np.testing.assert_array_equal(got[0], x @ w)
    np.testing.assert_array_equal(got[1], g @ w.T)
    np.testing.assert_array_equal(got[2], x.T @ g)


# Qwix's bugs that touch matmuls.

INT8 = ("int8", "int8", "int32")


def grads(config, x, w, g):
    dot = functools.partial(octavo.dot_general, dimension_numbers=PLAIN, config=config)
    return functools.partial(three, dot), (x, w, g)


def test_qwix_b9_a_tiled_forward_keeps_quantized_gradients():
    """Qwix with tile_size runs both gradients in float without a word."""
    fn, args = grads(DotConfig.qt("int8", tile=64), *data((128, 128), (128, 64), (128, 64)))
    assert set(dot_types(fn, *args)) == {INT8}


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_qwix_c2_block_formats_run_under_jit_on_cpu(name):
    x, w = data((32, 64), (64, 32))
    got = jax.jit(lambda x, w: octavo.dot(x, w, config=DotConfig.qt(name)))(x, w)
    assert off(got, x @ w) < (0.06 if name == "mxfp8" else 0.25)


def test_qwix_c3_int4_times_int4_runs_everywhere():
    x, w = data((32, 64), (64, 32))
    got = jax.jit(lambda x, w: octavo.dot(x, w, config=DotConfig.qt("int4")))(x, w)
    left = octavo.quantize(x, "int4", channelwise_axes=(0,)).dequantize()
    right = octavo.quantize(w, "int4", channelwise_axes=(1,)).dequantize()
    assert off(got, left @ right) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "fwd",
    [
        Matmul(Operand("int8", calibration="minmax"), Operand("int8")),
        Matmul(Operand("int8"), Operand("nf4")),
        Matmul(Operand("int8"), Operand("int3")),
    ],
)
def test_qwix_c6_gradients_of_asymmetric_nf4_and_int3_operands(fwd):
    """Qwix ends in a bare AssertionError."""
    x, w, g = data((64, 64), (64, 32), (64, 32))
    got = three(lambda x, w: octavo.dot(x, w, config=DotConfig.qt("int8").replace(fwd=fwd)), x, w, g)
    assert off(got[1], g @ w.T) < 0.3
    assert off(got[2], x.T @ g) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "int3", "int6", "fp4"])
def test_qwix_b7_stochastic_rounding_of_gradients_in_any_format(name):
    """Qwix ignores it but for native integers."""
    gradient = Matmul(Operand(name, rounding="stochastic"))
    config = DotConfig.qt("int8").replace(dlhs=gradient, drhs=gradient)
    x, w, g = data((16, 32), (32, 16), (16, 16))
    one, two = (
        three(lambda x, w, k=k: octavo.dot(x, w, config=config, key=jax.random.key(k)), x, w, g) for k in (0, 1)
    )
    assert np.any(np.asarray(one[1]) != np.asarray(two[1]))
    assert np.any(np.asarray(one[2]) != np.asarray(two[2]))


def test_qwix_c12_einsum_of_three_operands():
    x, w, v = data((4, 8), (8, 16), (16, 4))
    got = octavo.einsum("ab,bc,cd->ad", x, w, v, config=DotConfig.qt("int8"))
    assert off(got, x @ w @ v) < 0.03


# AQT's.


def test_aqt_8_local_scales_of_a_square_matmul():
    """LocalAqt by size raises when another axis has the same size."""
    x, w, g = data((128, 128), (128, 128), (128, 128))
    config = DotConfig.qt("int8").replace(drhs=Matmul(Operand("int8", tile=64, tile_axis=0)))
    got = jax.jit(functools.partial(three, lambda x, w: octavo.dot(x, w, config=config)))(x, w, g)
    assert off(got[2], x.T @ g) < 0.02


def test_aqt_11_einsum_with_an_index_to_sum_out_first():
    x, w = data((8, 16), (16, 4, 3))
    got = jax.jit(lambda x, w: octavo.einsum("ij,jkl->ik", x, w, config=DotConfig.qt("int8")))(x, w)
    assert off(got, jnp.einsum("ij,jkl->ik", x, w)) < 0.02


def test_aqt_13_a_config_is_never_changed_by_its_use():
    config = DotConfig.qt("int8")
    before = config.to_json()
    x, w, g = data((16, 32), (32, 16), (16, 16))
    jax.eval_shape(functools.partial(three, lambda x, w: octavo.dot(x, w, config=config)), x, w, g)
    assert config.to_json() == before
    with pytest.raises(AttributeError):
        config.lowering = "plain"  # pyrefly: ignore
