"""Rules are checked when made, print as the code that makes them and survive JSON."""

import jax.numpy as jnp
import numpy as np
import pytest

from octavo import Matmul, Operand, get_format
from octavo._config import Config
from octavo.numerics import Stochastic
from octavo.rules import QtRule, QuantizationRule, checks

INT8 = {"weight_qtype": "int8", "act_qtype": "int8"}
QT = {**INT8, "bwd_qtype": "int8"}
WRONG = {
    "regex": ({"module_path": "(mlp"}, r"module_path='\(mlp': not a regular expression .*whole path"),
    "glob": ({"module_path": "*/mlp"}, r"did you mean '\.\*/mlp'\?"),
    "op string": ({"op_names": "dot_general"}, r"did you mean op_names=\('dot_general',\)\?"),
    "op typo": ({"op_names": ("dotgeneral",)}, "op_names has 'dotgeneral': did you mean 'dot_general'.*ragged_dot"),
    "weight_qtype": ({"weight_qtype": "itn8"}, "weight_qtype='itn8': unknown number format .*'int8'"),
    "act_qtype": ({"act_qtype": "float32"}, "act_qtype='float32': float32 is not a low-precision format"),
    "kv_qtype": ({"kv_qtype": "int9"}, "kv_qtype='int9'.*'int8'"),
    "tile": ({"tile_size": -4}, "tile_size=-4: .*positive integer"),
    "tile axes": ({"weight_qtype": "int8", "tile_size": {0: 128, 1: -64}}, r"tile_size=\{0: 128, 1: -64\}: .*positive"),
    "square by axis": ({"weight_qtype": "int8", "tile_size": {0: 8}, "square_tiles": True}, "tiles by axis have no"),
    "static": ({"weight_qtype": "int8", "act_static_scale": True}, "act_static_scale=True without act_qtype"),
    "weight method": ({"weight_calibration_method": "absmx"}, "weight_calibration_method='absmx': .*'absmax'"),
    "act method": ({"act_calibration_method": "rms"}, "act_calibration_method='rms': .*rms takes factor"),
    "scope": ({"scope": "weight"}, "scope='weight': did you mean 'weights'.*'activations'"),
    "kv_axis": ({"kv_axis": "dvk"}, "kv_axis='dvk': did you mean 'dkv'.*'heads_and_dkv'"),
    "skip": ({"skip": True, "weight_qtype": "int8"}, "skip=True .* weight_qtype='int8' asks for more"),
    "rounding": ({"rounding": "nearst"}, "rounding='nearst': unknown rounding.*'nearest'"),
    "rotate": ({"rotate": 12}, "rotate=12: .*power of two"),
    "sparsity": ({"sparsity": (4, 2)}, r"sparsity=\(4, 2\): .*0 < n < m"),
    "arithmetic": ({"arithmetic": "float16"}, "arithmetic='float16': did you mean 'float32'.*'qwix'"),
    "lowering": ({"lowering": "plan"}, "lowering='plan': did you mean 'plain'.*'rows'"),
    "square": ({"weight_qtype": "int8", "square_tiles": True}, "square_tiles=True needs tile_size"),
    "act alone": ({"act_qtype": "int8"}, "would leave matmuls with a weight in float.*scope='activations'"),
    "no weight": ({"weight_qtype": "int8", "scope": "activations"}, "two activations have no weight; set act_qtype"),
    "block tile": ({"weight_qtype": "mxfp8", "tile_size": 64}, "tiles of 64 with mxfp8, which has tiles of 32"),
    "block whole": ({"weight_qtype": "mxfp8", "per_tensor": True}, "one scale per tensor with mxfp8"),
    "asymmetric": (
        {"weight_qtype": "fp8", "weight_calibration_method": "minmax"},
        "QtRule does not describe a matmul with a weight: MinMax.*needs an integer format",
    ),
    "bwd_qtype": ({**INT8, "bwd_qtype": "inta"}, "bwd_qtype='inta'"),
    "bwd alone": ({"bwd_qtype": "int8"}, "bwd_qtype='int8' without weight_qtype.*set weight_qtype"),
    "bwd method": ({**QT, "bwd_calibration_method": "absmin"}, "bwd_calibration_method='absmin'"),
    "bwd tile": ({**QT, "bwd_weight_grad_tile_size": 0.3}, "bwd_weight_grad_tile_size=0.3"),
    "bwd unread": ({**INT8, "bwd_rotate": 16}, "bwd_rotate=16 without bwd_qtype"),
    "noise": ({**QT, "bwd_stochastic_rounding": "uniforms"}, "did you mean 'uniform'.*'low_bit_uniform'"),
    "residual": ({**QT, "residual": "reused"}, "residual='reused': did you mean 'reuse'.*'requantize'"),
    "raw": ({**QT, "additional_qt_config": {"lhs_qtyp": "int8"}}, r"additional_qt_config\['lhs_qtyp'\]: .*'lhs_qtype'"),
    "raw value": ({**QT, "additional_qt_config": {"drhs_grad_qtype": "e5m9x"}}, r"\['drhs_grad_qtype'\]='e5m9x'"),
    "raw noise": (
        {**QT, "additional_qt_config": {"dlhs_stochastic_rounding_noise_fn": print}},
        "no counterpart: use bwd_stochastic_rounding='uniform'",
    ),
    "raw stat": ({**QT, "additional_qt_config": {"lhs_collect_quant_stat": print}}, "use act_static_scale=True"),
    "fwd differs": (
        {**QT, "fwd": Matmul(Operand("int8"), Operand("int4"))},
        "weight_qtype='int8' but fwd.rhs is int4: fwd replaces what weight_qtype says",
    ),
    "unread": (
        {"scope": "weights", "fwd": Matmul(None, Operand("int4")), "tile_size": 32},
        "tile_size=32 would not be read: fwd say it all",
    ),
    "rotated codes": ({**QT, "rotate": 16, "residual": "reuse"}, "use residual='original' on dlhs and drhs"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_when_the_rule_is_made(name):
    fields, message = WRONG[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        QtRule(**fields)


# What a type checker refuses, and the tests' own does before the rule can: the checks without it.
@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        (checks.check_regex, 3, "field=3: a regular expression as a string"),
        (checks.check_tiles, "128", "field='128': a tile is a count"),
        (checks.check_tiles, (128, 128), r"field=\(128, 128\): sizes by axis are a mapping"),
        (checks.check_flag, 1, "field=1: True or False"),
        (checks.check_axes, 0, r"field=0: a tuple of axes such as \(0,\)"),
        (checks.check_rounding, 3, "field=3: a string or a Rounding"),
        (checks.check_sparsity, "2:4", r"field='2:4': \(n, m\) keeps n of each m"),
        (checks.check_rotation, 16.0, "field=16.0: .*power of two"),
        (checks.check_matmul, "int8", "field='int8': an octavo.Matmul or None"),
    ],
)
def test_values_of_the_wrong_type(check, value, message):
    with pytest.raises(ValueError, match=message):
        checks.check("field", value, check)


RIGHT = [
    QuantizationRule(),
    QuantizationRule(
        module_path=".*/mlp", op_names=["dot", "einsum"], weight_qtype=jnp.int8, tile_size={0: 128, 1: 128}
    ),
    QuantizationRule(**INT8, act_static_scale=True, act_batch_axes=[0], act_calibration_method="MinMax, 0.9"),
    QuantizationRule(act_qtype="int8", kv_qtype="int4", kv_axis="heads_and_dkv", scope="activations"),
    QuantizationRule(skip=True, optional=True),
    QuantizationRule(weight_qtype="mxfp4,floor", rounding=Stochastic(bits=8), sparsity=(2, 4), inside_custom=True),
    QuantizationRule(weight_qtype=get_format("int4").replace(preserve_max=True), tile_size=1 / 4),
    QtRule(**QT, bwd_weight_grad_tile_size=0.25, disable_channelwise_axes=True, bwd_stochastic_rounding="uniform"),
    QtRule(**QT, additional_qt_config={"drhs_grad_qtype": "fp8_e5m2", "sparsity_rule": (2, 4)}),
    QtRule(**QT, drhs=Matmul(Operand("int8", tile=128)), residual="requantize", bwd_rotate=16),
]


@pytest.mark.parametrize("rule", RIGHT, ids=range(len(RIGHT)))
def test_a_rule_prints_as_its_code_and_survives_json(rule):
    names = {**Config._classes, "octavo": None}
    assert eval(repr(rule), names) == rule
    assert Config.from_json(rule.to_json()) == rule
    assert hash(Config.from_json(rule.to_json())) == hash(rule)


def test_types_have_one_name():
    for same in ("fp8", "e4m3", jnp.float8_e4m3fn, jnp.dtype("float8_e4m3fn"), get_format("fp8")):
        assert QtRule(weight_qtype=same).weight_qtype == "float8_e4m3fn"
    assert QtRule(weight_qtype=np.int8) == QtRule(weight_qtype="int8")
    assert repr(QtRule(weight_qtype=jnp.int8)) == "QtRule(weight_qtype='int8')"


def test_matching():
    rule = QuantizationRule(module_path=r"layers/\d+/mlp", op_names=("matmul",), weight_qtype="int8")
    assert rule.op_names == ("dot_general",)
    assert rule.matches("layers/3/mlp", "dot", weights=True)
    assert rule.matches("layers/3/mlp", "dot_general", weights=False)
    assert not rule.matches("layers/3/mlp/up", "dot_general", weights=True), "the whole path"
    assert not rule.matches("layers/3/mlp", "einsum", weights=True)
    assert not rule.replace(scope="weights").matches("layers/3/mlp", "dot", weights=False)
    scores = QuantizationRule(act_qtype="int8", scope="activations")
    assert scores.matches("attention", "einsum", weights=False)
    assert not scores.matches("attention", "einsum", weights=True)


def test_what_leaves_alone():
    assert QuantizationRule().leaves_alone
    assert QtRule(skip=True).leaves_alone
    assert not QuantizationRule(kv_qtype="int8").leaves_alone
    assert not QtRule(fwd=Matmul(None, Operand("int8"))).leaves_alone


def test_sparsity_as_qwix_writes_it():
    class SparsityRule:
        weight_sparsity_n, weight_sparsity_m = 2, 4

    assert QtRule(**QT, additional_qt_config={"sparsity_rule": SparsityRule()}).additional_qt_config == (
        ("sparsity_rule", (2, 4)),
    )
