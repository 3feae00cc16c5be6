"""Scale search and GPTQ on matrices, against NumPy and against Qwix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo import kernels
from octavo.ptq import Scales, autoround, eora, gptq, quantize_weight, scales_of, search
from octavo.ptq.layout import MatrixView
from octavo.ptq.scales import FACTORS
from octavo.ptq.statistics import Statistics
from tests.arrays import normal
from tests.cases import slow_except
from tests.ptq import reference

INT4 = octavo.get_format("int4")


def correlated(seed, inputs=96, tokens=400):
    """Inputs of very different magnitudes that depend on each other, one of them always zero."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(inputs // 2, inputs)) * np.geomspace(0.05, 3, inputs)
    x = rng.normal(size=(tokens, inputs // 2)) @ mix + 0.05 * rng.normal(size=(tokens, inputs))
    x[:, 5] = 0
    return x.astype(np.float32)


def problem(seed=0, inputs=96, outputs=24):
    w = np.random.default_rng(seed).standard_t(4, size=(inputs, outputs)).astype(np.float32)
    x = correlated(seed, inputs)
    return w, x.T @ x / len(x)


def statistics(hessian, shape):
    h = jnp.asarray(hessian)[None]
    view = MatrixView(shape, (0, 1), (), (1, *shape))
    square = jnp.diagonal(h, axis1=1, axis2=2)
    return Statistics(h, square, jnp.zeros(h.shape[:2]), jnp.zeros(h.shape[:2]), jnp.ones(1), view)


@pytest.mark.parametrize("order", [True, False])
def test_gptq_is_that_of_numpy(order):
    w, h = problem()
    scale = np.repeat(np.abs(w).reshape(3, 32, -1).max(axis=1) / 7.5, 32, axis=0)
    found = gptq(
        jnp.asarray(w)[None], jnp.asarray(h)[None], Scales(jnp.asarray(scale)[None]), INT4, activation_order=order
    )
    wanted = reference.gptq(w, h, scale, order=order)
    live = np.diag(h) > 0
    assert np.mean(np.isclose(found[0][live], wanted[live], atol=1e-5)) > 0.99  # ties apart
    assert reference.loss(found[0] - w, h) < 1.01 * reference.loss(wanted - w, h)
    share = 0.5 if order else 0.8
    assert reference.loss(found[0] - w, h) < share * reference.loss(reference.round_int(w, scale) - w, h)


def test_gptaq_is_that_of_numpy():
    """Inputs that rounding before them has changed: the outputs are nearer to those of the float inputs."""
    w, _ = problem(inputs=136, outputs=8)
    exact = correlated(0, 136)
    x = exact + 0.2 * np.random.default_rng(1).normal(size=exact.shape).astype(np.float32) * exact.std(axis=0)
    x[:, 5] = 0
    h, drift = x.T @ x / len(x), (exact - x).T @ x / len(x)
    scale = np.full(w.shape, 0.4, np.float32)
    args = [jnp.asarray(a)[None] for a in (w, h)]
    found, plain = (
        gptq(*args, Scales(jnp.asarray(scale)[None]), INT4, drift=d)[0] for d in (jnp.asarray(drift)[None], None)
    )
    wanted = reference.gptq(w, h, scale, drift=drift)
    live = np.diag(h) > 0
    assert np.mean(np.isclose(found[live], wanted[live], atol=1e-5)) > 0.97  # ties apart
    ours, theirs, without = (np.mean((x @ np.asarray(q) - exact @ w) ** 2) for q in (found, wanted, plain))
    assert ours < 1.01 * theirs
    assert ours < 0.99 * without


def test_matrices_of_a_stack_and_blocks_are_rounded_each_by_its_own_hessian():
    """Two matrices of 136 inputs: two blocks, the second padded."""
    pairs = [problem(seed, inputs=136, outputs=8) for seed in (1, 2)]
    w, h = (np.stack(x) for x in zip(*pairs, strict=True))
    scale = np.full(w.shape, 0.4, np.float32)
    found = gptq(jnp.asarray(w), jnp.asarray(h), Scales(jnp.asarray(scale)), INT4)
    for i in range(2):
        wanted = reference.gptq(w[i], h[i], scale[i])
        assert reference.loss(found[i] - w[i], h[i]) < 1.01 * reference.loss(wanted - w[i], h[i])


def test_searched_scales_are_those_of_numpy():
    w, h = problem()
    weight = np.diag(h)
    quantizer = octavo.Quantizer("int4", channelwise_axes=(1,), tiled_axes={0: 32})
    found = search(jnp.asarray(w), quantizer, jnp.asarray(weight)[:, None])
    wanted = reference.search(w, weight, FACTORS, group=32)
    errors = [
        np.sum(weight[:, None] * (reference.round_int(w, np.repeat(np.asarray(s), 32, axis=0)) - w) ** 2)
        for s in (found.scale, wanted)
    ]
    assert abs(errors[0] / errors[1] - 1) < 1e-4
    assert (np.asarray(found.scale) < 0).any()
    np.testing.assert_allclose(np.abs(found.dequantize()).max(), np.abs(w).max(), rtol=0.3)


def test_the_largest_weight_has_the_lowest_code():
    w, h = problem()
    quantizer = octavo.Quantizer("int4", channelwise_axes=(1,), tiled_axes={0: 32})
    q = quantize_weight(jnp.asarray(w), quantizer, statistics(h, w.shape), method="signed").array
    largest = np.abs(w).reshape(3, 32, -1).argmax(axis=1)
    codes = np.take_along_axis(np.asarray(q.qvalue).astype(int).reshape(3, 32, -1), largest[:, None], axis=1)
    assert (codes == -8).all()
    with pytest.raises(ValueError, match="only symmetric signed integers have a scale of either sign, not nf4"):
        quantize_weight(jnp.asarray(w), quantizer.replace(qtype="nf4"), statistics(h, w.shape), method="signed")


FORMATS = ("int4", "int3", "int8", "nf4", "nvfp4", "mxfp4", "float4_e2m1fn", "int4:minmax")


@pytest.mark.parametrize("name", slow_except(("int4", "nf4", "nvfp4", "int4:minmax"), FORMATS))
def test_every_step_lowers_the_error_in_any_format(name):
    w, h = problem(3)
    name, _, calibration = name.partition(":")
    tile = {} if octavo.get_format(name).tile else {0: 32}
    quantizer = octavo.Quantizer(
        name,
        channelwise_axes=(1,),
        tiled_axes=tile or {0: octavo.get_format(name).tile},
        calibration=calibration or "absmax",
    )
    stats = statistics(h, w.shape)
    found = {method: quantize_weight(jnp.asarray(w), quantizer, stats, method=method) for method in ("search", "gptq")}
    rounding = found["gptq"].rounding_error
    assert found["gptq"].error < 0.7 * rounding
    assert found["gptq"].error < found["search"].error < rounding * 1.001
    q = found["gptq"].array
    assert jax.tree.structure(q) == jax.tree.structure(quantizer.quantize(jnp.asarray(w)))
    # Codes, scales and zero points are all that is kept: the values lie on the grid.
    again = scales_of(q).round(q.dequantize(), q.qtype)
    np.testing.assert_allclose(again, q.dequantize(), rtol=1e-5, atol=1e-6)


def test_a_last_group_that_is_not_full():
    w, h = problem(4)
    quantizer = octavo.Quantizer("int4", channelwise_axes=(1,), tiled_axes={0: 40})
    found = quantize_weight(jnp.asarray(w), quantizer, statistics(h, w.shape))
    assert found.array.shape == w.shape
    assert found.error < 0.6 * found.rounding_error


def test_a_singular_hessian_is_damped_more_and_one_without_hope_is_an_error():
    w = normal(0, 1, 16, 4)
    scales = Scales(jnp.full(w.shape, 0.3))
    ones = jnp.ones((1, 16, 16))
    assert bool(jnp.all(jnp.isfinite(gptq(w, ones, scales, INT4, damping=1e-12))))
    with pytest.raises(ValueError, match="the Hessian is not positive definite"):
        gptq(w, 2 * jnp.eye(16)[None] - ones, scales, INT4)


def test_an_unknown_method_names_the_known_ones():
    with pytest.raises(ValueError, match="'gptk' is no method of quantization: did you mean 'gptq'"):
        quantize_weight(jnp.ones((4, 2)), octavo.Quantizer("int4"), statistics(np.eye(4), (4, 2)), method="gptk")


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_error_is_at_most_that_of_qwix():
    from qwix._src.core.qarray import HowToQuantize
    from qwix.contrib import gptq_core

    w, h = problem(5, inputs=64, outputs=16)
    how = HowToQuantize(qtype=jnp.int4, channelwise_axes=[0], tiled_axes={1: 32}, calibration_method="absmax")
    theirs, _ = gptq_core.quantize_weight(jnp.asarray(w.T), jnp.asarray(h), how, blocksize=32)
    scale = np.repeat(np.asarray(theirs.scale), 32, axis=1).T
    values = np.asarray(theirs.qvalue).astype(np.float32).T * scale
    quantizer = octavo.Quantizer("int4", channelwise_axes=(1,), tiled_axes={0: 32})
    ours = quantize_weight(jnp.asarray(w), quantizer, statistics(h, w.shape)).array.dequantize()
    same_scales = gptq(jnp.asarray(w)[None], jnp.asarray(h)[None], Scales(jnp.asarray(scale)[None]), INT4)[0]
    qwix_loss = reference.loss(values - w, h)
    assert reference.loss(np.asarray(same_scales) - w, h) <= qwix_loss
    assert reference.loss(np.asarray(ours) - w, h) <= 0.8 * qwix_loss


@pytest.mark.parametrize("name", slow_except(["int4_double"], [f"int{bits}_double" for bits in (3, 4, 5, 6)]))
def test_double_quantization_with_zero_points(name):
    """Eight-bit scales and zero points lose next to nothing against float32 ones, and take half a bit."""
    w, h = problem(inputs=128, outputs=64)
    low = octavo.Quantizer(name, tiled_axes={0: 32}, calibration="minmax")
    wide = octavo.Quantizer(name.removesuffix("_double"), (1,), {0: 32}, calibration="minmax", scale_dtype="float32")
    found, best = (quantize_weight(w, q, statistics(h, w.shape)) for q in (low, wide))
    assert found.error < 1.1 * best.error
    q = found.array
    codes, scale, zero = (np.asarray(x).astype(np.float64) for x in (q.qvalue, q.scale, q.zero_point))
    scale, zero = (np.repeat(x, 32, axis=0) for x in (scale, zero))
    np.testing.assert_allclose(q.dequantize(), (codes - zero) * scale * np.asarray(q.outer_scale), rtol=1e-6, atol=1e-6)
    assert q.scale.dtype == jnp.float8_e3m4
    assert q.zero_point.dtype == (jnp.float8_e3m4 if q.qtype.bits < 5 else jnp.float8_e4m3fn)
    positive = low.quantize(jnp.abs(w))  # the zero point is the lowest code, -32 in six bits
    np.testing.assert_allclose(positive.dequantize(), np.abs(w), atol=2 * float(jnp.max(jnp.abs(w))) / 2**q.qtype.bits)
    assert (zero % 1 != 0).any()
    assert low.bits_per_value((1024, 512)) == pytest.approx(q.qtype.bits + 0.5, abs=1e-3)


@pytest.mark.parametrize(("name", "tile", "calibration"), [("int4_double", 32, "minmax"), ("nf4_double", 64, "absmax")])
def test_dots_with_double_quantization_are_those_of_the_values(name, tile, calibration):
    """By the CPU kernel for a few rows, by XLA for many, packed and not, with activations in float and in int8."""
    w, _ = problem(inputs=512, outputs=128)
    q = octavo.Quantizer(name, tiled_axes={0: tile}, calibration=calibration).quantize(jnp.asarray(w))
    x = normal(0, 80, 512)
    numbers = (((1,), (0,)), ((), ()))
    dots = jax.jit(lambda x, q: [octavo.dot_general(y, q, numbers) for y in (x[:1], x)])
    exact = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64)
    for one, many in (dots(x, q), dots(x, q.pack(0))):
        np.testing.assert_allclose(one, exact[:1], rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(many, exact, rtol=1e-4, atol=1e-3)
    act = octavo.quantize(x, "int8", channelwise_axes=(0,))
    exact = np.asarray(act.dequantize(), np.float64) @ np.asarray(q.dequantize(), np.float64)
    np.testing.assert_allclose(octavo.dot_general(act, q, numbers), exact, rtol=1e-4, atol=1e-3)
    if kernels.available():  # which read what is stored: XLA copies nothing before the call
        one = jax.jit(lambda x, q: octavo.dot_general(x, q, numbers)).lower(x[:1], q.pack(0)).compile().as_text()
        assert one.count(" custom-call(") == 1
        assert " fusion(" not in one
        assert "convert" not in one


def test_eora_is_the_best_of_its_rank():
    """The error that is left is that of the discarded singular values of H^1/2 E: no matrix of this rank has less."""
    w, h = problem(inputs=48, outputs=20)
    error = w - np.round(w / 0.5) * 0.5
    values, vectors = np.linalg.eigh(h.astype(np.float64))
    sizes = np.linalg.svd(np.sqrt(np.maximum(values, 0))[:, None] * vectors.T @ error, compute_uv=False)
    a, b = eora(jnp.asarray(error)[None], jnp.asarray(h)[None], rank=4)
    assert a.shape == (1, 48, 4)
    left = reference.loss(error - np.asarray(a[0] @ b[0], np.float64), h)
    assert left == pytest.approx(np.sum(sizes[4:] ** 2), rel=1e-3)
    assert left < 0.8 * reference.loss(error, h)
    with pytest.raises(ValueError, match=r"the rank is 1 to 20 for weights of shape \(48, 20\), got 21"):
        eora(jnp.asarray(error)[None], jnp.asarray(h)[None], rank=21)


def mlp(params, x):
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


@pytest.mark.parametrize(
    "name", slow_except(("int2:minmax", "int3_double:minmax"), ("int2:minmax", "int3", "int3_double:minmax"))
)
def test_autoround_lowers_the_error_of_a_block_and_moves_codes_by_one_at_most(name):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"up": jax.random.normal(keys[0], (64, 128)) / 8, "down": jax.random.normal(keys[1], (128, 64)) / 11}
    x = jax.random.normal(keys[2], (1024, 16)) @ jax.random.normal(keys[3], (16, 64)) / 4
    x = x + 0.3 * jax.random.normal(keys[3], x.shape)
    exact = mlp(params, x)
    name, _, calibration = name.partition(":")
    rule = octavo.QuantizationRule(
        weight_qtype=name,
        tile_size=None if octavo.get_format(name).tile else 32,
        weight_calibration_method=calibration or "absmax",
    )
    low = octavo.ptq.quantize(mlp, params, rule, [x[:512]], method="search")
    new = autoround(mlp, params, low, x[:512], exact[:512], steps=50, rows=256)

    def errors(low):
        out = mlp({path: q.dequantize() for path, q in low.items()}, x)
        return [float(jnp.mean((out - exact)[part] ** 2)) for part in (slice(512), slice(512, None))]

    assert all(after < 0.5 * before for after, before in zip(errors(new), errors(low), strict=True))
    for path, q in new.items():
        np.testing.assert_array_equal(q.scale, low[path].scale)
        moved = np.asarray(q.qvalue).astype(int) - np.asarray(low[path].qvalue).astype(int)
        assert np.abs(moved).max() == 1
    # Nothing is better than no error: the start is returned, packed as it was.
    packed = {path: q.pack(0) for path, q in low.items()}
    same = autoround(mlp, {path: q.dequantize() for path, q in low.items()}, packed, x[:512], steps=3, rows=512)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, same, packed))


def test_autoround_is_for_integers():
    w = {"w": jnp.ones((32, 4))}
    with pytest.raises(ValueError, match="w is quantized to nf4, but AutoRound is for integers: use 'gptq'"):
        autoround(mlp, w, {"w": octavo.quantize(w["w"], "nf4")}, jnp.ones((8, 32)))
    with pytest.raises(ValueError, match="no parameter is quantized"):
        autoround(mlp, w, w, jnp.ones((8, 32)))
    with pytest.raises(ValueError, match="at least 1: got 0"):
        autoround(mlp, w, {"w": octavo.quantize(w["w"], "int3")}, jnp.ones((8, 32)), steps=0)
