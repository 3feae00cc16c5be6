"""Haiku's transformed functions are functions: `quantized` is all that they need."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from tests.arrays import normal

pytestmark = pytest.mark.standard_promotion


def test_a_haiku_model_is_quantized_by_its_parameters_paths():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 8])(x)))
    x = normal(1, 4, 16)
    params = model.init(jax.random.key(0), x)
    rule = octavo.QtRule(module_path=r"mlp/~/linear_\d", weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    low = octavo.quantized(model.apply, rule)
    seen = octavo.verify(jax.value_and_grad(lambda p: jnp.sum(low(p, x) ** 2)), params)
    assert (seen.forward, seen.backward) == (1.0, 1.0)
    config = octavo.DotConfig.qt("int8")

    def by_hand(params, x):
        first, second = params["mlp/~/linear_0"], params["mlp/~/linear_1"]
        hidden = jax.nn.relu(octavo.dot(x, first["w"], config=config) + first["b"])
        return octavo.dot(hidden, second["w"], config=config) + second["b"]

    np.testing.assert_array_equal(jax.jit(low)(params, x), jax.jit(by_hand)(params, x))
