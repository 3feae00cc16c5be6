"""The programs of the Qwix and MaxText pages run as they are written, with the import changed."""

import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo as qwix

pytestmark = pytest.mark.standard_promotion

MODEL_INPUT = jnp.ones((4, 16))


class SomeLinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(32)(x)))


def test_quantized_training_and_quantization_aware_training():
    fp_model = SomeLinenModel()

    qt_rules = [
        qwix.QtRule(
            weight_qtype="int8",
            act_qtype="int8",
            bwd_qtype="int8",
        )
    ]
    qt_model = qwix.quantize_model(fp_model, qwix.QtProvider(qt_rules))

    qat_rules = [
        qwix.QuantizationRule(
            weight_qtype="int8",
            act_qtype="int8",
        )
    ]
    qat_model = qwix.quantize_model(fp_model, qwix.QtProvider(qat_rules))

    variables = fp_model.init(jax.random.key(0), MODEL_INPUT)
    for model, backward in ((qt_model, 1.0), (qat_model, 0.0)):
        loss = lambda v, model=model: jnp.sum(model.apply(v, MODEL_INPUT) ** 2)  # noqa: E731
        seen = qwix.verify(jax.value_and_grad(loss), variables)
        assert (seen.forward, seen.backward) == (1.0, backward)
    # "low-precision integer operations in the forward pass ... the same numerics": the two modes differ backward only.
    np.testing.assert_array_equal(qt_model.apply(variables, MODEL_INPUT), qat_model.apply(variables, MODEL_INPUT))


def test_static_range_statistics_print_as_on_the_page():
    model, model_input = SomeLinenModel(), MODEL_INPUT
    rules = [
        qwix.QtRule(
            weight_qtype="int8",
            act_qtype="int8",
            act_static_scale=True,
        )
    ]
    qt_model = qwix.quantize_model(model, qwix.QtProvider(rules))
    shown = qt_model.init(jax.random.key(0), model_input)["quant_stats"]
    assert repr(shown) == (
        "{'Dense_0': {'dot_general0_lhs': {'count': Array(0, dtype=int32), "
        "'sum_of_absmax': Array([[0.]], dtype=float32)}}, "
        "'Dense_1': {'dot_general0_lhs': {'count': Array(0, dtype=int32), "
        "'sum_of_absmax': Array([[0.]], dtype=float32)}}}"
    )
    # "by only running the forward pass of the QT model, where quantization statistics get updated"
    variables = qt_model.init(jax.random.key(0), model_input)
    _, stats = qt_model.apply(variables, model_input, mutable="quant_stats")
    assert stats["quant_stats"]["Dense_0"]["dot_general0_lhs"]["count"] == 1


class Decoder(nn.Module):
    """Paths as MaxText has them: decoder/layers_0/..."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = x + nn.Dense(16, name=f"layers_{i}")(x)
        return nn.Dense(8, name="logits_dense")(x)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Decoder(name="decoder")(x)


def test_the_maxtext_rule_takes_the_layers_and_leaves_the_logits():
    config = types.SimpleNamespace(quantization_local_shard_count=2)
    rule = [
        qwix.QtRule(
            module_path="decoder/.*layers.*",
            weight_qtype=jnp.int8,
            act_qtype=jnp.int8,
            bwd_qtype=jnp.int8,
            bwd_weight_grad_tile_size=1 / config.quantization_local_shard_count,
            op_names=("dot_general",),
        )
    ]
    model = Transformer()
    low = qwix.quantize_model(model, qwix.QtProvider(rule))
    variables = low.init(jax.random.key(0), MODEL_INPUT)
    assert np.isfinite(low.apply(variables, MODEL_INPUT)).all()
    plan = qwix.plan(model, rule, MODEL_INPUT)
    assert [(row.path, row.reason) for row in plan.rows] == [
        ("decoder/layers_0", None),
        ("decoder/layers_1", None),
        ("decoder/logits_dense", "no rule matches"),
    ]


class NvidaFp8Provider(qwix.QtProvider):
    """Wraps nn.Fp8DirectDotGeneralOp with Qwix's provider interface."""

    def dot_general(self, *args, **kwargs):
        rule, op_id = self._get_current_rule_and_op_id("dot_general")
        if rule is None:
            return jax.lax.dot_general(*args, **kwargs)
        return nn.Fp8DirectDotGeneralOp(name=op_id)(*args, **kwargs)

    def einsum(self, *args, **kwargs):
        rule, op_id = self._get_current_rule_and_op_id("einsum")
        if rule is None:
            return jnp.einsum(*args, **kwargs)
        return nn.Fp8Einsum(name=op_id)(*args, **kwargs)


class NANOOFp8Provider(qwix.QtProvider):
    def dot_general(self, *args, **kwargs):
        rule, op_id = self._get_current_rule_and_op_id("dot_general")
        if rule is None:
            return jax.lax.dot_general(*args, **kwargs)
        return nn.NANOOFp8DotGeneralOp(name=op_id)(*args, **kwargs)


@pytest.mark.parametrize("provider", [NvidaFp8Provider, NANOOFp8Provider])
def test_the_providers_of_quantizations_py(provider):
    rule = qwix.QtRule(
        module_path="decoder/.*layers.*",
        weight_qtype="float8_e4m3fn",
        act_qtype="float8_e4m3fn",
        bwd_qtype="float8_e4m3fn",
    )
    low = qwix.quantize_model(Transformer(), provider([rule]))
    variables = low.init(jax.random.key(0), MODEL_INPUT)
    history = variables["_overwrite_with_gradient"]["decoder"]["layers_0"]["dot_general0"]
    assert history["input_amax_history"].shape == (1024,)
    assert "logits_dense" not in variables["_overwrite_with_gradient"]["decoder"]
    loss = lambda v: jnp.sum(low.apply(v, MODEL_INPUT) ** 2)  # noqa: E731
    grads = jax.jit(jax.grad(loss))(variables)
    new = grads["_overwrite_with_gradient"]["decoder"]["layers_0"]["dot_general0"]
    assert float(jnp.max(new["input_amax_history"])) == 1.0  # the largest input, remembered for the next step
