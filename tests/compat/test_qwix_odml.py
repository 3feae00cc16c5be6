"""Fake quantization for LiteRT against Qwix: outputs and gradients, and the composites of the converted program."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from octavo.compat import qwix as ours
from tests.arrays import normal
from tests.cases import slow_except

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings(
        "ignore:.*VariableState:DeprecationWarning",  # Qwix asks Flax for old names
        "ignore:'.value' access:DeprecationWarning",
    ),
]

KEY = jax.random.key(0)
X = normal(1, 2, 4, 4, 3)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3), name="conv")(x)).reshape(x.shape[0], -1)
        x = nn.gelu(nn.Dense(8, name="up")(x))
        return nn.DenseGeneral((2, 3), name="heads")(x)


MODES = {
    "weights": {"weight_qtype": "int8"},
    "asymmetric": {"weight_qtype": "int8", "weight_calibration_method": "minmax"},
    "dynamic": {"weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": False},
    "one_module": {"module_path": "up", "weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": False},
}


@pytest.fixture(scope="module")
def variables():
    return jax.jit(Model().init)(KEY, X)


@pytest.mark.parametrize("per_tensor", slow_except([False], [False, True]))
@pytest.mark.parametrize("mode", slow_except(["dynamic"], MODES))
def test_training_is_that_of_qwix(mode, per_tensor, variables):
    def run(lib):
        provider = lib.OdmlQatProvider([lib.QuantizationRule(**MODES[mode])], disable_per_channel_weights=per_tensor)
        model = lib.quantize_model(Model(), provider)
        return jax.jit(jax.value_and_grad(lambda v: jnp.sum(jnp.sin(model.apply(v, X)))))(variables)

    (got, got_grad), (wanted, wanted_grad) = run(ours), run(qwix)
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)
    for a, b in zip(jax.tree.leaves(got_grad), jax.tree.leaves(wanted_grad), strict=True):
        assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b) + 1e-6


def composites(lib, mode, variables, **options):
    """The composites of a converted model: the attributes of each, and the shape of its operand."""
    rules = [lib.QuantizationRule(**MODES[mode])]
    model = lib.quantize_model(Model(), lib.OdmlConversionProvider(rules, variables["params"], {}, **options))
    text = jax.jit(model.apply).lower(variables, X).as_text()
    pattern = r'composite "(.*?)" .*?composite_attributes = \{(.*?)\}, decomposition.*?-> (tensor<[^>]*>)'
    return [match.groups() for match in re.finditer(pattern, text)], model.apply(variables, X)


NUMBER = re.compile(r"-?\d\.\d+(?:[eE][-+]?\d+)?")


@pytest.mark.slow
@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_converted_program_is_that_of_qwix(mode, per_tensor, variables):
    got, out = composites(ours, mode, variables, disable_per_channel_weights=per_tensor)
    wanted, wanted_out = composites(qwix, mode, variables, disable_per_channel_weights=per_tensor)
    assert len(got) == len(wanted) == {"weights": 3, "asymmetric": 3, "dynamic": 6, "one_module": 2}[mode]
    for mine, theirs in zip(got, wanted, strict=True):
        assert [NUMBER.sub("#", part) for part in mine] == [NUMBER.sub("#", part) for part in theirs]
        numbers = [[float(n) for n in NUMBER.findall(attributes)] for _, attributes, _ in (mine, theirs)]
        np.testing.assert_allclose(*numbers, rtol=1e-5)
    np.testing.assert_allclose(out, wanted_out, atol=0.02)


class Sum(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.einsum("bk,nk->bn", x, self.param("w", nn.initializers.normal(), (5, 12)))


def test_a_transposed_weight_has_the_scales_of_its_rows():
    x = X.reshape(8, 12)
    variables = jax.jit(Sum().init)(KEY, x)
    rules = [ours.QuantizationRule(weight_qtype="int8")]
    model = ours.quantize_model(Sum(), ours.OdmlConversionProvider(rules, variables["params"], {}))
    text = jax.jit(model.apply).lower(variables, x).as_text()
    (first,) = re.findall(r"scale = dense<\[(.*?)\]> : tensor<5xf32>", text)
    wanted = jnp.max(jnp.abs(variables["params"]["w"]), axis=1) / 127.5
    np.testing.assert_allclose([float(n) for n in first.split(",")], wanted, rtol=1e-5)


class Tensors(nn.Module):
    """One operation of each kind: fused, with a scale of its own, of its input, of its output, in float."""

    @nn.compact
    def __call__(self, ids, x):
        e = nn.Embed(10, 8, name="emb")(ids)
        x = nn.LayerNorm()(nn.Dense(8, name="up")(x) + e)
        y = nn.silu(x) * nn.sigmoid(x)
        x = nn.softmax(nn.gelu(x)) + jnp.tanh(y)
        x = nn.relu(nn.Dense(8)(x)) + nn.relu6(x) + nn.leaky_relu(x)
        x = jnp.clip(jnp.concatenate([x, y], -1), -1, 1)
        x = jnp.mean(x, -1, keepdims=True) + jnp.sum(x, -1, keepdims=True)
        x = jnp.take(jnp.pad(x, ((0, 0), (0, 1))), jnp.array([0, 1]), axis=0)[:, :1]
        x = jnp.sin(x / 2.0 - 3.0) * self.param("factor", nn.initializers.ones, (1,))
        x = jnp.maximum(-x, 0) + jnp.exp(x)
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(3, name="head")(x))
        return nn.Dropout(0.5, deterministic=True)(x)


STATIC = {"weight_qtype": "int8", "act_qtype": "int8", "act_batch_axes": (0,)}
IDS, ROWS = jnp.array([1, 2]), normal(2, 2, 8)


def calibrated(lib, **options):
    """A model with static ranges after two steps: its variables, its output, and the gradient of its parameters."""
    model = lib.quantize_model(Tensors(), lib.OdmlQatProvider([lib.QuantizationRule(**STATIC)], **options))
    variables = jax.jit(model.init)(KEY, IDS, ROWS)

    @jax.jit
    def step(variables, x):
        def loss(params):
            out, new = model.apply({**variables, "params": params}, IDS, x, mutable="quant_stats")
            return jnp.sum(jnp.sin(out)), (out, new)

        return jax.grad(loss, has_aux=True)(variables["params"])

    for factor in (1.0, 1.5):
        grad, (out, new) = step(variables, factor * ROWS)
        variables = {**variables, **new}
    return variables, out, grad


def lowered(lib, variables, **options):
    rules = [lib.QuantizationRule(**STATIC)]
    provider = lib.OdmlConversionProvider(rules, variables["params"], variables["quant_stats"], **options)
    model = lib.quantize_model(Tensors(), provider)
    found = {name: variables[name] for name in ("params", "batch_stats")}
    return jax.jit(model.apply).lower(found, IDS, ROWS).as_text(), model.apply(found, IDS, ROWS)


COMPOSITE = re.compile(r'composite "quant.fake_quant" .*?composite_attributes = \{(.*?)\}, decomp.*?-> (tensor<[^>]*>)')


@pytest.mark.slow
def test_static_ranges_and_their_conversion_are_those_of_qwix():
    options = {"fixed_range_for_inputs": (-4.0, 4.0)}
    (got, out, grad), (wanted, wanted_out, wanted_grad) = calibrated(ours, **options), calibrated(qwix, **options)
    assert jax.tree.structure(got["quant_stats"]) == jax.tree.structure(wanted["quant_stats"])
    for a, b in zip(*(jax.tree.leaves(v["quant_stats"]) for v in (got, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02)  # two codes
    np.testing.assert_allclose(out, wanted_out, atol=0.03)
    for a, b in zip(jax.tree.leaves(grad), jax.tree.leaves(wanted_grad), strict=True):
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b) + 1e-3
    # Converted from the same statistics, the programs are the same.
    (text, out), (wanted_text, wanted_out) = lowered(ours, wanted, **options), lowered(qwix, wanted, **options)
    mine, theirs = COMPOSITE.findall(text), COMPOSITE.findall(wanted_text)
    assert len(mine) == len(theirs) > 30
    for pair in zip(mine, theirs, strict=True):
        assert len({tuple(NUMBER.sub("#", part) for part in one) for one in pair}) == 1, pair
        np.testing.assert_allclose(*([float(n) for n in NUMBER.findall(a)] for a, _ in pair), rtol=1e-5)
    np.testing.assert_allclose(out, wanted_out, atol=0.03)


class Small(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(10, 4, name="emb")(ids)
        return nn.softmax(nn.relu(nn.Dense(3, name="up")(x)))


def small(rule, ids=IDS):
    model = ours.quantize_model(Small(), ours.OdmlQatProvider([ours.QuantizationRule(**rule)]))
    variables = model.init(KEY, ids)
    return variables, model.apply(variables, ids, mutable="quant_stats")[1]


def convert_small(rule, params, stats):
    model = ours.quantize_model(Small(), ours.OdmlConversionProvider([ours.QuantizationRule(**rule)], params, stats))
    return jax.jit(model.apply).lower({"params": params}, IDS).as_text()


def test_a_matmul_its_bias_and_a_relu_are_one_operation():
    variables, new = small(STATIC)
    stats = new["quant_stats"]
    # The embedding is a weight; a dot reads what is looked up in it, and the ranges of a relu and a softmax follow.
    assert sorted(stats) == ["final_output0", "softmax0"]
    np.testing.assert_allclose(stats["final_output0"]["sum_of_max"], [[255 / 256]])
    text = convert_small(STATIC, variables["params"], stats)
    assert [shape for _, shape in COMPOSITE.findall(text)] == [
        "tensor<10x4xf32>", "tensor<4x3xf32>", "tensor<2x3xf32>", "tensor<2x3xf32>",
    ]  # fmt: skip


def test_an_embedding_is_quantized_with_weights_only():
    rule = {"weight_qtype": "int8"}
    params = small(rule)[0]["params"]
    (first, second) = COMPOSITE.findall(convert_small(rule, params, {}))
    assert (first[1], second[1]) == ("tensor<10x4xf32>", "tensor<4x3xf32>")
    assert "zero_point" in first[0]
    assert "quantization_dimension" not in first[0]
    wanted = np.ptp(np.asarray(params["emb"]["embedding"])) / 255
    np.testing.assert_allclose(float(NUMBER.findall(first[0])[0]), wanted, rtol=1e-5)


def test_fixed_ranges_of_inputs_and_outputs():
    class Sums(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("w", nn.initializers.ones, (3, 1))

    rules = [ours.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    ranges = {"fixed_range_for_inputs": (-1.0, 1.0), "fixed_range_for_outputs": (-0.25, 0.25)}
    model = ours.quantize_model(Sums(), ours.OdmlQatProvider(rules, **ranges))
    x = jnp.asarray([[0.1, 0.05, -3.0], [0.1, 0.05, -0.3]])
    variables = jax.jit(model.init)(KEY, x)
    variables |= model.apply(variables, x, mutable="quant_stats")[1]
    out, grad = jax.value_and_grad(lambda x: model.apply(variables, x)[:, 0].sum())(x)
    np.testing.assert_allclose(out, -0.25 - 0.15, atol=0.01)
    # The first sum is outside of its range.
    assert (np.asarray(grad) != 0).tolist() == [[False] * 3, [True] * 3]


def test_statistics_that_are_missing_raise():
    variables, new = small(STATIC)
    with pytest.raises(ValueError, match=r"no range of softmax0 at ''.*mutable='quant_stats'"):
        convert_small(STATIC, variables["params"], {})
    with pytest.raises(ValueError, match="no range of softmax0"):  # of an initialized model that never ran
        convert_small(STATIC, variables["params"], variables["quant_stats"])
    assert convert_small(STATIC, variables["params"], new["quant_stats"])


def test_what_is_not_offered_raises(variables):
    rules = [ours.QuantizationRule(weight_qtype="int8")]
    model = ours.quantize_model(Model(), ours.OdmlConversionProvider(rules, {}, {}))
    with pytest.raises(ValueError, match="is not among params"):
        model.apply(variables, X)
    int4 = [ours.QuantizationRule(weight_qtype="int4")]
    model = ours.quantize_model(Model(), ours.OdmlConversionProvider(int4, variables["params"], {}))
    with pytest.raises(ValueError, match="LiteRT is int8"):
        model.apply(variables, X)
