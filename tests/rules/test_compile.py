"""The six operands that rules compile to, and that their products run in low precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo import DotConfig, Matmul, Operand
from octavo.numerics import Stochastic
from octavo.rules import QtRule, QuantizationRule, dot_config
from tests.cases import slow_except
from tests.ops.walk import dot_types

PLAIN = (((1,), (0,)), ((), ()))
QT = {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8"}


def right(rule):
    return dot_config(rule, lhs_weight=False, rhs_weight=True)


def left(rule):
    return dot_config(rule, lhs_weight=True, rhs_weight=False)


def neither(rule):
    return dot_config(rule, lhs_weight=False, rhs_weight=False)


def data(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


def types(config):
    """The dtypes of the operands of all three dots."""

    def f(x, w):
        return jnp.sum(octavo.dot_general(x, w, PLAIN, config=config, key=jax.random.key(0)) ** 2)

    return {dot[:2] for dot in dot_types(jax.grad(f, (0, 1)), *data((128, 256), (256, 128)))}


def test_training():
    assert right(QtRule(**QT)) == left(QtRule(**QT)) == DotConfig.qt("int8")


def test_quantization_aware_training():
    fields = {"weight_qtype": "int4", "act_qtype": "int8"}
    assert right(QtRule(**fields)) == right(QuantizationRule(**fields))
    assert right(QtRule(**fields)) == DotConfig(Matmul(Operand("int8"), Operand("int4")))
    assert left(QtRule(**fields)) == DotConfig(Matmul(Operand("int4"), Operand("int8")))
    both = dot_config(QtRule(**fields), lhs_weight=True, rhs_weight=True)
    assert both == right(QtRule(**fields)), "of two weights the right one counts"


def test_weights_only():
    assert right(QuantizationRule(weight_qtype="int8")) == DotConfig.weight_only("int8")
    config = right(QtRule(weight_qtype="int8", bwd_qtype="int8"))
    assert config == DotConfig(Matmul(None, Operand("int8")), dlhs=Matmul(Operand("int8")))


def test_two_activations():
    rule = QtRule(weight_qtype="int8", act_qtype="float8_e4m3fn", bwd_qtype="float8_e5m2", bwd_weight_grad_tile_size=64)
    assert neither(rule) == DotConfig.qt("float8_e4m3fn", "float8_e5m2")
    assert neither(rule.replace(kv_qtype="int4")).fwd.rhs == Operand("int4")
    assert neither(QtRule(weight_qtype="int8")) is None
    assert neither(QtRule(**QT, scope="weights")) is None
    only = QuantizationRule(act_qtype="int8", scope="activations")
    assert right(only) is None
    assert neither(only) == DotConfig.qat("int8")
    assert neither(QuantizationRule(kv_qtype="int8")) == DotConfig.weight_only("int8")
    assert right(QuantizationRule(kv_qtype="int8")) is None


def test_what_leaves_alone_has_no_config():
    assert right(QtRule()) is right(QtRule(skip=True)) is None


def test_the_weight_gradient_has_its_tile_on_either_side():
    rule = QtRule(**QT, bwd_weight_grad_tile_size=64)
    assert (right(rule).dlhs.lhs.tile, right(rule).drhs.lhs.tile) == (None, 64)
    assert (left(rule).dlhs.lhs.tile, left(rule).drhs.lhs.tile) == (64, None)


def test_the_weight_gradient_has_its_accumulator_on_either_side():
    rule = QtRule(**QT, bwd_weight_grad_accumulator="bfloat16")
    assert (right(rule).dlhs.accumulator, right(rule).drhs.accumulator) == (None, "bfloat16")
    assert (left(rule).dlhs.accumulator, left(rule).drhs.accumulator) == ("bfloat16", None)
    assert neither(rule).drhs.accumulator is None
    with pytest.raises(ValueError, match="bwd_weight_grad_accumulator"):
        QtRule(**QT, bwd_weight_grad_accumulator="int32")


def test_per_matmul_settings_follow_the_weight():
    fwd = Matmul(Operand("int8"), Operand("int4"))
    rule = QtRule(fwd=fwd, dlhs=Matmul(Operand("int8")), drhs=Matmul(Operand("float8_e5m2")))
    assert right(rule) == DotConfig(fwd, rule.dlhs, rule.drhs)
    assert left(rule) == DotConfig(Matmul(Operand("int4"), Operand("int8")), rule.drhs, rule.dlhs)
    assert neither(rule) is None
    derived = right(
        QtRule(weight_qtype="int8", bwd_qtype="int8", fwd=Matmul(Operand("int4"), Operand("int8", tile=128)))
    )
    assert derived.dlhs == Matmul(Operand("int8"), Operand("int8", tile=128), residual="requantize")
    assert derived.drhs == Matmul(Operand("int8"))


def test_granularity():
    config = right(QtRule(**QT, disable_channelwise_axes=True))
    assert config == DotConfig.qt("int8", per_tensor=True)
    assert config == right(QtRule(**QT, per_tensor=True))
    square = right(QtRule(weight_qtype="int8", act_qtype="int8", tile_size=128, square_tiles=True))
    assert square.fwd == Matmul(Operand("int8", tile=128), Operand("int8", tile=128, square=True))
    by_axis = right(QtRule(**QT, tile_size={1: 8, 0: 4})).fwd
    assert by_axis == Matmul(Operand("int8", tile={0: 4, 1: 8}), Operand("int8", tile={0: 4, 1: 8}))


def test_calibration_rounding_and_the_rest():
    rule = QtRule(
        **QT, weight_calibration_method="rms,3", act_calibration_method="absmax,0.9", bwd_calibration_method="rms,7",
        bwd_stochastic_rounding="low_bit_uniform", rounding="stochastic", arithmetic="qwix", lowering="plain",
        sparsity=(2, 4),
    )  # fmt: skip
    config = right(rule)
    shared = {"rounding": "stochastic", "arithmetic": "qwix"}
    assert config.fwd.lhs == Operand("int8", calibration="absmax,0.9", **shared)
    assert config.fwd.rhs == Operand("int8", calibration="rms,3", **shared)
    noisy = Operand("int8", calibration="rms,7", rounding=Stochastic(bits=8), arithmetic="qwix")
    assert config.dlhs == config.drhs == Matmul(noisy)
    assert (config.sparsity, config.lowering) == ((2, 4), "plain")
    assert neither(rule).sparsity is None
    with pytest.raises(ValueError, match=r"prunes the right operand .* the weight is the left one"):
        left(rule)


def test_static_scales_come_with_the_call():
    rule = QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True, act_calibration_method="minmax")
    assert right(rule).fwd.lhs == Operand("int8", calibration="minmax")


def test_rotation_keeps_the_original():
    config = right(QtRule(**QT, rotate=16))
    assert config.fwd.rotate == 16
    assert config.dlhs == config.drhs == Matmul(Operand("int8"), Operand("int8"), residual="original")
    backward = right(QtRule(**QT, bwd_rotate=16))
    assert backward.drhs == Matmul(Operand("int8"), Operand("int8"), residual="original", rotate=16)


@pytest.mark.parametrize("residual", ["reuse", "requantize", "original"])
def test_residual(residual):
    config = right(QtRule(**QT, residual=residual))
    assert config.dlhs.residual == config.drhs.residual == residual
    assert (config.dlhs.rhs is None) == (residual == "reuse")


def test_codes_may_serve_float_gradients():
    assert right(QtRule(weight_qtype="int8", act_qtype="int8", residual="reuse")).dlhs == Matmul()


# Qwix runs both gradients of a tiled product in float without a word (B9).
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tile_size": 128},
        {"tile_size": 128, "square_tiles": True},
        {"tile_size": 64, "bwd_weight_grad_tile_size": 64},
    ],
    ids=str,
)
def test_all_three_products_run_in_int8(fields):
    assert types(right(QtRule(**QT, **fields))) == {("int8", "int8")}


@pytest.mark.parametrize("qtype", ["mxfp8", "mxfp4", "nvfp4"])
def test_blocks_are_quantized_along_both_contractions(qtype):
    config = right(QtRule(weight_qtype=qtype, act_qtype=qtype, bwd_qtype=qtype))
    block = Operand(qtype)
    assert config == DotConfig(*[Matmul(block, block)] + [Matmul(block, block, residual="original")] * 2)


# Qwix ignores stochastic rounding of these types without a word (B7).
@pytest.mark.parametrize("qtype", ["float8_e5m2", "int6"])
def test_every_type_of_gradient_is_rounded_stochastically(qtype):
    rule = QtRule(**{**QT, "bwd_qtype": qtype}, bwd_stochastic_rounding="uniform")
    x, w = data((8, 16), (16, 4))

    def f(x, key):
        return jnp.sum(octavo.dot_general(x, w, PLAIN, config=right(rule), key=key) ** 3)

    grads = jax.jit(jax.vmap(jax.grad(f), (None, 0)))(x, jax.random.split(jax.random.key(0)))
    assert not np.array_equal(*grads)


def test_raw_settings_name_the_sides_as_they_stand():
    raw = {
        "lhs_qtype": "int4", "rhs_calibration_method": "rms,3", "dlhs_grad_qtype": "float8_e5m2",
        "drhs_tile_size": 64, "drhs_grad_disable_channelwise_axes": True, "disable_gradient_clipping": True,
    }  # fmt: skip
    rule = QtRule(**QT, additional_qt_config=raw)
    for config in (right(rule), left(rule)):
        assert config.fwd == Matmul(Operand("int4"), Operand("int8", calibration="rms,3"))
        assert config.dlhs.lhs == Operand("float8_e5m2")
        assert config.drhs.lhs == Operand("int8", tile=64, per_tensor=True)
        assert not config.clip_gradient


def test_raw_residuals():
    config = right(QtRule(**QT, additional_qt_config={"dlhs_residual_qtype": "int4"}))
    assert config.dlhs == Matmul(Operand("int8"), Operand("int4"), residual="original")
    assert config.drhs == Matmul(Operand("int8"))
    original = right(QtRule(**QT, additional_qt_config={"use_original_residuals": True}))
    assert original.drhs == Matmul(Operand("int8"), Operand("int8"), residual="original")
    floats = QtRule(weight_qtype="int8", act_qtype="int8", additional_qt_config={"use_original_residuals": False})
    assert right(floats).dlhs == Matmul()
    one = QtRule(weight_qtype="int8", additional_qt_config={"drhs_grad_qtype": "int8", "drhs_residual_qtype": "int8"})
    assert right(one).drhs == Matmul(Operand("int8"), Operand("int8"), residual="original")
    sparse = QtRule(**QT, additional_qt_config={"sparsity_rule": (2, 4), "lhs_collect_quant_stat": None})
    assert right(sparse).sparsity == (2, 4)


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix 0.1.8 reads names that Flax is giving up
@pytest.mark.parametrize(
    "fields",
    slow_except(({"bwd_weight_grad_tile_size": 128},), ({}, {"bwd_qtype": None}, {"bwd_weight_grad_tile_size": 128})),
    ids=str,
)
def test_a_rule_means_what_it_means_to_qwix(fields):
    qwix = pytest.importorskip("qwix", reason="the oracles group is not installed: pip install qwix==0.1.8 flax")
    linen = pytest.importorskip("flax.linen")
    x, w, g = data((128, 256), (256, 128), (128, 128))
    rules = [qwix.QtRule(**{**QT, **fields})]
    model = qwix.quantize_model(linen.Dense(128, use_bias=False), qwix.QtProvider(rules))
    ours = right(QtRule(**{**QT, **fields}))

    def three(f):
        out, vjp = jax.vjp(f, x, w)
        return out, *vjp(g)

    want = jax.jit(lambda: three(lambda x, w: model.apply({"params": {"kernel": w}}, x)))()
    got = jax.jit(lambda: three(lambda x, w: octavo.dot_general(x, w, PLAIN, config=ours)))()
    # The gradient's scale is folded in another order of products, so that a code may differ by one at a tie.
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) / np.linalg.norm(b) < 2e-4
