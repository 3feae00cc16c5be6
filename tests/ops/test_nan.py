"""A NaN shows in the results that depend on it, and in no other, whatever the size: XLA's CPU maximum loses it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from tests.cases import slow_except

CONFIGS = {
    "int8": octavo.DotConfig.qat("int8"),
    "minmax": octavo.DotConfig.qat("int8", calibration="minmax"),
    "fp8": octavo.DotConfig.qat("float8_e4m3fn"),
}


def only(nan, where):
    return np.isnan(nan[where]).all() and np.isfinite(np.delete(nan, where[-1], axis=len(where) - 1)).all()


@pytest.mark.parametrize("name", slow_except(("int8",), CONFIGS))
@pytest.mark.parametrize("shape", [(64, 128), (512, 512)])
def test_forward(name, shape):
    x = jnp.ones(shape).at[3, 5].set(jnp.nan)
    dot = jax.jit(lambda x, w: octavo.dot(x, w, config=CONFIGS[name]))
    assert only(np.asarray(dot(x, jnp.ones((shape[1], 32)))), (3,))
    assert only(np.asarray(dot(jnp.ones((4, shape[0])), x)), (slice(None), 5))


def test_gradient():
    g = jnp.ones((64, 128)).at[2, 3].set(jnp.nan)
    x, w = jnp.ones((64, 256)), jnp.ones((256, 128))
    config = octavo.DotConfig.qt("int8")
    dx, dw = jax.jit(jax.grad(lambda x, w: jnp.sum(octavo.dot(x, w, config=config) * g), argnums=(0, 1)))(x, w)
    assert only(np.asarray(dx), (2,))
    assert only(np.asarray(dw), (slice(None), 3))


def test_huge_values_are_not_taken_for_nan():
    x = jnp.full((64, 128), 3e38).at[:, ::2].multiply(-1)
    assert np.isfinite(np.asarray(octavo.quantize(x, "int8", channelwise_axes=(0,)).dequantize())).all()


@pytest.mark.parametrize("check", [True, False])
def test_fixed_ranges_look_for_values_that_are_not_finite_if_asked(check):
    x, w = jnp.ones((64, 128)).at[3, 5].set(jnp.nan), jnp.ones((128, 32))
    config = octavo.DotConfig.qat("int8", calibration="fixed,1", check_finite=check)
    assert np.isfinite(np.asarray(octavo.dot(x, w, config=config))).all() != check
    rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", check_finite=check)
    made = octavo.rules.dot_config(rule, lhs_weight=False, rhs_weight=True)
    assert all(o.check_finite == check for o in (made.fwd.lhs, made.fwd.rhs, made.dlhs.lhs, made.drhs.lhs))
