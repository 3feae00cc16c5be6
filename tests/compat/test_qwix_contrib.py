"""The modules of `qwix.contrib`: names and signatures of the release, and results of Qwix where it is right."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import types
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from octavo.compat import qwix as ours
from octavo.compat.qwix.contrib import awq, awq_core, gptq, gptq_core, hadamard_rot, padded_ptq, qep, qep_core
from octavo.compat.qwix.contrib import smooth_quant as sq
from octavo.compat.qwix.contrib.kernels import lhs_fused_quantized_matmul as fused
from octavo.compat.qwix.contrib.kernels import quantized_matmul as qmm
from octavo.compat.qwix.contrib.sparsity.sparsity_module import SparsityModule, SparsityRule
from tests.arrays import normal

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore:.*VariableState:DeprecationWarning"),  # Qwix asks Flax for an old name
    pytest.mark.filterwarnings("ignore:.*create_tensorcore_mesh.*:DeprecationWarning"),
]

KEY = jax.random.key(0)
X = normal(1, 32, 16) * jnp.geomspace(0.1, 5, 16)[None]
KERNEL = normal(2, 6, 16)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.gelu(nn.Dense(12, name="up")(x)) * nn.Dense(12, name="gate")(x)
        return nn.Dense(4, name="down")(hidden)


class Linear(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(16, 4, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x)


def modules():
    """The modules of the installed release, by their path below `contrib`."""
    root = Path(importlib.import_module("qwix.contrib").__path__[0])
    paths = [path.relative_to(root).with_suffix("") for path in root.rglob("*.py") if not path.stem.endswith("_test")]
    return sorted(".".join(path.parts) for path in paths if path.stem != "__init__")


def public_names(module):
    """The names that a module defines: its own functions and classes, aliases and constants."""
    found, source = {}, inspect.getsource(module)
    for name, value in vars(module).items():
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations":
            assigned = re.search(rf"^{name}(:.*)? = ", source, re.MULTILINE)
            if assigned or getattr(value, "__module__", None) == module.__name__:
                found[name] = value
    return found


def parameters(value):
    return [(p.name, p.kind, p.default) for p in inspect.signature(value).parameters.values()]


@pytest.mark.parametrize("name", [name for name in modules() if not name.startswith("hijax")])
def test_every_public_name_is_here_with_the_same_signature(name):
    theirs = public_names(importlib.import_module(f"qwix.contrib.{name}"))
    here = importlib.import_module(f"octavo.compat.qwix.contrib.{name}")
    assert theirs
    for key, value in theirs.items():
        assert hasattr(here, key), key
        new = getattr(here, key)
        if inspect.isfunction(value) and "NotImplementedError" not in inspect.getsource(new):
            old, got = parameters(value), parameters(new)
            assert [p[0] for p in got[: len(old)]] == [p[0] for p in old] or new.__module__ != here.__name__, key
        if dataclasses.is_dataclass(value) and dataclasses.is_dataclass(new):
            mine = {field.name for field in dataclasses.fields(new)}
            assert {field.name for field in dataclasses.fields(value)} <= mine, key


def test_every_public_name_has_a_row_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "from-qwix.md").read_text()
    lines = page.partition("<!-- contrib -->\n")[2].partition("<!-- end -->")[0].splitlines()[2:]
    listed = {}
    for line in lines:
        module, names, text = line.removeprefix("| ").split(" | ", 2)
        for name in names.replace("`", "").split(", "):
            assert (module, name) not in listed
            listed[module.strip("`"), name] = text
    wanted = {
        (name, key) for name in modules() for key in public_names(importlib.import_module(f"qwix.contrib.{name}"))
    }
    assert set(listed) == wanted
    offered = [pair for pair, text in listed.items() if not text.startswith("not here")]
    print(f"{len(offered)} of {len(listed)} names of qwix.contrib are offered")
    assert all(hasattr(importlib.import_module(f"octavo.compat.qwix.contrib.{name}"), key) for name, key in offered)


def test_what_is_not_offered_says_what_to_use():
    with pytest.raises(ImportError, match=r"octavo\.dot_general with a config"):
        from octavo.compat.qwix.contrib.hijax import hiquant_utils  # noqa: F401
    for call in (qmm.quantized_matmul_kernel, fused.lhs_fused_qmm_kernel):
        with pytest.raises(NotImplementedError, match=r"compat\.qwix\.pallas"):
            call()
    with pytest.raises(NotImplementedError, match="act_static_scale=True"):
        padded_ptq.quantize_act(X, None, None, None)
    with pytest.raises(NotImplementedError, match="PtqProvider"):
        padded_ptq.create_quantized_param("kernel", X, None)


# Each algorithm by its three steps: calibrate, quantize, serve.


def run(lib, contrib, calibration, serving, rules, batches=(X,)):
    variables = jax.jit(Model().init)(KEY, X)
    model = lib.quantize_model(Model(), calibration(rules))
    stats = {}
    for batch in batches:
        _, stats = model.apply(variables | stats, batch, mutable="quant_stats")
    low = lib.quantize_model(Model(), serving(rules))
    abstract = jax.eval_shape(low.init, KEY, X)["params"]
    params = contrib.quantize_params(variables["params"], abstract, stats["quant_stats"])
    return stats["quant_stats"], params, low.apply({"params": params}, X)


def close_to_float(out, limit):
    wanted = Model().apply(Model().init(KEY, X), X)
    error = float(jnp.linalg.norm(out - wanted) / jnp.linalg.norm(wanted))
    assert error < limit, error


def peer(name):
    return importlib.import_module(f"qwix.contrib.{name}")


def same_stats(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), got, wanted)


def same_codes(got, wanted):
    """Codes are those of Qwix but for the largest weights, which are halfway between two codes."""
    for name in ("up", "gate", "down"):
        a, b = got[name]["kernel"].array, wanted[name]["kernel"].array
        assert np.mean(np.asarray(a.qvalue) != np.asarray(b.qvalue)) < 0.03, name
        np.testing.assert_allclose(a.scale, b.scale, rtol=1e-5)


@pytest.mark.slow
def test_gptq_is_that_of_qwix():
    import qwix

    theirs = peer("gptq")
    rule = {"weight_qtype": "int4"}
    mine = run(ours, gptq, gptq.GptqCalibrationProvider, ours.PtqProvider, [gptq.GptqRule(**rule)], (X, 2 * X))
    args = theirs.GptqCalibrationProvider, qwix.PtqProvider, [theirs.GptqRule(**rule)], (X, 2 * X)
    wanted = run(qwix, theirs, *args)
    same_stats(mine[0], wanted[0])
    same_codes(mine[1], wanted[1])
    np.testing.assert_allclose(mine[2], wanted[2], rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_awq_is_that_of_qwix():
    import qwix

    theirs = peer("awq")
    rule = {"weight_qtype": "int4"}
    mine = run(ours, awq, awq.AwqCalibrationProvider, awq.AwqInferenceProvider, [awq.AwqRule(**rule)])
    args = theirs.AwqCalibrationProvider, theirs.AwqInferenceProvider, [theirs.AwqRule(**rule)]
    wanted = run(qwix, theirs, *args)
    same_stats(mine[0], wanted[0])
    same_codes(mine[1], wanted[1])
    for name in ("up", "gate", "down"):
        a, b = (params[name]["kernel"] for params in (mine[1], wanted[1]))
        np.testing.assert_allclose(a.awq_scale, b.awq_scale, rtol=1e-4)
        assert a.contracting_axis == b.contracting_axis == 0


@pytest.mark.slow
def test_statistics_of_smooth_quant_are_those_of_qwix():
    import qwix

    theirs, rule = peer("smooth_quant"), {"weight_qtype": "int8", "act_qtype": "int8", "alpha": 0.6}
    variables = jax.jit(Model().init)(KEY, X)
    found = []
    for lib, module in ((ours, sq), (qwix, theirs)):
        model = lib.quantize_model(Model(), module.SqCalibrationProvider([module.SqRule(**rule)]))
        found.append(model.apply(variables, X, mutable="quant_stats")[1]["quant_stats"])
    same_stats(*found)


@pytest.mark.slow
def test_qep_is_that_of_qwix():
    theirs = peer("qep")
    variables = jax.jit(Model().init)(KEY, X)
    mine, wanted = (
        module.quantize(Model(), [X[:16], X[16:]], [module.QepRule(weight_qtype="int4")], variables=variables)
        for module in (qep, theirs)
    )
    assert [dataclasses.astuple(s) for s in mine.stages] == [dataclasses.astuple(s) for s in wanted.stages]
    same_stats(mine.quant_stats, wanted.quant_stats)
    same_codes(mine.params, wanted.params)


@pytest.mark.slow
def test_gptq_serves_a_linen_model():
    rules = [
        gptq.GptqRule(module_path="up|down", weight_qtype="int4", tile_size=4),
        gptq.QuantizationRule(weight_qtype="int8"),
    ]
    stats, params, out = run(ours, gptq, gptq.GptqCalibrationProvider, ours.PtqProvider, rules)
    assert set(stats) == {"up", "down"}  # the other weight is rounded
    assert params["up"]["kernel"].array.scale.shape == (4, 12)
    close_to_float(out, 0.12)


def test_awq_serves_a_linen_model_and_quantizes_activations():
    rules = [awq.AwqRule(weight_qtype="int4", act_qtype="int8")]
    _, params, out = run(ours, awq, awq.AwqCalibrationProvider, awq.AwqInferenceProvider, rules)
    assert isinstance(params["up"]["kernel"], awq.WithAwqScale)
    close_to_float(out, 0.2)


def test_smooth_quant_quantizes_activations():
    """Qwix multiplies float activations; and the mean of inverses that it stores changes the function."""
    rules = [sq.SqRule(weight_qtype="int8", act_qtype="int8")]
    stats, params, out = run(ours, sq, sq.SqCalibrationProvider, sq.SqInferenceProvider, rules, (X, 3 * X))
    kernel = params["up"]["kernel"]
    assert isinstance(kernel, sq.WithSqScale)
    scale = stats["up"]["kernel_sq"]["sum_of_sq_scale"] / 2
    np.testing.assert_allclose(kernel.inv_sq_scale, 1 / scale, rtol=1e-6)
    close_to_float(out, 0.03)
    low = ours.quantize_model(Model(), sq.SqInferenceProvider(rules))
    text = jax.jit(lambda p: low.apply({"params": p}, X)).lower(params).as_text()
    assert len(re.findall(r"dot_general .*xi8>, tensor<\d+x\d+xi8>\) -> tensor<\d+x\d+xi32>", text)) == 3


def test_smooth_quant_needs_symmetric_activations():
    variables = jax.jit(Model().init)(KEY, X)
    for rule, text in (
        ({"weight_qtype": "int8"}, "no act_qtype"),
        ({"weight_qtype": "int8", "act_qtype": "int8", "act_calibration_method": "minmax"}, "symmetric"),
    ):
        model = ours.quantize_model(Model(), sq.SqCalibrationProvider([sq.SqRule(**rule)]))
        with pytest.raises(ValueError, match=text):
            model.apply(variables, X, mutable="quant_stats")


@pytest.mark.slow
def test_nnx_models_are_calibrated_and_served():
    model = Linear()
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    flows = (
        (gptq, gptq.GptqCalibrationProvider, ours.PtqProvider, gptq.GptqRule(weight_qtype="int8")),
        (awq, awq.AwqCalibrationProvider, awq.AwqInferenceProvider, awq.AwqRule(weight_qtype="int8")),
    )
    for module, calibration, serving, rule in flows:
        calibrated = ours.quantize_model(model, calibration([rule]), X)
        calibrated(X)
        stats = nnx.to_pure_dict(nnx.state(calibrated, ours.QuantStat))
        low = ours.quantize_model(model, serving([rule]), X)
        nnx.update(low, module.quantize_params(params, low, stats))
        np.testing.assert_allclose(low(X), model(X), atol=0.05)  # of values up to 5


def test_qep_says_what_it_needs():
    variables = jax.jit(Model().init)(KEY, X)
    rules = [qep.QepRule(weight_qtype="int4")]
    with pytest.raises(ValueError, match="takes Linen models"):
        qep.quantize(Linear(), [X], rules)
    with pytest.raises(ValueError, match="variables are needed"):
        qep.quantize(Model(), [X], rules)
    with pytest.raises(ValueError, match="no calibration data"):
        qep.quantize(Model(), [], rules, variables=variables)
    with pytest.raises(ValueError, match="QepRule"):
        qep.quantize(Model(), [X], [gptq.GptqRule(weight_qtype="int4")], variables=variables)


@pytest.mark.slow
def test_qep_corrects_for_earlier_weights():
    """The outputs are nearer to those of float than without the correction."""
    variables = jax.jit(Model().init)(KEY, X)
    errors = []
    for factor in (0.0, 1.0):
        rules = [qep.QepRule(weight_qtype="int3", correction_factor=factor)]
        result = qep.quantize(Model(), lambda: [X], rules, variables=variables, batch_adapter=lambda x: ((x,), {}))
        errors.append(jnp.linalg.norm(result.model.apply({"params": result.params}, X) - Model().apply(variables, X)))
        assert [stage.module_paths for stage in result.stages] == [("up", "gate"), ("down",)]
        assert isinstance(result, qep.QepResult)
        assert isinstance(result.stages[0], qep.QepStage)
    assert errors[1] < errors[0]
    abstract = jax.eval_shape(result.model.init, KEY, X)["params"]
    again = qep.quantize_params(variables["params"], abstract, result.quant_stats, correction_factor=1.0)
    for name in ("up", "gate", "down"):
        np.testing.assert_array_equal(again[name]["kernel"].array.qvalue, result.params[name]["kernel"].array.qvalue)


# The functions of matrices.


@pytest.mark.slow
def test_gptq_core_is_that_of_qwix():
    from qwix._src.core import qarray

    theirs = peer("gptq_core")
    hessian = gptq_core.compute_hessian(X.T)[:8, :8]
    w, how = KERNEL[:, :8], padded_ptq.HowToQuantize(qtype="int8", channelwise_axes=(0,))
    got, losses = gptq_core.quantize_weight(w, hessian, how)
    options = {"qtype": "int8", "channelwise_axes": (0,), "tiled_axes": {}, "calibration_method": "absmax"}
    wanted, wanted_losses = theirs.quantize_weight(w, hessian, qarray.HowToQuantize(**options))
    assert np.mean(np.asarray(got.qvalue) != np.asarray(wanted.qvalue)) < 0.15  # of the largest weight of a row
    np.testing.assert_allclose(got.scale, wanted.scale, rtol=1e-5)
    assert losses.shape == wanted_losses.shape
    np.testing.assert_allclose(jnp.sum(losses), jnp.sum(wanted_losses), rtol=0.05)
    scale, zero_point = gptq_core.find_params(w, how)
    codes, values = gptq_core.quantize(w, "int8", scale, zero_point)
    np.testing.assert_allclose(values, codes * scale, rtol=1e-6)


@pytest.mark.slow
def test_losses_are_the_error_of_the_outputs():
    hessian = X.T @ X
    how = padded_ptq.HowToQuantize(qtype="int4", channelwise_axes=(0,), tiled_axes={1: 4})
    got, losses = gptq_core.quantize_weight(KERNEL, hessian, how, percdamp=0.0)
    error = (got.dequantize() - KERNEL) @ X.T
    np.testing.assert_allclose(2 * jnp.sum(losses), jnp.sum(error**2), rtol=1e-3)
    assert jnp.sum(error**2) < jnp.sum(((how.quantize(KERNEL).dequantize() - KERNEL) @ X.T) ** 2)


@pytest.mark.parametrize("options", [{"qtype": "int8", "calibration_method": "minmax"}, {"qtype": "nf4"}])
def test_gptq_of_asymmetric_and_table_formats(options):
    """Qwix raises for both."""
    how = padded_ptq.HowToQuantize(channelwise_axes=(0,), **options)
    got, _ = gptq_core.quantize_weight(KERNEL, X.T @ X, how)
    errors = [jnp.sum(((q.dequantize() - KERNEL) @ X.T) ** 2) for q in (got, how.quantize(KERNEL))]
    assert errors[0] < errors[1]


@pytest.mark.slow
def test_awq_and_qep_cores_are_those_of_qwix():
    from qwix._src.core import qarray

    how = padded_ptq.HowToQuantize(qtype="int4", channelwise_axes=(0,))
    options = {"qtype": "int4", "channelwise_axes": (0,), "tiled_axes": {}, "calibration_method": "absmax"}
    scales = awq_core.compute_act_scale(X)
    got = awq_core.search_optimal_scales(KERNEL, scales, how)
    wanted = peer("awq_core").search_optimal_scales(KERNEL, scales, qarray.HowToQuantize(**options))
    np.testing.assert_allclose(got, wanted, rtol=1e-4)
    noisy = X + 0.1 * normal(10, *X.shape)
    stats = qep_core.compute_qep_stats(noisy.T, X.T)
    theirs = peer("qep_core")
    wanted = theirs.weight_correct(KERNEL, *theirs.compute_qep_stats(noisy.T, X.T).values())
    got = qep_core.weight_correct(KERNEL, stats["hessian"], stats["hessian_delta"])
    np.testing.assert_allclose(got, wanted, atol=1e-4)


@pytest.mark.parametrize("flips", [(False, False), (True, True)])
def test_hadamard_rotation_keeps_the_matmul(flips):
    options = {"row_sign_flip": flips[0], "col_sign_flip": flips[1], "lhs_reduction_dim": 1, "rhs_reduction_dim": 1}
    x, w, _ = hadamard_rot.hadamard_rotate_inputs(X, KERNEL, KEY, **options)
    np.testing.assert_allclose(x @ w.T, X @ KERNEL.T, rtol=1e-4, atol=1e-4)
    if not any(flips):
        a, b, _ = peer("hadamard_rot").hadamard_rotate_inputs(X, KERNEL, None, **options)
        np.testing.assert_allclose(x, a, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(w, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="power of 2"):
        hadamard_rot.hadamard_rotate_inputs(X[:, :12], KERNEL[:, :12], KEY, **options)
    with pytest.raises(ValueError, match="different sizes"):
        hadamard_rot.hadamard_rotate_inputs(X[:, :8], KERNEL, KEY, **options)


@pytest.mark.slow
def test_uneven_tiles_are_those_of_padded_ptq():
    from qwix._src.core import qarray

    theirs = peer("padded_ptq")
    x = X[:4, :11]
    how = padded_ptq.HowToQuantize(qtype="int8", channelwise_axes=(0,), tiled_axes={1: 4})
    options = {"qtype": "int8", "channelwise_axes": (0,), "tiled_axes": {1: 4}, "calibration_method": "absmax"}
    got, wanted = padded_ptq.quantize(x, how), theirs.quantize(x, qarray.HowToQuantize(**options))
    assert got.shape == wanted.original_shape == (4, 11)
    np.testing.assert_allclose(got.scale, wanted.scale, rtol=1e-6)
    np.testing.assert_allclose(padded_ptq.dequantize(got), x, atol=0.01)  # Qwix's raises: its scales do not tile codes
    numbers = (((1,), (1,)), ((), ()))
    out = padded_ptq.dot_general(X[:2, :11], got, numbers)
    np.testing.assert_allclose(out, theirs.dot_general(X[:2, :11], wanted, numbers), rtol=1e-5, atol=1e-5)
    for shape, tiles in (((5, 6), {0: 4}), ((7, 6), {0: 2, 1: 0.5})):
        assert padded_ptq.get_padded_shape(shape, tiles) == theirs.get_padded_shape(shape, tiles)


SPARSE = (
    {"weight_sparsity_n": 2, "weight_sparsity_m": 4},
    {"weight_sparsity_n": 1, "weight_sparsity_m": 2, "weight_sparsity_order": "C"},
    {"weight_sparsity_n": 1, "weight_sparsity_m": 2, "weight_sparsity_offset": 4},
    {"weight_sparsity_n": 1, "weight_sparsity_m": 2, "weight_sparsity_block_size": 2},
    {"activation_sparsity_n": 1, "activation_sparsity_m": 4},
    {"weight_sparsity_n": 1, "weight_sparsity_m": 2, "weight_sparsity_start_step": 1, "weight_sparsity_update_step": 2},
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("fields", SPARSE)
def test_masks_are_those_of_qwix(fields):
    from qwix._src.core import sparsity

    theirs = importlib.import_module("qwix.contrib.sparsity.sparsity_module").SparsityModule
    mine = SparsityModule((16, 8), (None, None), SparsityRule(**fields))
    wanted = theirs((16, 8), None, sparsity.SparsityRule(**fields))
    for step in range(3):
        weight = normal(step, 16, 8)
        for a, b in zip(mine(X, weight), wanted(X, weight), strict=True):
            np.testing.assert_array_equal(a, b)


def test_masks_that_do_not_fit_raise():
    module = SparsityModule((6, 6), (None, None), SparsityRule(weight_sparsity_n=2, weight_sparsity_m=4))
    with pytest.raises(ValueError, match="2:4 sparsity"):
        module(X, jnp.ones((6, 6)))


def test_kernels_compute_the_matmul_of_codes():
    x, y = ours.quantize(X, "int8", channelwise_axes=(0,)), ours.quantize(KERNEL.T, "int8", channelwise_axes=(1,))
    blocks = {"bm": 32, "bk": 16, "bn": 6}
    out = qmm.quantized_matmul(x.qvalue, x.scale, y.qvalue, y.scale, **blocks, dtype=jnp.float32)
    np.testing.assert_allclose(out, x.dequantize() @ y.dequantize(), rtol=1e-4, atol=1e-4)
    assert qmm.can_use_qmm_in_dot_general(x, y, (((1,), (0,)), ((), ())), config=qmm.QuantizedMatmulConfig(32, 16, 6))
    assert not qmm.can_use_qmm_in_dot_general(X, y, (((1,), (0,)), ((), ())), config=qmm.QuantizedMatmulConfig())
    out = fused.lhs_fused_quantized_matmul(X, y.qvalue, y.scale, **blocks, sm=32)
    np.testing.assert_allclose(out, x.dequantize() @ y.dequantize(), rtol=1e-4, atol=1e-4)


def test_modules_are_those_of_the_release():
    import octavo.compat.qwix.contrib as here

    found = {
        m.name.removeprefix(f"{here.__name__}.") for m in pkgutil.walk_packages(here.__path__, f"{here.__name__}.")
    }
    leaves = {name for name in found if name not in ("sparsity", "kernels", "hijax", "input_scales")}
    assert leaves == {name for name in modules() if not name.startswith("hijax")}
