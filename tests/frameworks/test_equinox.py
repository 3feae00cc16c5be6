"""Equinox models: the same pytree, every method quantized exactly as by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.frameworks.equinox import equinox_sites, quantize_equinox
from octavo.inspect import verify
from octavo.rules import QtRule, QuantizationRule, dot_config
from octavo.transform import PtqProvider, QtProvider
from tests.arrays import normal

pytestmark = pytest.mark.standard_promotion

D = 8
RULE = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
PTQ = QuantizationRule(weight_qtype="int8", act_qtype="int8")
X = normal(1, 4, D)


def by_hand(w, x, rule=RULE):
    return octavo.dot(w, x, config=dot_config(rule, lhs_weight=True, rhs_weight=False))


class Model(eqx.Module):
    first: eqx.nn.Linear
    attention: eqx.nn.MultiheadAttention
    layers: list
    drop: eqx.nn.Dropout
    note: str = eqx.field(static=True)

    def __init__(self, key):
        self.first = eqx.nn.Linear(D, D, use_bias=False, key=key)
        self.attention = eqx.nn.MultiheadAttention(2, D, key=key)
        self.layers = [eqx.nn.MLP(D, D, D, 1, key=key) for _ in range(2)]
        self.drop = eqx.nn.Dropout(0.5)
        self.note = "note"

    def __call__(self, x, *, key=None):
        x = jax.vmap(self.first)(x)
        x = self.attention(x, x, x)
        for layer in self.layers:
            x = jax.vmap(layer)(x)
        return self.drop(x, key=key, inference=key is None)

    def encode(model, x):  # noqa: N805
        return model.first(x)

    @eqx.filter_jit
    def compiled(self, x):
        return self.first(x)

    def itself(self):
        return self

    def describe(self, x):
        return {"note": self.note, "y": self.first(x)}

    @property
    def size(self):
        return self.first.in_features


@pytest.fixture
def model():
    return Model(jax.random.key(0))


@pytest.fixture
def low(model):
    return quantize_equinox(model, QtProvider(RULE))


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_the_pytree_is_the_same_and_its_arrays_are_shared(model, low):
    assert isinstance(low, Model)
    assert (type(low).__name__, type(low).__module__) == ("Model", __name__)
    ours, theirs = (jax.tree_util.tree_leaves_with_path(m) for m in (low, model))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    assert all(a is b for (_, a), (_, b) in zip(ours, theirs, strict=True))
    assert repr(low) == repr(model)
    assert low.size == D
    assert_same(model.first(X[0]), model.first.weight @ X[0])


def test_c10_any_method_and_submodule_is_quantized(model, low):
    expected = by_hand(model.first.weight, X[0])
    for out in (low.encode(X[0]), low.first(X[0]), low.compiled(X[0]), low.describe(X[0])["y"]):
        assert_same(out, expected)
    assert low.describe(X[0])["note"] == "note"
    assert verify(low.layers[1], X[0]).forward == 1.0
    assert verify(low.attention, X, X, X).forward == 1.0


def test_everything_is_quantized_forward_and_backward(low):
    found = verify(eqx.filter_grad(lambda m, x: m(x).sum()), low, X)
    assert (found.forward, found.backward) == (1.0, 1.0)


def test_products_have_exact_paths(model):
    paths = [s.path for s in equinox_sites(model, QtProvider(RULE), jax.ShapeDtypeStruct(X.shape, X.dtype))]
    projections = [f"attention/{name}_proj" for name in ("query", "key", "value")]
    layers = [f"layers/{i}/layers/{j}" for i in range(2) for j in range(2)]
    assert paths == ["first", *projections, "attention", "attention", "attention/output_proj", *layers]


def test_b1_a_helper_that_is_jitted_is_never_shared_between_inside_and_outside():
    helper = eqx.filter_jit(lambda layer, x: layer(x))

    class Calls(eqx.Module):
        layer: eqx.nn.Linear

        def __call__(self, x):
            return helper(self.layer, x)

    model = Calls(eqx.nn.Linear(D, D, use_bias=False, key=jax.random.key(0)))
    low = quantize_equinox(model, QtProvider(RULE))
    for _ in range(2):
        assert_same(low(X[0]), by_hand(model.layer.weight, X[0]))
        assert_same(helper(low.layer, X[0]), by_hand(model.layer.weight, X[0]))
        np.testing.assert_allclose(model(X[0]), model.layer.weight @ X[0], rtol=1e-5)


def test_vmap_is_a_loop(low):
    assert_same(jax.vmap(low.encode)(X), jnp.stack([low.encode(x) for x in X]))
    batch = jnp.stack([X, 2 * X])
    np.testing.assert_allclose(jax.jit(jax.vmap(low))(batch)[1], eqx.filter_jit(low)(2 * X), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_keys_pass_through(low):
    out = low(X, key=jax.random.key(0))
    assert jnp.any(out == 0)
    assert_same(out, low(X, key=jax.random.key(0)))


def test_gradients_are_those_by_hand(model, low):
    grads = eqx.filter_grad(lambda m: jnp.sum(m.encode(X[0]) ** 2))(low)
    expected = jax.grad(lambda w: jnp.sum(by_hand(w, X[0]) ** 2))(model.first.weight)
    assert_same(grads.first.weight, expected)
    jitted = eqx.filter_jit(eqx.filter_grad(lambda m: jnp.sum(m.encode(X[0]) ** 2)))(low)
    np.testing.assert_allclose(jitted.first.weight, expected, rtol=1e-6)


@pytest.mark.slow
def test_updates_and_surgery_keep_it_quantized(low):
    grads = eqx.filter_grad(lambda m: m(X).sum())(low)
    updated = eqx.apply_updates(low, jax.tree.map(lambda g: -0.1 * g, grads))
    assert_same(updated.encode(X[0]), by_hand(updated.first.weight, X[0]))
    other = eqx.tree_at(lambda m: m.first.weight, low, jnp.eye(D))
    assert_same(other.encode(X[0]), by_hand(jnp.eye(D), X[0]))


def test_a_module_comes_out_as_it_went_in(low):
    assert type(low.itself()) is type(low)
    assert low.itself().first.weight is low.first.weight


def test_state_of_equinox_goes_in_and_out():
    class Normed(eqx.Module):
        layer: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state):
            return self.norm(self.layer(x), state)

    def make():
        layer = eqx.nn.Linear(D, D, key=jax.random.key(0))
        return Normed(layer, eqx.nn.BatchNorm(D, axis_name="batch", mode="batch"))

    model, state = eqx.nn.make_with_state(make)()
    low = quantize_equinox(model, QtProvider(RULE))
    out, after = jax.vmap(low, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(X, state)
    assert out.shape == X.shape
    assert jnp.any(after.get(model.norm.batch_state_index)[0] != state.get(model.norm.batch_state_index)[0])


def test_ptq_stores_codes_and_computes_with_them(model):
    low = quantize_equinox(model, PtqProvider(PTQ), X)
    w = octavo.quantize(model.first.weight, "int8", channelwise_axes=(0,))
    assert_same(low.first.weight, w)
    assert isinstance(low.layers[1].layers[0].weight, octavo.QArray)
    assert isinstance(low.layers[1].layers[0].bias, jax.Array)
    assert_same(low.encode(X[0]), octavo.dot(w, octavo.quantize(X[0], "int8")))
    assert_same(eqx.filter_jit(low)(X), eqx.filter_jit(lambda m, x: m(x))(low, X))
    assert verify(lambda m, x: m(x), low, X).forward == 1.0
    assert low.itself().first.weight is low.first.weight


def test_ptq_of_an_abstract_model(model):
    shapes = eqx.filter_eval_shape(Model, jax.random.key(0))
    low = quantize_equinox(shapes, PtqProvider(PTQ), jax.ShapeDtypeStruct(X.shape, X.dtype))
    concrete = quantize_equinox(model, PtqProvider(PTQ), X)
    assert low.first.weight.scale.shape == concrete.first.weight.scale.shape == (D, 1)


def test_b4_activation_of_a_params_shape_is_no_weight():
    class Square(eqx.Module):
        w: jax.Array

        def __call__(self, x, y):
            return self.w @ (x @ y)

    x, y, w = (normal(i, D, D) for i in range(3))
    rule = QtRule(weight_qtype="int8")
    assert_same(quantize_equinox(Square(w), QtProvider(rule))(x, y), by_hand(w, x @ y, rule))


def test_rules_with_state_name_the_way(model):
    rule = QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    with pytest.raises(ValueError, match=r"octavo\.quantized\(lambda model, x: .*q\.init.*q\.stateful"):
        quantize_equinox(model, QtProvider(rule))


def test_ptq_without_inputs_names_the_fix(model):
    with pytest.raises(ValueError, match=r"quantize_model\(model, provider, \*example_inputs\)"):
        quantize_equinox(model, PtqProvider(PTQ))


def test_quantizing_again_replaces_the_rules(model, low):
    rule = QtRule(weight_qtype="int4")
    assert_same(quantize_equinox(low, QtProvider(rule)).encode(X[0]), by_hand(model.first.weight, X[0], rule))


def test_what_is_no_module_raises():
    with pytest.raises(TypeError, match=r"takes an eqx\.Module, got int"):
        quantize_equinox(3, QtProvider(RULE))
