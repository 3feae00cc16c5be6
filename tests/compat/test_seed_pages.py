"""The programs of the Qwix and MaxText pages run as they are written, with the import changed."""

import functools
import importlib
import types
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import octavo as qwix
from octavo.compat import qwix as compat
from tests.arrays import normal

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


# The table of docs/from-qwix.md: each row is a check.

INT8 = {"weight_qtype": "int8", "act_qtype": "int8"}
KEY = jax.random.key(0)
X = normal(1, *MODEL_INPUT.shape)


@functools.cache
def modes():
    """Parameters, and by mode the output, the gradients and the types of the matmuls of the model of the page."""
    variables, found = SomeLinenModel().init(KEY, X), {}
    rules = {"float": None, "qat": qwix.QuantizationRule(**INT8), "qt": qwix.QtRule(**INT8, bwd_qtype="int8")}
    for name, rule in rules.items():
        model = SomeLinenModel() if rule is None else qwix.quantize_model(SomeLinenModel(), qwix.QtProvider([rule]))
        loss = lambda v, model=model: jnp.sum(model.apply(v, X) ** 2)  # noqa: E731
        rows = () if rule is None else qwix.plan(SomeLinenModel(), rule, X).rows
        found[name] = (model.apply(variables, X), jax.jit(jax.grad(loss))(variables), rows)
    return variables, found


def static_model():
    return qwix.quantize_model(SomeLinenModel(), qwix.QtProvider([qwix.QtRule(**INT8, act_static_scale=True)]))


def check_rules(name, **fields):
    rule = getattr(qwix, name)(**INT8, **fields)
    assert isinstance(rule, qwix.QuantizationRule)
    assert (rule.weight_qtype, rule.act_qtype) == (jnp.int8, "int8")
    if not fields:
        with pytest.raises(TypeError, match="bwd_qtype"):
            getattr(qwix, name)(**INT8, bwd_qtype="int8")


def check_quantize_model():
    with pytest.raises(ValueError, match="without inputs"):
        qwix.quantize_model(SomeLinenModel(), qwix.QtProvider([qwix.QtRule(**INT8)]), X)


def check_types():
    (first, _) = modes()[1]["qt"][2]
    assert (first.fwd, first.scales) == ("int8 x int8", "(4,1) (1,32)")


def check_gradients(mode, kind):
    assert [(row.dlhs, row.drhs) for row in modes()[1][mode][2]] == [(kind, kind)] * 2


def check_qat():
    variables, found = modes()
    kernel = variables["params"]["Dense_0"]["kernel"]
    fake = qwix.fake_quant(kernel, qwix.Quantizer("int8", channelwise_axes=(1,)))
    h = nn.relu(normal(10, 4, 32))
    low = qwix.quantize_model(
        nn.Dense(8, use_bias=False), qwix.QtProvider([qwix.QuantizationRule(weight_qtype="int8")])
    )
    np.testing.assert_allclose(low.apply({"params": {"kernel": kernel}}, h), h @ fake, rtol=1e-5, atol=1e-5)
    # Straight through: the gradient of a float matmul of the same cotangent.
    out, grads, _ = found["qat"]
    np.testing.assert_allclose(grads["params"]["Dense_0"]["bias"], jnp.sum(2 * out, axis=0), rtol=1e-5)


def check_qt():
    _, found = modes()
    np.testing.assert_array_equal(found["qt"][0], found["qat"][0])
    assert not np.array_equal(*(found[mode][1]["params"]["Dense_1"]["kernel"] for mode in ("qt", "qat")))


def check_interchangeable():
    variables, found = modes()
    trees = {jax.tree.structure(grads) for _, grads, _ in found.values()}
    assert trees == {jax.tree.structure(variables)}
    assert np.linalg.norm(found["qt"][0] - found["float"][0]) < 0.02 * np.linalg.norm(found["float"][0])


def calibrated():
    model, stats = static_model(), {}
    variables = model.init(KEY, X)
    for scale in (1.0, 3.0):
        _, stats = model.apply({**variables, **stats}, scale * X, mutable="quant_stats")
    return model, variables["params"], stats["quant_stats"]


def check_statistics():
    _, _, stats = calibrated()
    stat = stats["Dense_1"]["dot_general0_lhs"]  # the first to run
    assert int(stat["count"]) == 2
    np.testing.assert_allclose(stat["sum_of_absmax"], [[4 * np.max(np.abs(X))]], rtol=1e-6)


def check_nnx():
    rule = qwix.QtRule(**INT8, act_static_scale=True)
    model = qwix.quantize_model(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), qwix.QtProvider([rule]), X)
    model(X)
    assert int(nnx.state(model, qwix.QuantStat)["dot_general0_lhs"].get_value()["count"]) == 1


def check_init():
    model = static_model()
    out, variables = model.init_with_output(KEY, X)
    assert list(variables) == ["params", "quant_stats"]
    np.testing.assert_array_equal(out, model.apply(variables, X, mutable="quant_stats")[0])


def check_calibration():
    model, params, stats = calibrated()
    served = qwix.quantize_model(
        SomeLinenModel(), qwix.PtqProvider([qwix.QuantizationRule(**INT8, act_static_scale=True)])
    )
    low = qwix.quantize_params(params, jax.eval_shape(served.init, KEY, X)["params"], stats)
    np.testing.assert_array_equal(
        served.apply({"params": low}, X), model.apply({"params": params, "quant_stats": stats}, X)
    )


CHECKS = {
    "`qwix.QtRule`": functools.partial(check_rules, "QtRule", bwd_qtype="int8"),
    "`qwix.QuantizationRule`": functools.partial(check_rules, "QuantizationRule"),
    "`qwix.QtProvider`": test_quantized_training_and_quantization_aware_training,
    "`qwix.quantize_model`": check_quantize_model,
    "`weight_qtype='int8'`": check_types,
    "`act_qtype='int8'`": check_types,
    "`bwd_qtype='int8'`": functools.partial(check_gradients, "qt", "int8 x int8"),
    "`bwd_qtype=None`": functools.partial(check_gradients, "qat", "float"),
    "QAT mode": check_qat,
    "QT mode": check_qt,
    "floating-point weights": check_interchangeable,
    "`act_static_scale=True`": check_statistics,
    "`quant_stats`": test_static_range_statistics_print_as_on_the_page,
    "`QuantStat`": check_nnx,
    "`model.init`": check_init,
    "standalone calibration": check_calibration,
}


def rows(mark):
    """The first cells of a table of docs/from-qwix.md."""
    page = (Path(__file__).parents[2] / "docs" / "from-qwix.md").read_text()
    lines = page.partition(f"<!-- {mark} -->\n")[2].partition("<!-- end -->")[0].splitlines()[2:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def test_every_row_of_the_training_page_has_a_check():
    assert list(rows("training")) == list(CHECKS)


@pytest.mark.parametrize("row", CHECKS)
def test_the_training_page_line_by_line(row):
    CHECKS[row]()


def test_every_public_name_of_qwix_has_a_row():
    peer = importlib.import_module("qwix")
    importlib.import_module("qwix.pallas")
    importlib.import_module("octavo.compat.qwix.pallas")
    names = {name for name in dir(peer) if not name.startswith("_")}
    here = {name: line for cell, line in rows("names").items() for name in cell.replace("`", "").split(", ")}
    assert set(here) == names
    for name, line in here.items():
        missing = "| not " in line
        assert hasattr(qwix, name) != (missing or "in `octavo.compat.qwix`" in line), line
        assert hasattr(compat, name) != missing, line
