"""What functions cost, against numbers by hand."""

import json

import jax
import jax.numpy as jnp
import pytest

import octavo
from octavo.inspect import Cost, cost
from octavo.inspect.cost import Compute, Memory
from octavo.qarray import Quantizer

PARAMS, X = {"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}, jax.ShapeDtypeStruct((16, 64), jnp.float32)
MACS = 16 * 64 * 32


def predict(params, x):
    return x @ params["w"]


def stored(*args, **kwargs):
    how = Quantizer(*args, **kwargs)
    return {"w": jax.eval_shape(lambda x: how.quantize(x), PARAMS["w"])}


def test_float32():
    c = cost(predict, PARAMS, X)
    assert c == Cost(
        (Compute("float32", "float32", 32, 32, MACS),),
        (Memory("float32", 32, 64 * 32),),
    )
    assert (c.macs, c.ace, c.memory_bits) == (MACS, MACS * 32 * 32, 64 * 32 * 32)


def test_bfloat16_counts_half_the_bits():
    params, x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), (PARAMS, X))
    assert cost(predict, params, x).ace == MACS * 16 * 16


def test_quantized_training_in_int8():
    low = octavo.quantized(predict, octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"))
    grad = jax.value_and_grad(lambda params, x: jnp.sum(low(params, x) ** 2), argnums=(0, 1))
    c = cost(grad, PARAMS, X)
    assert c.compute == (Compute("int8", "int8", 8, 8, 3 * MACS),)
    assert c.ace == 3 * MACS * 64
    assert c.memory_bits == 64 * 32 * 32  # the weights stay in float32


@pytest.mark.parametrize("packed", [False, True])
def test_weights_in_int4(packed):
    params = stored("int4", channelwise_axes=(1,), tiled_axes={0: 32})
    if packed:
        params = jax.eval_shape(lambda p: {"w": p["w"].pack()}, params)
    c = cost(lambda params, x: x @ params["w"].dequantize(), params, X)
    assert c.compute == (Compute("float32", "int4", 32, 4, MACS),)
    assert c.memory == (Memory("int4", 4, 64 * 32, scale_bits=2 * 32 * 32),)
    assert c.memory_bits == 64 * 32 * 4 + 2 * 32 * 32


def test_codes_are_counted_in_whatever_they_are_multiplied():
    rule = octavo.QuantizationRule(weight_qtype="int4", act_qtype="int8")
    c = cost(octavo.quantized(predict, rule), PARAMS, X)  # int4 runs in int8
    assert c.compute == (Compute("int8", "int4", 8, 4, MACS),)
    rule = octavo.QuantizationRule(weight_qtype="fp4", act_qtype="fp4")
    assert cost(octavo.quantized(predict, rule), PARAMS, X).ace == MACS * 4 * 4


def test_formats_narrower_than_their_dtype():
    params = stored("float6_e2m3fn", channelwise_axes=(1,))
    fn = lambda params, x: x @ params["w"].dequantize()  # noqa: E731
    assert cost(fn, params, X).compute[0] == Compute("float32", "float6_e2m3fn", 32, 6, MACS)
    rule = octavo.QuantizationRule(weight_qtype="float6_e2m3fn", weight_calibration_method="absmax")
    low = octavo.quantized(predict, rule)
    assert cost(low, PARAMS, X).compute[0].rhs_bits == 8
    assert cost(low, PARAMS, X, formats={"uint8": "fp6"}).compute[0].rhs == "float6_e2m3fn"


def test_every_turn_of_a_scan_counts():
    stack = {"w": jax.ShapeDtypeStruct((5, 64, 64), jnp.float32)}

    def deep(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]

    c = cost(octavo.quantized(deep, "int8"), stack, X)
    assert c.compute == (Compute("int8", "int8", 8, 8, 5 * 16 * 64 * 64),)
    assert c.memory == (Memory("float32", 32, 5 * 64 * 64),)
    low = jax.eval_shape(lambda p: {"w": Quantizer("int8", channelwise_axes=(0, 2)).quantize(p["w"])}, stack)
    c = cost(octavo.quantized(deep, "int8"), low, X)
    assert c.compute[0].ace == 5 * 16 * 64 * 64 * 64
    assert c.memory == (Memory("int8", 8, 5 * 64 * 64, scale_bits=5 * 64 * 32),)


def test_mixed_precision_has_a_row_for_each_pair_dearest_first():
    params = {"a": {"w": PARAMS["w"]}, "b": {"w": jax.ShapeDtypeStruct((32, 32), jnp.float32)}}

    def two(params, x):
        return jnp.tanh(x @ params["a"]["w"]) @ params["b"]["w"]

    rule = octavo.QtRule(module_path="a", weight_qtype="int8", act_qtype="int8")
    c = cost(octavo.quantized(two, rule), params, X)
    assert [row.macs for row in c.compute] == [16 * 32 * 32, MACS]
    assert c.ace == 16 * 32 * 32 * 1024 + MACS * 64
    text = str(c).splitlines()
    assert [line.split()[:3] for line in text[:3]] == [
        ["operands", "bits", "MACs"],
        ["float32", "x", "float32"],
        ["int8", "x", "int8"],
    ]
    assert text[-1] == "4.915e+04 multiply-adds, ACE 1.887e+07, weights of 1.229e+04 bytes"
    data = json.loads(c.to_json())
    assert data["ace"] == c.ace
    assert data["compute"][1] == {
        "lhs": "int8", "rhs": "int8", "lhs_bits": 8, "rhs_bits": 8, "macs": MACS, "ace": MACS * 64,
    }  # fmt: skip


def test_weights_are_chosen_and_a_function_is_needed():
    fn = lambda a, b: a @ b  # noqa: E731
    assert cost(fn, X, PARAMS["w"]).memory == ()
    assert cost(fn, X, PARAMS["w"], weights="b").memory_bits == 64 * 32 * 32
    assert str(cost(lambda x: x, jnp.ones(3))) == "0 multiply-adds, ACE 0, weights of 0 bytes"
    with pytest.raises(TypeError, match="cost takes a function and its arguments, got dict"):
        cost(PARAMS, X)


def test_loops_of_unknown_length_are_reported():
    def loop(params, x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ params["w"], x)

    c = cost(loop, {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, X)
    assert c.macs == 16 * 64 * 64
    assert "counted once, unknown trip count: while" in str(c)
