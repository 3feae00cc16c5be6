"""Flax Linen models: quantized through a lifted transformation, checkpoints interchangeable with the float model."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.rules import dot_config
from tests.arrays import normal
from tests.cases import slow_except
from tests.ops.walk import dot_types

pytestmark = pytest.mark.standard_promotion

INT8 = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
CONFIG = dot_config(INT8, lhs_weight=False, rhs_weight=True)
KEY = jax.random.key(0)
X = normal(1, 4, 16)


class Mlp(nn.Module):
    features: int = 32
    dot_general: object = None

    @nn.compact
    def __call__(self, x, *, scale=1.0):
        x = nn.Dense(self.features, dot_general=self.dot_general)(x)
        return scale * nn.Dense(8, dot_general=self.dot_general)(nn.relu(x))

    def doubled(self, x):
        return 2 * self(x)


def by_hand(lhs, rhs, dims, precision=None, preferred_element_type=None):
    return octavo.dot_general(lhs, rhs, dims, precision, preferred_element_type, config=CONFIG)


FLOAT, LOW = Mlp(), octavo.quantize_model(Mlp(), octavo.QtProvider([INT8]))
VARIABLES = FLOAT.init(KEY, X)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_float_checkpoints_are_interchangeable():
    same(LOW.init(KEY, X), VARIABLES)


def test_values_and_gradients_are_those_of_the_ops_by_hand():
    hand = Mlp(dot_general=by_hand)
    loss = lambda model: lambda v: jnp.sum(model.apply(v, X) ** 2)  # noqa: E731
    same(jax.jit(jax.value_and_grad(loss(LOW)))(VARIABLES), jax.jit(jax.value_and_grad(loss(hand)))(VARIABLES))


def test_the_float_model_and_other_versions_are_untouched():
    before = FLOAT.apply(VARIABLES, X)
    LOW.apply(VARIABLES, X)
    same(FLOAT.apply(VARIABLES, X), before)
    other = octavo.quantize_model(FLOAT, octavo.QtRule(weight_qtype="int4", act_qtype="int4"))
    errors = [float(jnp.max(jnp.abs(m.apply(VARIABLES, X) - before))) for m in (LOW, other)]
    assert 0 < errors[0] < errors[1]
    assert type(LOW).__name__ == "Mlp"
    assert LOW.features == 32


def test_every_method_is_quantized_keyword_arguments_and_functions_too():
    out = LOW.apply(VARIABLES, X)
    same(LOW.apply(VARIABLES, X, method="doubled"), 2 * out)
    same(LOW.apply(VARIABLES, X, method=Mlp.doubled), 2 * out)
    same(LOW.apply(VARIABLES, X, method=lambda model, x: model(x) + 1), out + 1)
    same(LOW.apply(VARIABLES, X, scale=3.0), 3 * out)


def test_only_the_named_methods():
    low = octavo.quantize_model(FLOAT, INT8, methods=["__call__"])
    same(low.apply(VARIABLES, X), LOW.apply(VARIABLES, X))
    with pytest.raises(ValueError, match=r"Mlp has no method 'encode'; it has __call__, doubled"):
        octavo.quantize_model(FLOAT, INT8, methods=["encode"])


def test_inputs_raise():
    with pytest.raises(ValueError, match="without inputs"):
        octavo.quantize_model(FLOAT, INT8, X)


def test_a_quantized_model_inside_another():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(self.inner(x))

    rule = INT8.replace(module_path="inner/.*")
    outer = Outer(octavo.quantize_model(Mlp(), rule))
    variables = outer.init(KEY, X)
    same(variables, Outer(Mlp()).init(KEY, X))
    types = dot_types(lambda v: outer.apply(v, X), variables)
    assert types.count(("float32", "float32", "float32")) == 1
    assert types.count(("int8", "int8", "int32")) == 4  # two products, each for two kinds of platform


class Stack(nn.Module):
    """Three layers, scanned or written out, rematerialized or not."""

    scanned: bool
    remat: bool

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        if not self.scanned:
            for _ in range(3):
                x, _ = layer()(x, None)
            return x
        many = nn.scan(layer, variable_axes={"params": 0, "quant_stats": 0}, split_rngs={"params": True}, length=3)
        return many(name="layers")(x, None)[0]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(16)(nn.tanh(nn.Dense(16)(x))), None


@pytest.mark.parametrize(
    ("scanned", "remat"), slow_except([(True, True)], itertools.product([False, True], [False, True]))
)
def test_scanned_and_rematerialized_layers(scanned, remat):
    model = Stack(scanned, remat)
    low = octavo.quantize_model(model, INT8)
    variables = low.init(KEY, X)
    same(variables, model.init(KEY, X))
    done = octavo.verify(jax.value_and_grad(lambda v: jnp.sum(low.apply(v, X) ** 2)), variables)
    assert done.share("native") == 1.0
    paths = {s.path for s in octavo.frameworks.linen.linen_sites(model, octavo.QtProvider([INT8]), X)}
    assert paths == (
        {"layers/Dense_0", "layers/Dense_1"}
        if scanned
        else {f"{'Checkpoint' * remat}Layer_{i}/Dense_{j}" for i in range(3) for j in range(2)}
    )


class TestStaticRange:
    rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)

    def test_calibrate_freeze_and_serve(self):
        low = octavo.quantize_model(FLOAT, octavo.QtProvider([self.rule]))
        variables = low.init(KEY, X)
        assert set(variables) == {"params", "quant_stats"}
        for seed in range(3):
            x = normal(seed, 5, 16)
            _, update = low.apply(variables, x, mutable="quant_stats")
            variables = {**variables, **update}
        stat = variables["quant_stats"]["Dense_0"]["dot_general0_lhs"]
        assert int(stat["count"]) == 3
        frozen = low.apply(variables, X)
        assert np.isfinite(frozen).all()
        again = low.apply(variables, X)
        same(frozen, again)

    def test_never_calibrated_is_an_error(self):
        low = octavo.quantize_model(FLOAT, self.rule)
        with pytest.raises(ValueError, match="'Dense_0' has a static scale that was never calibrated"):
            low.apply(low.init(KEY, X), X)
        with pytest.raises(ValueError, match="the state has no quant_stats/Dense_0/dot_general0_lhs"):
            low.apply(VARIABLES, X)

    def test_scanned_layers_have_statistics_of_their_own(self):
        low = octavo.quantize_model(Stack(True, False), self.rule)
        variables = low.init(KEY, X)
        stat = variables["quant_stats"]["layers"]["Dense_0"]["dot_general0_lhs"]
        assert stat["sum_of_absmax"].shape == (3, 1, 1)
        _, update = low.apply(variables, X, mutable="quant_stats")
        np.testing.assert_array_equal(update["quant_stats"]["layers"]["Dense_1"]["dot_general0_lhs"]["count"], [1] * 3)


class TestParameters:
    @pytest.mark.parametrize("scanned", [False, True])
    def test_post_training_quantization_serves_what_qat_trained(self, scanned):
        """C1 for scanned layers."""
        rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8")
        model = Stack(scanned, False)
        params = model.init(KEY, X)["params"]
        ptq = octavo.quantize_model(model, octavo.PtqProvider([rule]))
        abstract = jax.eval_shape(ptq.init, KEY, X)["params"]
        low = octavo.quantize_params(params, abstract)
        kernel = low["layers"]["Dense_0"]["kernel"] if scanned else low["Layer_0"]["Dense_0"]["kernel"]
        assert isinstance(kernel, octavo.WithAux)
        assert kernel.array.scale.shape == ((3, 1, 16) if scanned else (1, 16))
        qat = octavo.quantize_model(model, octavo.QtProvider([rule]))
        same(jax.jit(ptq.apply)({"params": low}, X), jax.jit(qat.apply)({"params": params}, X))

    def test_init_makes_quantized_parameters(self):
        ptq = octavo.quantize_model(FLOAT, octavo.PtqProvider([octavo.QuantizationRule(weight_qtype="int4")]))
        params = ptq.init(KEY, X)["params"]
        wanted = octavo.quantize_params(VARIABLES["params"], jax.eval_shape(ptq.init, KEY, X)["params"])
        same(params, wanted)
        assert params["Dense_0"]["kernel"].array.qtype.name == "int4"

    def test_tied_embeddings_eager_and_jitted_alike(self):
        """B10."""

        class Tied(nn.Module):
            @nn.compact
            def __call__(self, ids):
                embed = nn.Embed(32, 16)
                return embed.attend(nn.Dense(16)(embed(ids)))

        ids = jnp.asarray([[1, 2, 3]])
        ptq = octavo.quantize_model(Tied(), octavo.PtqProvider([octavo.QuantizationRule(weight_qtype="int8")]))
        eager, jitted = ptq.init(KEY, ids), jax.jit(ptq.init)(KEY, ids)
        assert jax.tree.structure(eager) == jax.tree.structure(jitted)
        table = eager["params"]["Embed_0"]["embedding"].array
        assert table.shape == (32, 16)
        assert table.scale.shape == (32, 1)
        assert ptq.apply(eager, ids).shape == (1, 3, 32)

    def test_sharding_names_go_to_codes_and_scales(self):
        class Sharded(nn.Module):
            @nn.compact
            def __call__(self, x):
                init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))
                return nn.Dense(8, kernel_init=init)(x)

        ptq = octavo.quantize_model(Sharded(), octavo.PtqProvider([octavo.QuantizationRule(weight_qtype="int8")]))
        kernel = ptq.init(KEY, X)["params"]["Dense_0"]["kernel"].array
        assert kernel.qvalue.names == ("data", "model")
        assert kernel.scale.names == (None, "model")
        params = Sharded().init(KEY, X)["params"]
        converted = octavo.quantize_params(params, jax.eval_shape(ptq.init, KEY, X)["params"])
        assert converted["Dense_0"]["kernel"].array.scale.shape == (1, 8)  # without boxes, as in Qwix
        assert ptq.apply({"params": converted}, X).shape == (4, 8)


@pytest.mark.slow
def test_stochastic_rounding_takes_a_stream():
    rule = INT8.replace(bwd_stochastic_rounding="uniform")
    low = octavo.quantize_model(FLOAT, rule)
    grad = lambda seed: jax.grad(  # noqa: E731
        lambda v: jnp.sum(low.apply(v, X, rngs={"stochastic_rounding": jax.random.key(seed)}) ** 2)
    )(VARIABLES)["params"]["Dense_0"]["kernel"]
    same(grad(0), grad(0))
    assert np.any(grad(0) != grad(1))
    low.apply(VARIABLES, X)
    with pytest.raises(ValueError, match="rng stream 'stochastic_rounding'"):
        jax.grad(lambda v: jnp.sum(low.apply(v, X)))(VARIABLES)


def test_dropout_and_batch_norm_are_as_in_the_float_model():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
            return nn.Dropout(0.5, deterministic=not train)(x)

    skip = octavo.QuantizationRule(module_path="Dense_0", skip=True)
    model, low = Model(), octavo.quantize_model(Model(), [skip, INT8])
    variables = model.init(KEY, X, False)
    args = (variables, X, True)
    rngs = {"dropout": jax.random.key(3)}
    same(low.apply(*args, rngs=rngs, mutable=["batch_stats"]), model.apply(*args, rngs=rngs, mutable=["batch_stats"]))


def test_attention_has_the_paths_of_its_modules():
    model = nn.MultiHeadDotProductAttention(2)
    plan = octavo.plan(model, INT8, X[None])
    assert [(row.path, row.op) for row in plan.rows] == [
        ("query", "dot_general"),
        ("key", "dot_general"),
        ("value", "dot_general"),
        ("", "einsum"),
        ("", "einsum"),
        ("out", "dot_general"),
    ]
    assert plan.share == 1.0


def test_code_that_quantizes_itself_asks_for_its_rule():
    class Kernel(nn.Module):
        @nn.compact
        def __call__(self, x):
            asked.append((octavo.get_current_rule("gmm"), octavo.get_current_rule("einsum")))
            return nn.Dense(16)(x)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Kernel(name="body")(x) @ x.T

    asked = []
    rule = INT8.replace(module_path="body", op_names=("gmm",))
    low = octavo.quantize_model(
        Outer(), [rule, INT8.replace(module_path="body/.*"), INT8.replace(op_names=("conv_general_dilated",))]
    )
    variables = low.init(KEY, X)
    asked.clear()
    low.apply(variables, X)
    assert asked == [(rule, None)]
    assert octavo.get_current_rule("gmm") is None
    # Modules may have names that JAX uses for loops.
    sites = octavo.frameworks.linen.linen_sites(Outer(), octavo.QtProvider([INT8]), X)
    assert [s.path for s in sites] == ["body/Dense_0", ""]
