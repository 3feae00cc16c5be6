"""Parameters that other programs quantized, and their arrays: as Qwix and AQT take and make them."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from aqt.jax.v2 import aqt_quantizer
from flax import nnx

import octavo
from octavo.compat import aqt
from octavo.compat import qwix as ours
from tests.arrays import normal

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Qwix's calls of Flax
]
LIBRARIES = (ours, qwix)
X = normal(0, 4, 64)
W = normal(1, 64, 8)


def model(lib, **rule):
    rule = lib.QuantizationRule(weight_qtype="int8", **rule)
    return lib.quantize_model(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), lib.PtqProvider([rule]), X)


def codes(**options):
    q = octavo.quantize(W, "int8", **options)
    return {part: x for part in ("qvalue", "scale", "zero_point") if (x := getattr(q, part)) is not None}


CASES = {
    "by channel": ({}, {"channelwise_axes": (1,)}),
    "tiles": ({"tile_size": 32}, {"channelwise_axes": (1,), "tiled_axes": {0: 32}}),
    "larger tiles": ({"tile_size": 16}, {"tiled_axes": {0: 32, 1: 4}}),
    "zero points": (
        {"weight_calibration_method": "minmax"},
        {"channelwise_axes": (1,), "calibration_method": "minmax"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_quantized_parameters_of_another_program(name):
    rule, options = CASES[name]
    found = []
    for lib in LIBRARIES:
        low, given = model(lib, **rule), {"kernel": {"array": codes(**options)}, "bias": jnp.ones(8)}
        tree = lib.process_prequantized_params(given, low)
        nnx.update(low, tree)
        found.append((tree, low(X)))
    jax.tree.map(np.testing.assert_array_equal, found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-5, atol=1e-5)


def test_they_are_dequantized_for_a_float_model():
    trees = []
    for lib in LIBRARIES:
        rule = lib.QtRule(weight_qtype="int8", act_qtype="int8")
        low = lib.quantize_model(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), lib.QtProvider([rule]), X)
        trees.append(lib.process_prequantized_params({"kernel": {"array": codes(channelwise_axes=(1,))}}, low))
    jax.tree.map(np.testing.assert_array_equal, *trees)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"kernel": {"array": {"qvalue": W}}}, "kernel has no scale"),
        ({"kernel": {"array": {**codes(), "bits": 8}}}, r"kernel has \['bits'\]"),
        ({"kernel": {"array": {**codes(), "zero_point": jnp.zeros((1, 1), jnp.int8)}}}, "has no zero_point"),
        ({"kernel": {"array": {**codes(), "qvalue": jnp.ones((8, 8), jnp.int8)}}}, r"shape \(8, 8\)"),
        ({"kernel": W}, "kernel is in float"),
        ({"other": W}, "no parameter 'other'"),
    ],
)
def test_what_does_not_fit_raises(given, text):
    low = model(ours)
    with pytest.raises(ValueError, match=text):
        ours.process_prequantized_params(given, low)
    with pytest.raises(ValueError, match=r"kernel|other"):
        qwix.process_prequantized_params(given, model(qwix))
    assert ours.process_prequantized_params({"other": W}, low, allow_extra_params=True) == {}


@pytest.mark.parametrize("fields", [{}, {"act_qtype": None}, {"act_qtype": "int4"}])
def test_rules_are_restored_from_parameters(fields):
    quantized = codes(channelwise_axes=(1,))
    asymmetric = codes(channelwise_axes=(1,), calibration_method="minmax")
    tree = {"layers": {0: {"up": {"kernel": {"array": quantized}}}, 1: {"up": {"kernel": {"array": quantized}}}}}
    tree |= {"head": {"kernel": asymmetric, "bias": jnp.ones(8)}}
    found = [lib.restore_quantization_rules(tree, lib.QuantizationRule, tile_size=32, **fields) for lib in LIBRARIES]
    names = ("module_path", "weight_qtype", "act_qtype", "weight_calibration_method", "tile_size")
    seen = [[[str(getattr(rule, name)) for name in names] for rule in rules] for rules in found]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("qtype", ["int8", "int4", "nf4", "float8_e4m3fn"])
def test_arrays_of_qwix(qtype):
    theirs = qwix.quantize(W, qtype, channelwise_axes=(1,), tiled_axes={0: 16})
    q = ours.from_qwix(theirs)
    np.testing.assert_array_equal(q.dequantize(), qwix.dequantize(theirs))
    back = ours.to_qwix(q.pack() if qtype == "int4" else q)
    assert jax.tree.structure(back) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, back, theirs)
    with pytest.raises(ValueError, match="two levels"):
        ours.to_qwix(octavo.quantize(W, "nvfp4"))


def test_arrays_of_aqt():
    quantizer = aqt_quantizer.quantizer_make(8, initialize_calibration=True)
    tensor, _ = quantizer.quant(W, calibration_axes=[0])
    q = aqt.from_qtensor(tensor)
    np.testing.assert_array_equal(q.dequantize(), tensor.dequant())
    np.testing.assert_array_equal(aqt.to_qtensor(q).dequant(), tensor.dequant())
    for other in (
        octavo.quantize(W, "int8", calibration_method="minmax"),
        octavo.quantize(W, "int8", tiled_axes={0: 8}),
    ):
        with pytest.raises(ValueError, match="neither zero points nor tiles"):
            aqt.to_qtensor(other)


def test_maxtexts_command_is_taken_as_it_is():
    command = [sys.executable, "-m", "octavo.compat.maxtext.train", "src/maxtext/configs/base.yml", "quantisation=int8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "base.yml is MaxText's: Octavo's defaults in its place" in done.stderr
    assert "did you mean 'quantization'?" in done.stderr
