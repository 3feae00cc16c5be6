"""Linen models quantized by Octavo and by Qwix itself, where Qwix is right."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

import octavo
from tests.arrays import normal
from tests.cases import slow_except

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore:.*VariableState:DeprecationWarning"),  # Qwix asks Flax for an old name
]

KEY = jax.random.key(0)
X = normal(1, 8, 64)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(128, name="up")(x))
        scores = nn.softmax(jnp.einsum("bd,cd->bc", x, x), axis=-1)
        return nn.Dense(32, name="down")(jnp.einsum("bc,cd->bd", scores, x))


RULES = {
    "qt": {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8"},
    "qat": {"weight_qtype": "int8", "act_qtype": "int8"},
    "weights": {"weight_qtype": "int8"},
    "only_dots": {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8", "op_names": ("dot_general",)},
    "fp8": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn", "bwd_qtype": "float8_e5m2"},
    "rms": {"weight_qtype": "int8", "act_qtype": "int8", "act_calibration_method": "rms,4"},
    "tiles": {"weight_qtype": "int8", "tile_size": 32},
    "one_module": {"module_path": "up", "weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8"},
}


@pytest.mark.parametrize("name", slow_except(["qt"], RULES))
def test_values_and_gradients_are_those_of_qwix(name):
    variables = jax.jit(Model().init)(KEY, X)
    ours = octavo.quantize_model(Model(), octavo.QtProvider([octavo.QtRule(**RULES[name], arithmetic="qwix")]))
    theirs = qwix.quantize_model(Model(), qwix.QtProvider([qwix.QtRule(**RULES[name])]))
    run = lambda model: jax.jit(jax.value_and_grad(lambda v: jnp.sum(model.apply(v, X) ** 2)))(variables)  # noqa: E731
    (got, got_grad), (wanted, wanted_grad) = run(ours), run(theirs)
    # Codes are the same; Qwix multiplies scales in another order, so that floats differ in their last bits.
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(got_grad):
        want = wanted_grad
        for key in path:
            want = want[key.key]
        error = np.linalg.norm(leaf - want) / np.linalg.norm(want)
        assert error < 1e-5, (path, error)


@pytest.mark.slow
def test_statistics_are_those_of_qwix():
    rule = {"weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": True}
    models = [
        octavo.quantize_model(Model(), octavo.QtProvider([octavo.QtRule(**rule, act_batch_axes=(0,))])),
        qwix.quantize_model(Model(), qwix.QtProvider([qwix.QtRule(**rule)])),
    ]
    states = []
    for model in models:
        variables = jax.jit(model.init)(KEY, X)
        for seed in range(3):
            x = normal(seed, *X.shape)
            _, stats = model.apply(variables, x, mutable="quant_stats")
            variables = {**variables, **stats}
        states.append(variables["quant_stats"])
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3), *states)


@pytest.mark.slow
def test_converted_parameters_are_those_of_qwix():
    rule = {"weight_qtype": "int8", "act_qtype": "int8"}
    params = jax.jit(Model().init)(KEY, X)["params"]
    ours = octavo.quantize_model(Model(), octavo.PtqProvider([octavo.QuantizationRule(**rule, arithmetic="qwix")]))
    theirs = qwix.quantize_model(Model(), qwix.PtqProvider([qwix.QuantizationRule(**rule)]))
    got = octavo.quantize_params(params, jax.eval_shape(ours.init, KEY, X)["params"])
    wanted = qwix.quantize_params(params, jax.eval_shape(theirs.init, KEY, X)["params"])
    for name in ("up", "down"):
        a, b = got[name]["kernel"].array, wanted[name]["kernel"].array
        np.testing.assert_array_equal(a.qvalue, b.qvalue)
        np.testing.assert_array_equal(a.scale, b.scale)
        np.testing.assert_array_equal(got[name]["bias"], wanted[name]["bias"])
    np.testing.assert_allclose(
        ours.apply({"params": got}, X), theirs.apply({"params": wanted}, X), rtol=1e-5, atol=1e-6
    )
