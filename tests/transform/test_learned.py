"""Learned scales of weights: LSQ's gradients, stacked layers, and serving the codes that were trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.qarray import Quantizer

RULE = octavo.QtRule(weight_qtype="int3", tile_size=4, weight_calibration_method="lsq", residual="reuse")
KEYS = jax.random.split(jax.random.key(0), 4)


def linear(params, x):
    return x @ params["w"]


def stacked(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w["kernel"]), None

    return jax.lax.scan(layer, x, params["layers"])[0] @ params["out"]


@pytest.fixture(scope="module")
def made():
    """A model of stacked layers, its input, and the gradients of parameters and scales."""
    params = {
        "layers": {"kernel": jax.random.normal(KEYS[0], (2, 8, 8)) / 3},
        "out": jax.random.normal(KEYS[1], (8, 4)),
    }
    x = jax.random.normal(KEYS[2], (16, 8))
    low = octavo.quantized(stacked, RULE)

    @jax.jit
    def step(params, state, teacher):
        loss = lambda params, state: jnp.mean((low.stateful(state)(params, x)[0] - teacher) ** 2)  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1))(params, state)

    return params, x, low, low.init(params, x), step


def test_gradients_are_those_of_the_paper():
    w, x, g = (jax.random.normal(key, shape) for key, shape in zip(KEYS, ((8, 3), (5, 8), (5, 3)), strict=False))
    low = octavo.quantized(linear, RULE)
    state = low.init({"w": w}, x)
    narrow = jax.tree.map(lambda s: 0.8 * s, state)  # so that some values are clipped
    loss = lambda params, state: jnp.sum(low.stateful(state)(params, x)[0] * g)  # noqa: E731
    by_weight, by_scale = jax.jit(jax.grad(loss, argnums=(0, 1)))({"w": w}, narrow)
    scale = np.repeat(np.asarray(narrow["learned_scales"]["w"]["scale"]), 4, axis=0)
    ratio, outer = np.asarray(w) / scale, np.asarray(x).T @ np.asarray(g)
    codes = np.clip(np.round(ratio), -4, 3)
    kept = np.abs(ratio) <= 3.5
    assert 0.05 < 1 - kept.mean() < 0.5
    np.testing.assert_allclose(by_weight["w"], np.where(kept, outer, 0), rtol=1e-4, atol=1e-5)
    total = (outer * np.where(kept, codes - ratio, codes)).reshape(2, 4, 3).sum(1) / np.sqrt(4 * 3)
    np.testing.assert_allclose(by_scale["learned_scales"]["w"]["scale"], total, rtol=1e-3, atol=1e-4)


def test_scales_begin_as_those_of_mse():
    w = jax.random.normal(KEYS[0], (8, 3)).at[:4, 0].set(0)
    scale = octavo.quantized(linear, RULE).init({"w": w}, jnp.ones((1, 8)))["learned_scales"]["w"]["scale"]
    searched = Quantizer("int3", channelwise_axes=(1,), tiled_axes={0: 4}, calibration="mse").quantize(w).scale
    np.testing.assert_allclose(scale[1:], searched[1:], rtol=1e-6)
    assert scale[0, 0] == scale.max()  # a group of zeros could not learn from a scale of zero


def test_scales_of_stacked_layers_are_trained_and_served(made):
    params, x, low, state, step = made
    assert jax.tree.map(jnp.shape, state)["learned_scales"]["layers"]["kernel"]["scale"] == (2, 2, 8)
    teacher, losses, state = stacked(params, x), [], jax.tree.map(lambda s: 0.5 * s, state)  # too narrow
    for _ in range(40):
        loss, (_, gradients) = step(params, state, teacher)
        losses.append(float(loss))
        state = jax.tree.map(lambda s, g: s - 0.1 * g, state, gradients)
    assert losses[-1] < 0.2 * losses[0]
    codes = octavo.convert(stacked, params, x, rules=RULE, state=state)
    assert codes["layers"]["kernel"].qtype.name == "int3"
    np.testing.assert_array_equal(
        jax.jit(octavo.served(stacked, RULE))(codes, x), jax.jit(lambda s: low.stateful(s)(params, x)[0])(state)
    )


def test_conversion_needs_the_trained_scales(made):
    params, x, *_ = made
    with pytest.raises(
        ValueError, match=r"the scale of 'layers/kernel' is learned \(lsq\), but there is no trained one"
    ):
        octavo.convert(stacked, params, x, rules=RULE)


def test_a_weight_that_is_rearranged_has_no_learned_scale():
    with pytest.raises(
        ValueError, match="the scale of its weight 'w' cannot be learned, because the weight is computed"
    ):
        octavo.quantized(lambda params, x: x @ params["w"].T, RULE).init({"w": jnp.ones((3, 8))}, jnp.ones((1, 8)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"weight_qtype": "nvfp4", "weight_calibration_method": "lsq"},
            "'nvfp4', whose blocks have scales of their own",
        ),
        ({"weight_calibration_method": "lsq", "rotate": 16}, "combined with rotate"),
        ({"weight_calibration_method": "lsq", "sparsity": (2, 4)}, "combined with sparsity"),
        ({"weight_calibration_method": "lsq", "rounding": "stochastic"}, "combined with rounding='stochastic'"),
        ({"act_qtype": "int8", "act_calibration_method": "lsq"}, "lsq learns the scales of weights"),
    ],
)
def test_rules_that_cannot_learn_scales(fields, message):
    with pytest.raises(ValueError, match=message):
        octavo.QuantizationRule(**{"weight_qtype": "int4", **fields})


def test_an_operation_without_a_rule_cannot_learn_a_scale():
    operand = octavo.Operand("int4", calibration="lsq")
    with pytest.raises(ValueError, match="lsq learns the scale of a weight and keeps it as state"):
        octavo.dot(jnp.ones((2, 4)), jnp.ones((4, 2)), config=octavo.DotConfig(octavo.Matmul(rhs=operand)))


@pytest.mark.standard_promotion
def test_flax_models_keep_scales_among_their_variables():
    from flax import linen, nnx

    x = jax.random.normal(KEYS[2], (3, 8))
    model = octavo.quantize_model(linen.Dense(4), RULE)
    variables = model.init(KEYS[0], x)
    gradients = jax.grad(lambda v: jnp.sum(model.apply(v, x) ** 2))(variables)
    assert jnp.shape(gradients["learned_scales"]["kernel"]["scale"]) == (2, 4)
    assert float(jnp.abs(gradients["learned_scales"]["kernel"]["scale"]).min()) > 0
    codes = octavo.convert(linen.Dense(4), variables, x, rules=RULE)
    np.testing.assert_array_equal(
        jax.jit(octavo.served(linen.Dense(4), RULE).apply)(codes, x), jax.jit(model.apply)(variables, x)
    )
    other = octavo.quantize_model(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), RULE, x)
    found = nnx.state(nnx.grad(lambda m: jnp.sum(m(x) ** 2))(other))
    assert sorted(found) == ["bias", "kernel", "kernel/scale"]
    assert float(jnp.abs(found["kernel/scale"].get_value()).min()) > 0
