"""Functions whose precision follows a schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.rules.schedule import Schedule
from octavo.transform import scheduled
from tests.arrays import normal

INT8 = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
STATIC = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
STATIC4 = STATIC.replace(weight_qtype="int4")


PARAMS, X = {"a": {"w": normal(0, 16, 8)}}, normal(1, 32, 16)


def predict(params, x):
    return x @ params["a"]["w"]


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert jax.tree.structure(a) == jax.tree.structure(b)


def test_each_step_is_the_quantized_function_of_its_stage():
    low = scheduled(predict, Schedule([(0, None), (5, INT8), (9, "fp8")]))
    for step, fn in ((4, predict), (5, octavo.quantized(predict, INT8)), (99, octavo.quantized(predict, "fp8"))):
        same(jax.jit(lambda p, x, step=step: low(p, x, step=step))(PARAMS, X), jax.jit(fn)(PARAMS, X))
    assert low.at(5)[0] is low.at(8)[0]
    assert low.at(5)[0] is not low.at(9)[0]


def test_training_across_boundaries_compiles_once_for_each_stage():
    """A regression that learns in float, then in int8, then in int4, and goes on learning."""
    truth = normal(2, 16, 8)
    coarse = octavo.QtRule(weight_qtype="int4", act_qtype="int8")
    low = scheduled(predict, Schedule([(0, None), (20, INT8), (40, coarse)]))
    compiled = []

    @functools.partial(jax.jit, static_argnums=0)
    def train(stage, params, x):
        compiled.append(stage)
        loss = lambda params: jnp.mean((stage(params, x) - x @ truth) ** 2)  # noqa: E731
        value, grad = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 1.0 * g, params, grad), value

    params, losses = {"a": {"w": jnp.zeros((16, 8))}}, []
    for step in range(60):
        params, value = train(low.at(step)[0], params, normal(100 + step, 32, 16))
        losses.append(float(value))
    assert compiled == list(low.stages)
    assert losses[19] < 0.2 * losses[0]
    assert losses[39] < 0.01 * losses[0]
    assert losses[59] < 0.1 * losses[0]


def test_state_is_that_of_all_stages_and_what_a_stage_does_not_use_stays():
    low = scheduled(predict, Schedule([(0, None), (2, STATIC), (4, INT8)], freeze_at=4))
    state = low.init(PARAMS, X)
    same(state, octavo.quantized(predict, STATIC).init(PARAMS, X))
    counts = []
    for step in range(6):
        out, state = low.stateful(state, step=step)(PARAMS, X * (step + 1))
        counts.append(int(state["quant_stats"]["a"]["dot_general0_lhs"]["count"]))
    assert counts == [0, 0, 1, 2, 2, 2]
    same(out, octavo.quantized(predict, INT8)(PARAMS, X * 6))


def test_frozen_ranges_stay_and_serve_the_next_format():
    low = scheduled(predict, Schedule([(0, STATIC), (3, STATIC4)], freeze_at=2))
    state = low.init(PARAMS, X)
    for step in range(2):
        _, state = low.stateful(state, step=step)(PARAMS, X)
    for step, rule in ((2, STATIC), (3, STATIC4)):
        out, after = low.stateful(state, step=step)(PARAMS, 3 * X)
        same(after, state)
        same(out, octavo.quantized(predict, rule).stateful(state, update=False)(PARAMS, 3 * X)[0])
    _, after = low.stateful(low.init(PARAMS, X), step=0)(PARAMS, X)
    assert int(after["quant_stats"]["a"]["dot_general0_lhs"]["count"]) == 1
    _, frozen = low.stateful(after, step=1, update=False)(PARAMS, X)
    same(frozen, after)


def test_a_history_that_a_stage_does_not_use_is_its_own_gradient():
    low = scheduled(predict, Schedule([(0, INT8), (2, "te_fp8_delayedscaling")]))
    state = low.init(PARAMS, X)
    assert jax.tree.leaves(state["_overwrite_with_gradient"])
    state = jax.tree.map(lambda x: x + 3, state)

    def loss(state, params, step):
        out, _ = low.stateful(state, step=step)(params, X)
        return jnp.sum(out**2)

    grads = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    same(grads(state, PARAMS, 0)[0], state)
    plain = jax.jit(jax.grad(lambda params: jnp.sum(octavo.quantized(predict, INT8)(params, X) ** 2)))(PARAMS)
    same(grads(state, PARAMS, 0)[1], plain)
    updated = grads(state, PARAMS, 2)[0]
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(updated), jax.tree.leaves(state), strict=True))


def test_stages_whose_states_differ_raise():
    low = scheduled(predict, Schedule([(0, STATIC), (2, STATIC.replace(act_batch_axes=(1,)))]))
    with pytest.raises(ValueError, match=r"a stage keeps another state for dot_general0_lhs at 'a'.*act_batch_axes"):
        low.init(PARAMS, X)


def test_a_traced_step_and_what_is_no_schedule_raise():
    low = scheduled(predict, Schedule([(0, None), (5, INT8)]))
    with pytest.raises(TypeError, match=r"step is a Python int, got .*choose the stage outside jit"):
        jax.jit(lambda step: low(PARAMS, X, step=step))(3)
    with pytest.raises(TypeError, match=r"scheduled takes a Schedule, got 'int8'.*use quantized"):
        scheduled(predict, "int8")  # pyrefly: ignore
    with pytest.raises(ValueError, match=r"keeps state \(quant_stats\)"):
        scheduled(predict, Schedule([(0, STATIC)]))(PARAMS, X, step=0)
