"""NNX models: every method quantized exactly as by hand, state kept, everything of Flax still working."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import octavo
from octavo.calibration import AmaxHistory
from octavo.frameworks.nnx import OverwriteWithGradient, QuantStat, nnx_sites, quantize_nnx
from octavo.frameworks.params import WithAux, quantize_params
from octavo.inspect import verify
from octavo.rules import QtRule, QuantizationRule, dot_config
from octavo.transform import PtqProvider, QtProvider, QuantizationProvider
from tests.arrays import normal

pytestmark = pytest.mark.standard_promotion

D = 8
RULE = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
STATIC = QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
PTQ = QuantizationRule(weight_qtype="int8", act_qtype="int8")
X = normal(1, 4, D)


def by_hand(x, w, rule=RULE):
    return octavo.dot(x, w, config=dot_config(rule, lhs_weight=False, rhs_weight=True))


def linear(rngs):
    return nnx.Linear(D, D, use_bias=False, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.query = linear(rngs)

    def __call__(self, x):
        q = self.query(x)
        return jax.nn.softmax(q @ q.T) @ q


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = linear(rngs)
        self.layers = nnx.List([Attention(rngs) for _ in range(2)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)

    def __call__(self, x, *, scale=1.0):
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return self.drop(x) * scale

    def encode(model, x, mode="plain"):  # noqa: N805
        return model.first(x) if mode == "plain" else None

    @nnx.jit
    def compiled(self, x):
        return self.first(x)

    def remember(self, x):
        self.memory, self.note = nnx.Cache(x @ x.T), "kept"
        return self


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(Attention))(rngs)

    def __call__(self, x):
        return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)

    def remat(self, x):
        body = nnx.remat(lambda layer, x: layer(x))
        return nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


@pytest.fixture
def model():
    return Model(nnx.Rngs(0))


@pytest.fixture
def low(model):
    return quantize_nnx(model, QtProvider(RULE))


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_arrays_are_shared_and_the_original_stays_float(model, low):
    assert low.first.kernel.get_value() is model.first.kernel.get_value()
    assert low.first.kernel is not model.first.kernel
    assert (type(low).__name__, type(low).__module__) == ("Model", __name__)
    assert isinstance(low, Model)
    assert_same(model.first(X), X @ model.first.kernel.get_value())
    low(X)
    assert not hasattr(model, "octavo_path")
    assert model.drop.rngs.count.get_value() == 0


def test_c10_any_method_and_submodule_is_quantized(model, low):
    w = model.first.kernel.get_value()
    for out in (low.encode(X), low.compiled(X), low.first(X), low.encode(X, mode="plain")):
        assert_same(out, by_hand(X, w))
    assert low.encode(X, mode="other") is None
    q = by_hand(X, model.layers[1].query.kernel.get_value())
    products = dot_config(RULE, lhs_weight=False, rhs_weight=False)
    scores = octavo.dot(q, q.T, config=products)
    assert_same(low.layers[1](X), octavo.dot(jax.nn.softmax(scores), q, config=products))


def test_private_methods_are_quantized_when_they_are_named(model):
    class Private(Model):
        def _hidden(self, x):
            return self.first.kernel.get_value() @ x

    private = Private(nnx.Rngs(0))
    assert_same(quantize_nnx(private, QtProvider(RULE))._hidden(X.T), private._hidden(X.T))
    low = quantize_nnx(private, QtProvider(RULE), X.T, methods=["_hidden"])
    config = dot_config(RULE, lhs_weight=True, rhs_weight=False)
    assert_same(low._hidden(X.T), octavo.dot(private.first.kernel.get_value(), X.T, config=config))


def test_everything_is_quantized_forward_and_backward(low):
    low.eval()
    graphdef, params, rest = nnx.split(low, nnx.Param, ...)
    found = verify(jax.grad(lambda p, x: nnx.merge(graphdef, p, rest)(x).sum()), params, X)
    assert (found.forward, found.backward) == (1.0, 1.0)
    assert {p.path for p in found.matmuls} == {"first", "layers/0", "layers/0/query", "layers/1", "layers/1/query"}


def test_products_without_weights_have_exact_paths(model):
    rule = QtRule(module_path="layers/1", weight_qtype="int8", act_qtype="int8")
    chosen = [s.op_id for s in nnx_sites(model, QtProvider(rule), jax.ShapeDtypeStruct(X.shape, X.dtype)) if s.config]
    assert chosen == ["dot_general0", "dot_general1"]
    attention = nnx.MultiHeadAttention(2, D, decode=False, rngs=nnx.Rngs(0))
    paths = [s.path for s in nnx_sites(attention, QtProvider(RULE), X[None])]
    assert paths == ["query", "key", "value", "", "", "out"]


def test_scopes_that_are_no_modules_and_modules_with_any_name():
    class Scoped(Attention):
        def __call__(self, x):
            with jax.named_scope("scores"):
                return super().__call__(x)

    class Holder(nnx.Module):
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, x):
            return self.inner(x)

    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.body = Scoped(rngs)
            self.scan = Holder(self.body)

        def __call__(self, x):
            return self.scan(x)

    sites = nnx_sites(Outer(nnx.Rngs(0)), QtProvider(RULE), X)
    assert [s.path for s in sites] == ["body/query", "body", "body"]


def test_b1_a_helper_that_is_jitted_is_never_shared_between_inside_and_outside():
    @nnx.jit
    def helper(layer, x):
        return layer(x)

    class Calls(nnx.Module):
        def __init__(self, rngs):
            self.layer = linear(rngs)

        def __call__(self, x):
            return helper(self.layer, x)

    model = Calls(nnx.Rngs(0))
    low = quantize_nnx(model, QtProvider(RULE))
    expected = by_hand(X, model.layer.kernel.get_value())
    for _ in range(2):
        assert_same(low(X), expected)
        assert_same(helper(low.layer, X), expected)
        assert_same(model(X), X @ model.layer.kernel.get_value())


def test_b4_activation_of_a_params_shape_is_no_weight():
    class Square(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jax.random.normal(rngs(), (D, D)))

        def __call__(self, x, y):
            return (x @ y) @ self.w

    model = Square(nnx.Rngs(0))
    rule = QtRule(weight_qtype="int8")
    x, y = (normal(i, D, D) for i in (3, 4))
    assert_same(quantize_nnx(model, QtProvider(rule))(x, y), by_hand(x @ y, model.w.get_value(), rule))
    stored = quantize_nnx(model, PtqProvider(rule), x, y)
    assert_same(stored.w.unboxed().array, octavo.quantize(model.w.get_value(), "int8", channelwise_axes=(1,)))


def test_b5_weights_inside_shard_map_are_weights():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=auto, devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec

    class Sharded(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jax.random.normal(rngs(), (D, D)))

        def __call__(self, x):
            return sharded(jnp.dot)(x, self.w.get_value())

    def sharded(dot):
        return jax.shard_map(dot, mesh=mesh, in_specs=(spec("x"), spec()), out_specs=spec("x"))

    model = Sharded(nnx.Rngs(0))
    rule = QtRule(weight_qtype="int8")
    expected = sharded(lambda x, w: by_hand(x, w, rule))(X, model.w.get_value())
    assert_same(quantize_nnx(model, QtProvider(rule))(X), expected)


def test_mutations_come_out(low):
    low(X)
    assert low.drop.rngs.count.get_value() == 1
    assert jnp.any(low.norm.mean.get_value() != 0)
    nnx.jit(lambda m, x: m(x))(low, X)
    assert low.drop.rngs.count.get_value() == 2


def test_new_variables_and_attributes_come_out(low):
    assert low.remember(X) is low
    assert low.memory.get_value().shape == (4, 4)
    assert low.note == "kept"
    assert_same(low.first(X), by_hand(X, low.first.kernel.get_value()))


def test_gradients_are_those_by_hand(model, low):
    def loss(m, x):
        return jnp.sum(m.encode(x) ** 2)

    expected = jax.grad(lambda w: jnp.sum(by_hand(X, w) ** 2))(model.first.kernel.get_value())
    assert_same(nnx.grad(loss)(low, X)["first"]["kernel"].get_value(), expected)
    value, grads = nnx.value_and_grad(loss)(low, X)
    assert_same(grads["first"]["kernel"].get_value(), expected)
    assert_same(value, loss(low, X))
    jitted = nnx.jit(nnx.grad(loss))(low, X)["first"]["kernel"].get_value()
    np.testing.assert_allclose(jitted, expected, rtol=1e-6)


def test_jit_of_split_state_and_of_a_closure(low):
    low.eval()
    graphdef, state = nnx.split(low)
    merged = jax.jit(lambda s, x: nnx.merge(graphdef, s)(x))(state, X)
    assert_same(merged, jax.jit(lambda x: low(x))(X))
    low.train()
    with pytest.raises(Exception, match="different trace level"):
        jax.jit(lambda x: low(x))(X)


@pytest.mark.slow
def test_remat_scan_and_vmap_over_stacked_layers():
    model = Stacked(nnx.Rngs(0))
    low = quantize_nnx(model, QtProvider(RULE))
    out = X
    for i in range(3):
        layer = Attention(nnx.Rngs(0))
        layer.query.kernel.set_value(model.layers.query.kernel.get_value()[i])
        out = quantize_nnx(layer, QtProvider(RULE))(out)
    np.testing.assert_allclose(low(X), out, rtol=1e-5, atol=1e-6)
    assert_same(low(X), low.remat(X))
    graphdef, state = nnx.split(low)
    found = verify(jax.grad(lambda s, x: nnx.merge(graphdef, s).remat(x).sum()), state, X)
    assert (found.forward, found.backward) == (1.0, 1.0)
    mapped = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(low.layers, X)
    assert mapped.shape == (3, *X.shape)


def test_modules_that_are_shared_stay_shared():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(5, D, rngs=rngs)
            self.one = linear(rngs)
            self.two = self.one

        def __call__(self, ids):
            return self.table.attend(self.two(self.one(self.table(ids))))

    model, ids = Tied(nnx.Rngs(0)), jnp.arange(4)
    low = quantize_nnx(model, QtProvider(RULE))
    assert low.one is low.two
    table, w = model.table.embedding.get_value(), model.one.kernel.get_value()
    assert_same(low(ids), by_hand(by_hand(by_hand(table[ids], w), w), table.T))
    stored = quantize_nnx(model, PtqProvider(PTQ), ids)
    assert isinstance(stored.table.embedding, WithAux)
    assert stored(ids).shape == (4, 5)


def test_static_ranges_are_variables_with_qwix_names(model):
    low = quantize_nnx(model, QtProvider(STATIC), X)
    state = nnx.state(low, QuantStat)
    assert list(state["first"]["dot_general0_lhs"].get_value()) == ["count", "sum_of_absmax"]
    assert set(state["layers"][0]) >= {"dot_general0_lhs", "dot_general0_rhs", "query"}
    assert low.first.dot_general0_lhs.get_value()["count"] == 0
    low(X)
    nnx.jit(lambda m, x: m(x))(low, 2 * X)
    low.encode(3 * X)
    stat = low.first.dot_general0_lhs.get_value()
    assert stat["count"] == 3
    np.testing.assert_allclose(stat["sum_of_absmax"], [[6 * jnp.max(jnp.abs(X))]], rtol=1e-6)


def test_frozen_ranges_stay_and_quantize(model):
    low = quantize_nnx(model, QtProvider(STATIC), X)
    low.encode(X)
    low.set_attributes(disable_quant_stats_update=True)
    out = low.encode(4 * X)
    assert low.first.dot_general0_lhs.get_value()["count"] == 1
    bounds = {"absmax": low.first.dot_general0_lhs.get_value()["sum_of_absmax"]}
    config = dot_config(STATIC, lhs_weight=False, rhs_weight=True)
    expected = octavo.dot(4 * X, model.first.kernel.get_value(), config=config, scaling={"lhs": bounds})
    assert_same(out, expected)


def test_a_submodule_can_be_frozen_alone(model):
    low = quantize_nnx(model, QtProvider(STATIC), X)
    low(X)
    low.layers[0].set_attributes(disable_quant_stats_update=True)
    low(X)
    counts = [layer.query.dot_general0_lhs.get_value()["count"] for layer in low.layers]
    assert counts == [1, 2]


def test_a_range_that_was_never_calibrated_is_an_error(model):
    low = quantize_nnx(model, QtProvider(STATIC), X)
    low.set_attributes(disable_quant_stats_update=True)
    with pytest.raises(ValueError, match="dot_general0_lhs at 'first' has a static scale that was never calibrated"):
        low(X)


def test_state_without_inputs_is_an_error_that_names_the_fix(model):
    with pytest.raises(ValueError, match=r"quantize_model\(model, provider, \*example_inputs\)"):
        quantize_nnx(model, QtProvider(STATIC))
    with pytest.raises(ValueError, match=r"granularity of the matmuls.*example_inputs"):
        quantize_nnx(model, PtqProvider(PTQ))
    assert isinstance(quantize_nnx(model, PtqProvider(PTQ), skip_nnx_init=True), Model)


def test_rules_that_match_nothing_are_an_error(model):
    with pytest.raises(ValueError, match=r"Model\.__call__ would change nothing: no rule matches"):
        quantize_nnx(model, QtProvider(QtRule(module_path="decoder", weight_qtype="int8")), X)


def test_delayed_scaling_is_state_whose_gradient_is_its_new_value():
    operand = octavo.Operand("float8_e4m3fn", per_tensor=True, tracker=AmaxHistory(4))
    low = quantize_nnx(linear(nnx.Rngs(0)), QtProvider(QtRule(fwd=octavo.Matmul(operand, operand))), X)
    wanted = nnx.DiffState(0, (nnx.Param, OverwriteWithGradient))
    grads = nnx.grad(lambda m: m(X).sum(), argnums=wanted)(low)
    nnx.update(low, nnx.filter_state(grads, OverwriteWithGradient))
    history = low.dot_general0.get_value()["lhs"]["amax_history"]
    assert_same(history.ravel(), jnp.array([jnp.max(jnp.abs(X)), 0, 0, 0]))


def test_stochastic_rounding_draws_from_rngs(model):
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform")

    def grad(m):
        return nnx.grad(lambda m: jnp.sum(m.encode(X) ** 3))(m)["first"]["kernel"].get_value()

    low = quantize_nnx(model, QtProvider(rule), rngs=nnx.Rngs(stochastic_rounding=0))
    again = quantize_nnx(model, QtProvider(rule), rngs=nnx.Rngs(stochastic_rounding=0))
    first, second = grad(low), grad(low)
    assert jnp.any(first != second)
    assert_same(first, grad(again))
    with pytest.raises(ValueError, match="needs a random key"):
        grad(quantize_nnx(model, QtProvider(rule)))


def test_ptq_stores_codes_and_computes_with_them(model):
    low = quantize_nnx(model, PtqProvider(PTQ), X)
    stored = low.first.kernel
    w = octavo.quantize(model.first.kernel.get_value(), "int8", channelwise_axes=(1,))
    assert_same(stored.unboxed().array, w)
    x = octavo.quantize(X, "int8", channelwise_axes=(0,))
    for out in (low.encode(X), low.first(X), low.compiled(X)):
        assert_same(out, octavo.dot(x, w))
    assert low.first.kernel.array.qvalue is stored.array.qvalue
    assert_same(jax.jit(lambda x: low.first(x))(X), jax.jit(octavo.dot)(x, w))
    nnx.jit(lambda m, x: m(x))(low, X)
    assert_same(low.first.kernel, stored)
    assert not isinstance(low.norm.scale.get_value(), WithAux)
    graphdef, state = nnx.split(low)
    assert verify(lambda s, x: nnx.merge(graphdef, s)(x), state, X).forward == 1.0


def test_c9_matmul_transpose_and_lookup_of_stored_weights():
    class Plain(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jax.random.normal(rngs(), (D, D)))

        def __call__(self, x):
            return jnp.take(self.w, jnp.arange(2), axis=0) @ (x @ self.w.T).T

    low = quantize_nnx(Plain(nnx.Rngs(0)), PtqProvider(PTQ), X)
    assert isinstance(low.w, WithAux)
    assert jnp.all(jnp.isfinite(low(X)))


@pytest.mark.parametrize("cls", [Model, Stacked])
@pytest.mark.slow
def test_c1_scanned_layers_quantize_params(cls):
    model = cls(nnx.Rngs(0))
    model.eval()
    abstract = nnx.eval_shape(lambda: quantize_nnx(cls(nnx.Rngs(0)), PtqProvider(PTQ), jnp.zeros(X.shape)))
    abstract.eval()
    nnx.update(abstract, nnx.state(model, nnx.Not(nnx.Param)))
    nnx.update(abstract, quantize_params(nnx.to_pure_dict(nnx.state(model, nnx.Param)), abstract))
    direct = quantize_nnx(model, PtqProvider(PTQ), X)
    assert_same(nnx.state(abstract, nnx.Param), nnx.state(direct, nnx.Param))
    assert_same(abstract(X), direct(X))
    assert_same(nnx.jit(lambda m, x: m(x))(abstract, X), nnx.jit(lambda m, x: m(x))(direct, X))


@pytest.mark.slow
def test_from_training_to_serving_with_static_ranges():
    trained = quantize_nnx(Stacked(nnx.Rngs(0)), QtProvider(STATIC), X)
    trained(X)
    served = quantize_nnx(trained, PtqProvider(STATIC), X)
    trained.set_attributes(disable_quant_stats_update=True)
    assert served.layers.query.kernel.array.scale.shape == (3, 1, D)
    assert served.layers.query.dot_general0_lhs.get_value()["count"].tolist() == [1, 1, 1]
    np.testing.assert_allclose(served(2 * X), trained(2 * X), rtol=1e-6, atol=1e-6)
    abstract = nnx.eval_shape(lambda: quantize_nnx(Stacked(nnx.Rngs(0)), PtqProvider(STATIC), jnp.zeros(X.shape)))
    params = nnx.to_pure_dict(nnx.state(trained, nnx.Param))
    nnx.update(abstract, quantize_params(params, abstract, nnx.to_pure_dict(nnx.state(trained, QuantStat))))
    assert_same(abstract(2 * X), served(2 * X))


@pytest.mark.slow
def test_arguments_of_any_kind_pass_through(model):
    low = quantize_nnx(nnx.MultiHeadAttention(2, D, decode=False, rngs=nnx.Rngs(0)), QtProvider(RULE))
    rngs = nnx.Rngs(0)
    assert low(X[None], deterministic=True).shape == low(X[None], None, rngs=rngs).shape == (1, *X.shape)

    class Takes(nnx.Module):
        def __init__(self, rngs):
            self.layer = linear(rngs)

        def __call__(self, other, x, *, names):
            return {names[0]: other(self.layer(x)), "rest": names}

    takes = quantize_nnx(Takes(nnx.Rngs(0)), QtProvider(RULE))
    out = takes(model.first, X, names=("a", "b"))
    assert out["rest"] == ("a", "b")
    assert out["a"].shape == X.shape


def test_a_provider_that_overrides_an_operation():
    class Doubled(QuantizationProvider):
        def dot_general(self, *args, **kwargs):
            return 2 * super().dot_general(*args, **kwargs)

    model = linear(nnx.Rngs(0))
    low = quantize_nnx(model, Doubled(RULE))
    assert_same(low(X), 2 * by_hand(X, model.kernel.get_value()))


def test_quantizing_again_replaces_the_rules(model, low):
    again = quantize_nnx(low, QtProvider(QtRule(weight_qtype="int4")))
    assert_same(again.encode(X), by_hand(X, model.first.kernel.get_value(), QtRule(weight_qtype="int4")))


def test_what_is_no_module_raises():
    with pytest.raises(TypeError, match=r"takes an nnx\.Module, got int"):
        quantize_nnx(3, QtProvider(RULE))
    with pytest.raises(TypeError, match=r"rngs is an nnx\.Rngs, got int"):
        quantize_nnx(linear(nnx.Rngs(0)), QtProvider(RULE), rngs=3)


def test_rngs_reach_a_model_that_takes_them():
    class Noisy(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5)

        def __call__(self, x, rngs=None):
            return self.dropout(self.dense(x), rngs=rngs)

    rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8")
    low = octavo.quantize_model(Noisy(), octavo.PtqProvider(rule), jnp.ones((2, 8)), rngs=nnx.Rngs(1))
    assert low(jnp.ones((2, 8)), rngs=nnx.Rngs(2)).shape == (2, 8)
