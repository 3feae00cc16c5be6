"""Fake quantization for LiteRT against Qwix: outputs and gradients, and the composites of the converted program."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from octavo.compat import qwix as ours
from tests.cases import slow_except

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings(
        "ignore:.*VariableState:DeprecationWarning",  # Qwix asks Flax for old names
        "ignore:'.value' access:DeprecationWarning",
    ),
]

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 4, 4, 3))


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
    return Model().init(KEY, X)


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
    variables = Sum().init(KEY, x)
    rules = [ours.QuantizationRule(weight_qtype="int8")]
    model = ours.quantize_model(Sum(), ours.OdmlConversionProvider(rules, variables["params"], {}))
    text = jax.jit(model.apply).lower(variables, x).as_text()
    (first,) = re.findall(r"scale = dense<\[(.*?)\]> : tensor<5xf32>", text)
    wanted = jnp.max(jnp.abs(variables["params"]["w"]), axis=1) / 127.5
    np.testing.assert_allclose([float(n) for n in first.split(",")], wanted, rtol=1e-5)


def test_what_is_not_offered_raises(variables):
    static = ours.QuantizationRule(weight_qtype="int8", act_qtype="int8")
    with pytest.raises(NotImplementedError, match="act_static_scale=False"):
        ours.OdmlQatProvider([static])
    rules = [ours.QuantizationRule(weight_qtype="int8")]
    with pytest.raises(NotImplementedError, match="fixed_range_for_inputs"):
        ours.OdmlQatProvider(rules, fixed_range_for_inputs=(0, 1))
    with pytest.raises(NotImplementedError, match="quant_stats"):
        ours.OdmlConversionProvider(rules, variables["params"], {"up": {"count": jnp.ones(())}})
    model = ours.quantize_model(Model(), ours.OdmlConversionProvider(rules, {}, {}))
    with pytest.raises(ValueError, match="is not among params"):
        model.apply(variables, X)
    int4 = [ours.QuantizationRule(weight_qtype="int4")]
    model = ours.quantize_model(Model(), ours.OdmlConversionProvider(int4, variables["params"], {}))
    with pytest.raises(ValueError, match="LiteRT is int8"):
        model.apply(variables, X)
