"""Programs as Qwix's pages have them, one for each page, with nothing changed but the import."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import octavo.compat.qwix as qwix
from octavo.compat.qwix.contrib import gptq

pytestmark = pytest.mark.standard_promotion

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (16, 12))


class MLP(nn.Module):
    features: int = 24

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.features, name="dense1")(x)
        return nn.Dense(6, name="dense2")(nn.relu(x))


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.linear1 = nnx.Linear(12, 24, rngs=rngs)
        self.linear2 = nnx.Linear(24, 6, rngs=rngs)

    def __call__(self, x):
        return self.linear2(nnx.relu(self.linear1(x)))


def near(got, wanted, limit=0.05):
    error = jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)
    assert 0 < error < limit, error


def test_get_started():
    rules = [qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)]
    model = MLP()
    ptq_model = qwix.quantize_model(model, qwix.PtqProvider(rules))
    fp_params = model.init(KEY, X)["params"]
    abs_params = jax.eval_shape(ptq_model.init, KEY, X)["params"]
    ptq_params = qwix.quantize_params(fp_params, abs_params)
    assert ptq_params["dense1"]["kernel"].array.qvalue.dtype == jnp.int8
    near(ptq_model.apply({"params": ptq_params}, X), model.apply({"params": fp_params}, X))


def test_basics():
    w = jax.random.normal(KEY, (12, 8))
    q = qwix.quantize(w, jnp.int8, channelwise_axes=[1], tiled_axes={0: 4}, calibration_method="absmax")
    assert (q.qvalue.shape, q.scale.shape, q.zero_point) == ((12, 8), (3, 8), None)
    near(qwix.dequantize(q), w, 0.02)
    x = qwix.quantize(X, jnp.int8, channelwise_axes=[0], tiled_axes={1: 4})
    wanted = qwix.dequantize(x) @ qwix.dequantize(q)
    for got in (
        qwix.dot_general(x, q, (((1,), (0,)), ((), ()))),
        qwix.dot(x, q),
        qwix.einsum("bk,kn->bn", x, q),
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    asymmetric = qwix.quantize(w, jnp.int4, calibration_method="minmax")
    assert asymmetric.zero_point.shape == (1, 1)


def test_training():
    rules = [
        qwix.QtRule(module_path="dense1", weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"),
        qwix.QtRule(module_path="dense2", weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn"),
    ]
    model = qwix.quantize_model(MLP(), qwix.QtProvider(rules))
    params, optimizer = model.init(KEY, X)["params"], optax.adam(1e-2)
    wanted = jnp.sin(X[:, :6])

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply({"params": p}, X) - wanted) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for _ in range(20):
        params, state, loss = step(params, state)
        losses.append(loss)
    assert losses[-1] < 0.5 * losses[0]


def test_nnx_ptq():
    model = NnxMLP(nnx.Rngs(0))
    rules = [qwix.QuantizationRule(module_path="linear.*", weight_qtype="int8", act_qtype="int8")]
    ptq_model = qwix.quantize_model(model, qwix.PtqProvider(rules), X)
    near(ptq_model(X), model(X))
    # A checkpoint is quantized without the float model.
    abs_model = nnx.eval_shape(lambda: qwix.quantize_model(NnxMLP(nnx.Rngs(0)), qwix.PtqProvider(rules), X))
    params = qwix.quantize_params(nnx.to_pure_dict(nnx.state(model, nnx.Param)), abs_model)
    nnx.update(ptq_model, params)
    near(ptq_model(X), model(X))


def test_lora():
    provider = qwix.LoraProvider(module_path="dense.*", rank=2, alpha=4.0, weight_qtype="nf4", tile_size=6)
    model = qwix.apply_lora_to_model(MLP(), provider)
    variables = model.init(KEY, X)
    layer = variables["params"]["dense1"]
    assert (layer["kernel_lora_a"].shape, layer["kernel_lora_b"].shape) == ((12, 2), (2, 24))
    adapted = qwix.apply_lora_to_model(NnxMLP(nnx.Rngs(0)), qwix.LoraProvider(rank=2, alpha=4.0), X, rngs=nnx.Rngs(1))
    grads = nnx.grad(lambda m: jnp.sum(m(X)), argnums=nnx.DiffState(0, nnx.LoRAParam))(adapted)
    assert set(nnx.to_pure_dict(grads)["linear1"]) == {"kernel_lora_a", "kernel_lora_b"}


def test_odml():
    rules = [qwix.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=False)]
    model = qwix.quantize_model(MLP(), qwix.OdmlQatProvider(rules))
    params = model.init(KEY, X)["params"]
    near(model.apply({"params": params}, X), MLP().apply({"params": params}, X))
    converted = qwix.quantize_model(MLP(), qwix.OdmlConversionProvider(rules, params, {}))
    text = jax.jit(converted.apply).lower({"params": params}, X).as_text()
    assert text.count('stablehlo.composite "quant.fake_quant"') == 4


def test_odml_static_ranges():
    rules = [qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)]
    qat_model = qwix.quantize_model(MLP(), qwix.OdmlQatProvider(rules))
    variables = qat_model.init(KEY, X)
    assert set(variables) == {"params", "quant_stats"}
    for batch in (X[:8], X[8:]):  # calibration, or the steps of training
        _, new = qat_model.apply(variables, batch, mutable="quant_stats")
        variables = variables | new
    params, quant_stats = variables["params"], variables["quant_stats"]
    # Values of one batch that are beyond the mean of both ranges are clipped.
    near(qat_model.apply(variables, X), MLP().apply({"params": params}, X), 0.1)
    conversion_model = qwix.quantize_model(MLP(), qwix.OdmlConversionProvider(rules, params, quant_stats))
    text = jax.jit(conversion_model.apply).lower({"params": params}, X).as_text()
    # Two weights, the input, the result of the relu and the output.
    assert text.count('stablehlo.composite "quant.fake_quant"') == 5


@pytest.mark.slow
def test_gptq():
    rules = [gptq.GptqRule(module_path="dense.*", weight_qtype="int4", tile_size=12)]
    model = MLP()
    variables = model.init(KEY, X)
    cal_model = qwix.quantize_model(model, gptq.GptqCalibrationProvider(rules))
    for batch in (X[:8], X[8:]):
        _, new_vars = cal_model.apply(variables, batch, mutable="quant_stats")
        variables.update(new_vars)
    ptq_model = qwix.quantize_model(model, qwix.PtqProvider(rules))
    abs_params = jax.eval_shape(ptq_model.init, KEY, X)["params"]
    wanted = model.apply({"params": variables["params"]}, X)
    low = gptq.quantize_params(variables["params"], abs_params, variables["quant_stats"])
    plain = qwix.quantize_params(variables["params"], abs_params)
    errors = [jnp.linalg.norm(ptq_model.apply({"params": p}, X) - wanted) for p in (low, plain)]
    assert errors[0] < errors[1]
