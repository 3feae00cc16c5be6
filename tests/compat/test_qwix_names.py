"""Names of `qwix.contrib` that algorithms are written with, called as Qwix's users do and compared with Qwix."""

import importlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from octavo.compat import qwix as ours
from octavo.compat.qwix.contrib import calibration, gptq_core, padded_ptq
from octavo.compat.qwix.contrib import smooth_quant as sq
from octavo.compat.qwix.contrib.kernels import lhs_fused_quantized_matmul as fused
from octavo.compat.qwix.contrib.kernels import quantized_matmul as qmm
from tests.arrays import normal

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore:.*VariableState:DeprecationWarning"),  # Qwix asks Flax for an old name
    pytest.mark.filterwarnings("ignore:.*create_tensorcore_mesh.*:DeprecationWarning"),
]

KEY = jax.random.key(0)
X = normal(1, 16, 12)
W = normal(2, 12, 3, 2)


def peer(name):
    return importlib.import_module(f"qwix.contrib.{name}")


def own_algorithm(lib, module):
    """An algorithm of a user: the largest inputs are recorded, and codes are made of the weight as a matrix."""

    class Largest(module.SinglePassCalibrationProvider):
        def get_rule_type(self):
            return lib.QuantizationRule

        def get_stats_suffix(self):
            return "_largest"

        def compute_stats(self, lhs):
            return {"max": jnp.max(jnp.abs(lhs), axis=1)}

    contexts = []

    def quantize_fn(context):
        assert isinstance(context, module.CalibratedQuantContext)
        contexts.append(context)
        how = context.how
        if lib is qwix:
            array = lib.quantize(
                context.weight, how.qtype, channelwise_axes=how.channelwise_axes, tiled_axes=how.tiled_axes
            )
        else:
            array = how.quantize(context.weight)
        return context.abs_w.replace(array=context.restore_shape(array))

    rules = [lib.QuantizationRule(weight_qtype="int8", tile_size=4)]
    model = nn.Dense(5)
    variables = model.init(KEY, X)
    recorded = lib.quantize_model(model, Largest(rules))
    stats = {}
    for batch in (X, 2 * X):
        _, stats = recorded.apply(variables | stats, batch, mutable="quant_stats")
    low = lib.quantize_model(model, lib.PtqProvider(rules))
    abstract = jax.eval_shape(low.init, KEY, X)["params"]
    args = variables["params"], abstract, stats["quant_stats"], "_largest", quantize_fn
    params = module.quantize_params_with_calibration(*args)
    return stats, contexts, params["kernel"].array, low.apply({"params": params}, X)


@pytest.mark.slow
def test_an_algorithm_of_a_user_runs_as_in_qwix():
    assert issubclass(calibration.SinglePassCalibrationProvider, calibration.CalibrationProvider)
    mine, wanted = own_algorithm(ours, calibration), own_algorithm(qwix, peer("calibration"))
    assert jax.tree.structure(mine[0]) == jax.tree.structure(wanted[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mine[0], wanted[0])
    ((a,), (b,)) = mine[1], wanted[1]
    assert (a.path, a.contracting_axis) == (b.path, b.contracting_axis) == (("kernel",), 0)
    np.testing.assert_array_equal(a.weight, b.weight)
    np.testing.assert_allclose(a.calibration_stats["max"], b.calibration_stats["max"], rtol=1e-6)
    assert np.mean(np.asarray(mine[2].qvalue) != np.asarray(wanted[2].qvalue)) < 0.05  # halfway between codes
    np.testing.assert_allclose(mine[2].scale, wanted[2].scale, rtol=1e-6)
    np.testing.assert_allclose(mine[3], wanted[3], atol=0.02)


def test_a_weight_with_two_contracted_axes_has_no_context():
    module, results = peer("calibration"), []
    for lib, extract in (
        (ours, calibration.extract_calibrated_quant_context),
        (qwix, module.extract_calibrated_quant_context),
    ):
        model = nn.DenseGeneral(4, axis=(-2, -1))
        low = lib.quantize_model(model, lib.PtqProvider([lib.QuantizationRule(weight_qtype="int8")]))
        kernel = jax.eval_shape(low.init, KEY, X.reshape(16, 3, 4))["params"]["kernel"]
        results.append(extract(("kernel",), jnp.ones((3, 4, 4)), kernel, {}))
    assert results == [None, None]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_normalized_weight_is_restored(axis):
    (matrix, restore), (wanted, _) = (m.normalize_weight(W, axis) for m in (calibration, peer("calibration")))
    np.testing.assert_array_equal(matrix, wanted)
    np.testing.assert_array_equal(restore(matrix), W)


def test_functions_of_the_algorithms_are_those_of_qwix():
    lower = jnp.linalg.cholesky(X.T @ X + jnp.eye(12))
    wanted = peer("gptq_core").cholesky_inverse(lower)
    np.testing.assert_allclose(gptq_core.cholesky_inverse(lower), wanted, rtol=1e-4, atol=1e-5)
    stats = jnp.max(jnp.abs(X), 0), jnp.asarray([0.0, *range(1, 12)], jnp.float32)
    for alpha in (0.3, 0.5):
        got, wanted = (m.compute_scales_ratio(*stats, alpha) for m in (sq, peer("smooth_quant")))
        np.testing.assert_allclose(got[1:], wanted[1:], rtol=1e-5)
        assert got.dtype == wanted.dtype
    assert {"array", "how", "inv_sq_scale"} <= set(sq.WithSqScale.__dataclass_fields__)


def test_functions_of_padded_ptq_are_those_of_qwix():
    theirs = peer("padded_ptq")
    for module in (padded_ptq, theirs):
        how = module.HowToQuantize(
            qtype=jnp.int8, channelwise_axes=(1,), tiled_axes={0: 5}, calibration_method="absmax"
        )
        whole = module.HowToQuantize(
            qtype=jnp.int8, channelwise_axes=(1,), tiled_axes={0: 4}, calibration_method="absmax"
        )
        found = module.calibrate(X, whole), module.quantize(X, how)
        assert isinstance(found[1], module.PaddedQArray)
        if module is padded_ptq:
            mine = found
    np.testing.assert_allclose(mine[0]["absmax"], found[0]["absmax"], rtol=1e-6)
    np.testing.assert_allclose(mine[1].scale, found[1].scale, rtol=1e-6)
    codes = [np.asarray(q.qvalue)[:16] for q in (mine[1], found[1])]
    assert np.mean(codes[0] != codes[1]) < 0.05
    np.testing.assert_array_equal(*(m.pad_to_shape(X, (20, 13)) for m in (padded_ptq, theirs)))
    assert issubclass(padded_ptq.PaddedPtqProvider, padded_ptq.PtqProvider)
    assert isinstance(X, padded_ptq.MaybeQArray)
    assert padded_ptq.QARRAY_KEEP_PADDED_SHAPE
    assert mine[1].qvalue.shape == (20, 12)


def test_functions_of_the_kernels_are_those_of_qwix():
    theirs = peer("kernels.lhs_fused_quantized_matmul")
    (codes, scale), (wanted, wanted_scale) = (m.quantize_a_tile(X) for m in (fused, theirs))
    # Qwix's range ends at 127.49.
    np.testing.assert_allclose(scale, wanted_scale, rtol=1e-3)
    assert np.abs(codes.astype(int) - np.asarray(wanted, int)).max() <= 1
    x, y = jnp.ones((256, 512), jnp.int8), jnp.ones((512, 256), jnp.int8)
    fits = jnp.ones((1, 4)), jnp.ones((4, 1))
    for (sx, sy), blocks in [
        (fits, (128, 128, 128)), (fits, (100, 128, 128)), ((jnp.ones((1, 4)), jnp.ones((2, 1))), (128, 128, 128)),
    ]:  # fmt: skip
        options = dict(zip(("bm", "bk", "bn"), blocks, strict=True))
        got, wanted = (m.can_use_qmm(x, sx, y, sy, **options) for m in (qmm, peer("kernels.quantized_matmul")))
        assert got == wanted
