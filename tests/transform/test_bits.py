"""Which bits are the same in eager mode, under jit, in value_and_grad and in remat, and why others are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from tests.arrays import normal
from tests.cases import REPRESENTATIVE, slow_except

# One recipe for each mechanism: as in tests.cases, and tiles, delayed scaling, rotations and float gradients.
RECIPES = (*REPRESENTATIVE, "mxfp8", "deepseek_fp8", "fp8_gpu", "quartet2", "qat_int4")
INT8 = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def linear(params, xs):
    """Two matmuls that share no operand: a sum of their gradients would be one more float operation."""
    return xs[0] @ params["wide"], xs[1] @ params["narrow"]


@pytest.mark.parametrize("name", slow_except(("int8",), RECIPES))
def test_the_same_operands_give_the_same_bits_in_every_program(name):
    params = {"wide": normal(0, 96, 96), "narrow": normal(1, 96, 96).astype(jnp.bfloat16)}
    xs, key = (normal(2, 64, 96), normal(3, 64, 96).astype(jnp.bfloat16)), jax.random.key(4)
    low = octavo.quantized(linear, name)
    # As large as activations: an initial range of delayed scaling may be one, and then everything saturates.
    state = jax.tree.map(lambda s: jnp.full_like(s, 4), low.init(params, xs))

    def forward(params, xs):
        return low.stateful(state, key=key)(params, xs)[0]

    def codes(params, xs):
        """The stored operands of both matmuls, as the rules quantize them."""
        found = []
        for site, lhs in zip(low.sites(params, xs), xs, strict=True):
            for operand, value in ((site.config.fwd.lhs, lhs), (site.config.fwd.rhs, params[site.leaf])):
                if operand is not None:
                    at = (1,) if value is lhs else (0,)
                    found.append(operand.quantizer(2, contracting=at, batch=()).quantize(value, key=key))
        return found

    cotangents = normal(5, 64, 96), normal(6, 64, 96).astype(jnp.bfloat16)

    def step(fn, params, xs):
        outs, vjp = jax.vjp(fn, params, xs)
        return outs, vjp(cotangents)

    outs, gradients = step(forward, params, xs)
    assert_same(forward(params, xs), outs)
    assert_same(jax.jit(forward)(params, xs), outs)
    for fn in (forward, jax.checkpoint(forward)):
        assert_same(jax.jit(lambda params, xs, fn=fn: step(fn, params, xs))(params, xs), (outs, gradients))
    eager = codes(params, xs)
    assert eager
    for fn in (jax.jit(codes), jax.checkpoint(codes)):
        assert_same(fn(params, xs), eager)


def mlp(params, x):
    """Operands of the second and third matmul, computed by float operations that XLA fuses, and their results."""
    hidden = jax.nn.gelu(x @ params["up"])
    down = hidden @ params["down"]
    x = x + down
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return {"down": (hidden, down), "out": (normed, normed @ params["out"])}


def test_programs_differ_only_by_what_float_operations_gave_them():
    """A result is that of its operand alone: whatever the program, it is found again from that array."""
    params = {"up": normal(0, 128, 256) / 11, "down": normal(1, 256, 128) / 16, "out": normal(2, 128, 64) / 11}
    x, low = normal(3, 512, 128), octavo.quantized(mlp, INT8)
    alone = octavo.quantized(lambda params, x: x @ params["w"], INT8)
    again = jax.jit(alone)

    def loss(params, x):
        out = low(params, x)
        return out["out"][1].sum(), out

    def grad(params, x):
        return jax.value_and_grad(loss, has_aux=True)(params, x)[0][1]

    programs = {"eager": low, "jit": jax.jit(low), "value_and_grad": jax.jit(grad)}
    found = {name: fn(params, x) for name, fn in programs.items()}
    for name, out in found.items():
        for weight, (operand, result) in out.items():
            np.testing.assert_array_equal(again({"w": params[weight]}, operand), result, err_msg=name)
    # The float operations themselves differ, and the codes differ only where that moves a value across a midpoint.
    quantizer = octavo.Quantizer("int8", channelwise_axes=(0,))
    for weight in ("down", "out"):
        a, b = (found[name][weight][0] for name in ("eager", "jit"))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
        first, second = quantizer.quantize(a), quantizer.quantize(b)
        flipped = np.asarray(first.qvalue != second.qvalue)
        scaled = np.asarray(a, np.float64) / np.asarray(first.scale, np.float64)
        to_midpoint = np.abs(np.abs(scaled - np.floor(scaled)) - 0.5)
        assert (to_midpoint[flipped] < 1e-3).all()
        assert flipped.mean() < 1e-3


def test_an_ulp_flips_a_code_at_a_midpoint_and_nowhere_else():
    midpoints = np.float32(np.arange(-127, 128) + 0.5)  # the last is the range, so that the scale is one
    between = np.float32(np.arange(-127, 128) + 0.25).clip(max=127)
    x = np.stack([midpoints, np.append(between[:-1], midpoints[-1])])
    up = np.where(x < 127, np.nextafter(x, np.float32(np.inf)), x)
    quantize = jax.jit(octavo.Quantizer("int8", channelwise_axes=(0,)).quantize)
    first, second = quantize(x), quantize(up)
    np.testing.assert_array_equal(first.scale, np.ones((2, 1)))
    np.testing.assert_array_equal(second.scale, first.scale)
    flipped = np.asarray(first.qvalue != second.qvalue)
    even = np.floor(midpoints) % 2 == 0  # ties go to the even code, so that the ulp counts where that is the lower
    np.testing.assert_array_equal(flipped[0], even & (midpoints < 127))
    assert not flipped[1].any()
