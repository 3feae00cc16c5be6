"""Models whose precision follows a schedule: one model for each stage, with the same parameters and state."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import octavo
from octavo.frameworks.nnx import OverwriteWithGradient, QuantStat
from octavo.rules.schedule import Schedule
from octavo.transform.state import GRADIENT_STATE
from tests.arrays import normal

pytestmark = pytest.mark.standard_promotion

KEY = jax.random.key(0)
INT8 = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
STATIC = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
DELAYED = octavo.recipe("te_fp8_delayedscaling", exclude=None)
X = normal(1, 8, 16)
Y = X @ normal(2, 16, 4)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert jax.tree.structure(a) == jax.tree.structure(b)


class TestLinen:
    model = nn.Dense(4)

    def test_each_step_has_the_model_of_its_stage(self):
        low = octavo.quantize_model(self.model, Schedule([(0, None), (5, INT8)]))
        variables = low.init(KEY, X)
        same(variables, self.model.init(KEY, X))
        same(low.at(4).apply(variables, X), self.model.apply(variables, X))
        same(low.at(5).apply(variables, X), octavo.quantize_model(self.model, INT8).apply(variables, X))
        assert low.at(5) is low.at(99)

    def test_training_continues_over_a_boundary_and_compiles_once_for_each_stage(self):
        low = octavo.quantize_model(self.model, Schedule([(0, None), (20, INT8)]))
        compiled = []

        @functools.partial(jax.jit, static_argnums=0)
        def train(model, params):
            compiled.append(model)
            loss = lambda params: jnp.mean((model.apply({"params": params}, X) - Y) ** 2)  # noqa: E731
            value, grads = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), value

        params, losses = low.init(KEY, X)["params"], []
        for step in range(40):
            params, value = train(low.at(step), params)
            losses.append(float(value))
        assert compiled == [low.at(0), low.at(20)]
        assert losses[39] < losses[19] < 0.5 * losses[0]

    def test_ranges_are_frozen_from_a_step_on(self):
        low = octavo.quantize_model(self.model, Schedule([(0, None), (1, STATIC)], freeze_at=3))
        variables, counts = low.init(KEY, X), []
        for step in range(5):
            _, new = low.at(step).apply(variables, X, mutable="quant_stats")
            variables = {**variables, **new}
            counts.append(int(variables["quant_stats"]["dot_general0_lhs"]["count"]))
        assert counts == [0, 1, 2, 2, 2]
        frozen = octavo.quantize_model(self.model, STATIC).apply(variables, 2 * X)
        same(low.at(4).apply(variables, 2 * X), frozen)

    @pytest.mark.slow
    def test_a_history_stays_while_another_stage_trains(self):
        low = octavo.quantize_model(self.model, Schedule([(0, INT8), (2, DELAYED), (3, None)]))
        variables = low.init(KEY, X)
        alone = octavo.quantize_model(self.model, DELAYED)
        same(variables, alone.init(KEY, X))
        warm = {**variables, GRADIENT_STATE: jax.tree.map(lambda x: x + 3, variables[GRADIENT_STATE])}
        grad = lambda model: jax.grad(lambda v: jnp.sum(model.apply(v, X) ** 2))(warm)  # noqa: E731
        same(grad(low.at(0))[GRADIENT_STATE], warm[GRADIENT_STATE])
        same(grad(low.at(3))[GRADIENT_STATE], warm[GRADIENT_STATE])
        same(grad(low.at(2)), grad(alone))
        same(grad(low.at(0))["params"], grad(octavo.quantize_model(self.model, INT8))["params"])

    def test_stages_whose_states_differ_raise(self):
        low = octavo.quantize_model(self.model, Schedule([(0, STATIC), (2, STATIC.replace(act_batch_axes=(1,)))]))
        with pytest.raises(ValueError, match=r"a stage keeps another state for dot_general0_lhs.*act_batch_axes"):
            low.init(KEY, X)


def linear():
    return nnx.Linear(16, 4, rngs=nnx.Rngs(0))


class TestNnx:
    def test_stages_share_parameters(self):
        model = linear()
        low = octavo.quantize_model(model, Schedule([(0, None), (20, INT8)]), X)
        same(low.at(0)(X), model(X))
        same(low.at(20)(X), octavo.quantize_model(model, INT8)(X))
        assert low.at(20) is low.at(21)
        traced = []

        @nnx.jit
        def train(model):
            traced.append(type(model))
            value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(X) - Y) ** 2))(model)
            new = jax.tree.map(lambda p, g: p - 0.3 * g, nnx.state(model, nnx.Param), grads)
            nnx.update(model, new)
            return value

        losses = [float(train(low.at(step))) for step in range(40)]
        assert len(traced) == len(set(traced)) == 2
        assert losses[39] < losses[19] < 0.5 * losses[0]
        same(low.at(0).kernel.get_value(), low.at(20).kernel.get_value())
        assert np.any(model.kernel.get_value() != low.at(0).kernel.get_value())  # the given one stays as it is

    def test_ranges_are_frozen_from_a_step_on(self):
        low = octavo.quantize_model(linear(), Schedule([(0, None), (1, STATIC)], freeze_at=3), X)
        counts = []
        for step in range(5):
            low.at(step)(X)
            counts.append(int(nnx.state(low.at(0), QuantStat)["dot_general0_lhs"].get_value()["count"]))
        assert counts == [0, 1, 2, 2, 2]

    def test_a_history_stays_while_another_stage_trains(self):
        low = octavo.quantize_model(linear(), Schedule([(0, INT8), (2, DELAYED), (3, None)]), X)
        alone = octavo.quantize_model(linear(), DELAYED, X)
        state = nnx.state(alone, OverwriteWithGradient)
        same(nnx.state(low.at(0), OverwriteWithGradient), state)
        warm = jax.tree.map(lambda x: x + 3, state)
        for model in (low.at(0), alone):
            nnx.update(model, warm)
        which = nnx.DiffState(0, OverwriteWithGradient)
        grad = nnx.grad(lambda model: jnp.sum(model(X) ** 2), argnums=which)
        same(nnx.to_pure_dict(grad(low.at(0))), nnx.to_pure_dict(warm))
        same(nnx.to_pure_dict(grad(low.at(3))), nnx.to_pure_dict(warm))
        same(nnx.to_pure_dict(grad(low.at(2))), nnx.to_pure_dict(grad(alone)))

    def test_stages_whose_states_differ_raise(self):
        schedule = Schedule([(0, STATIC), (2, STATIC.replace(act_batch_axes=(1,)))])
        with pytest.raises(ValueError, match=r"dot_general0_lhs at '' has another state already.*act_batch_axes"):
            octavo.quantize_model(linear(), schedule, X)

    def test_state_needs_inputs(self):
        with pytest.raises(ValueError, match="the model has to be traced"):
            octavo.quantize_model(linear(), Schedule([(0, None), (1, STATIC)]))


def test_an_equinox_module_is_scheduled_as_a_function():
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.Linear(16, 4, key=KEY)
    with pytest.raises(TypeError, match=r"octavo.scheduled\(lambda model, x: model\(x\), schedule\)"):
        octavo.quantize_model(model, Schedule([(0, None)]))


def test_a_traced_step_raises():
    low = octavo.quantize_model(nn.Dense(4), Schedule([(0, None), (5, INT8)]))
    with pytest.raises(TypeError, match="step is a Python int"):
        jax.jit(lambda step: low.at(step).init(KEY, X))(3)
