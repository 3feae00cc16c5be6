"""The contract of ragged dots: every expert with its own scales, in values and both gradients, and nothing leaks."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import octavo
from octavo import DotConfig, Matmul, Operand, QArray
from octavo.calibration import AmaxHistory
from octavo.ops import RESIDUAL, Ragged, init_scaling
from octavo.ops.lowerings.grouped import Rows, group_absmax, rows_by_groups, rows_by_rows
from octavo.ops.operands import MatmulOptions
from octavo.ops.ragged import gmm, ragged_dot, ragged_dot_general, tgmm
from tests.cases import slow_except
from tests.ops.walk import dot_types

M, K, N, G = 48, 32, 24, 4
SIZES = {
    "even": [12, 12, 12, 12],
    "uneven": [3, 29, 0, 16],
    "one": [0, 48, 0, 0],
    "last": [0, 0, 0, 48],
    "short": [5, 0, 20, 1],
    "none": [0, 0, 0, 0],
}
INT8 = DotConfig.qt("int8")
BOTH = Operand("int8")


def data(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = (M, K), (G, K, N), (M, N)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


@functools.partial(jax.jit, static_argnames="config")
def step(x, w, sizes, ct, config):
    """Output and both gradients."""
    out, pull = jax.vjp(lambda x, w: ragged_dot(x, w, sizes, config=config), x, w)
    return out, *pull(ct)


def sizes_of(name):
    return jnp.asarray(SIZES[name], jnp.int32)


def rows_of(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, np.asarray(sizes), strict=True)]


def f64(x):
    return np.asarray(x.dequantize(jnp.float32) if isinstance(x, QArray) else x, np.float64)


def loop(lhs, rhs, sizes):
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for rows, matrix in zip(rows_of(sizes), f64(rhs), strict=True):
        out[rows] = f64(lhs)[rows] @ matrix
    return out


def transposed_loop(lhs, rhs, sizes):
    return np.stack([f64(lhs)[rows].T @ f64(rhs)[rows] for rows in rows_of(sizes)])


def close(actual, expected, tolerance=2e-6):
    assert np.all(np.isfinite(actual))
    error = np.abs(np.asarray(actual, np.float64) - expected).max()
    assert error <= tolerance * max(1e-30, np.abs(expected).max()), error


OPERANDS = {
    "int8": ("int8", "int8", {"channelwise_axes": (0,)}, {"channelwise_axes": (0, 2)}),
    "tensor": ("int8", "int8", {}, {}),
    "expert": ("int8", "int4", {"channelwise_axes": (0,)}, {"channelwise_axes": (0,)}),
    "column": ("int8", "int8", {"channelwise_axes": (0,)}, {"channelwise_axes": (2,)}),
    "row_tiles": ("int8", "int8", {"tiled_axes": {0: 8}}, {"tiled_axes": {0: 2, 2: 8}}),
    "tiles": ("int8", "int8", {"tiled_axes": {1: 16}}, {"channelwise_axes": (0, 2), "tiled_axes": {1: 16}}),
    "asymmetric": (
        "int8",
        "uint8",
        {"channelwise_axes": (0,), "calibration_method": "minmax"},
        {"channelwise_axes": (0, 2), "calibration_method": "minmax"},
    ),
    "fp8": ("float8_e4m3fn", "float8_e4m3fn", {"channelwise_axes": (0,)}, {"channelwise_axes": (0, 2)}),
    "fp8_mixed": ("float8_e5m2", "float8_e4m3fn", {"channelwise_axes": (0,)}, {"channelwise_axes": (0, 2)}),
    "nf4": ("nf4", "nf4", {"channelwise_axes": (0,)}, {"channelwise_axes": (0, 2)}),
    "int1": ("int8", "int1", {"channelwise_axes": (0,)}, {"channelwise_axes": (0, 2)}),
    "mxfp4": ("mxfp4", "mxfp4", {}, {"tiled_axes": {1: 32}}),
    "weight": (None, "int8", {}, {"channelwise_axes": (0, 2)}),
    "activation": ("int8", None, {"channelwise_axes": (0,)}, {}),
}


def operands(name, x, w):
    left, right, how_left, how_right = OPERANDS[name]
    lhs = x if left is None else octavo.quantize(x, left, **how_left)
    return lhs, w if right is None else octavo.quantize(w, right, **how_right)


@pytest.mark.parametrize("name", slow_except(("int8", "asymmetric", "fp8", "weight"), OPERANDS))
def test_values_are_those_of_a_loop_over_groups(name):
    x, w, _ = data()
    lhs, rhs = operands(name, x, w)
    run = jax.jit(ragged_dot)
    for sizes in ("uneven", "short"):
        close(run(lhs, rhs, sizes_of(sizes)), loop(lhs, rhs, SIZES[sizes]))


@pytest.mark.parametrize("sizes", slow_except(("short",), SIZES))
def test_empty_groups_one_group_and_short_tails(sizes):
    x, w, ct = data()
    lhs, rhs = operands("int8", x, w)
    out = jax.jit(gmm)(lhs, rhs, sizes_of(sizes))
    close(out, loop(lhs, rhs, SIZES[sizes]))
    assert not np.asarray(out)[sum(SIZES[sizes]) :].any()
    left, right = (octavo.quantize(a, "int8", channelwise_axes=(1,)) for a in (x, ct))
    out = jax.jit(tgmm)(left.T, right, sizes_of(sizes))
    close(out, transposed_loop(left, right, SIZES[sizes]))
    assert not np.asarray(out)[np.asarray(SIZES[sizes]) == 0].any()


@pytest.mark.parametrize(
    ("qtype", "axes"),
    [("int8", (1,)), ("int8", (0,)), ("nf4", (1,)), (None, ())],
)
def test_tgmm_is_a_loop_over_groups(qtype, axes):
    x, _, ct = data()
    lhs, rhs = ((a if qtype is None else octavo.quantize(a, qtype, channelwise_axes=axes)) for a in (x, ct))
    run = jax.jit(functools.partial(tgmm, rows_first=True))
    close(run(lhs, rhs, sizes_of("short")), transposed_loop(lhs, rhs, SIZES["short"]))


def test_gmm_takes_transposed_experts():
    x, w, _ = data()
    lhs, rhs = operands("int8", x, w)
    run = jax.jit(functools.partial(gmm, transpose_rhs=True), static_argnames="config")
    close(run(lhs, rhs.mT, sizes_of("short")), loop(lhs, rhs, SIZES["short"]))
    ours = run(x, w.swapaxes(1, 2), sizes_of("short"), config=INT8)
    np.testing.assert_array_equal(ours, step(x, w, sizes_of("short"), jnp.zeros((M, N)), INT8)[0])


@pytest.mark.parametrize("dtype", slow_except([jnp.bfloat16], [jnp.bfloat16, jnp.float16, jnp.float32]))
def test_dtypes_of_the_result_and_of_gradients(dtype):
    x, w, _ = data(dtype=dtype)
    sizes = sizes_of("uneven")
    wide = jax.eval_shape(lambda: ragged_dot(x, w, sizes, None, jnp.float32, config=INT8))
    assert wide.dtype == jnp.float32
    big = x * jnp.asarray(200, dtype)  # a float16 accumulator would overflow
    out, dlhs, drhs = step(big, w, sizes, jnp.ones((M, N), dtype), INT8)
    assert out.dtype == dlhs.dtype == drhs.dtype == dtype
    assert jnp.isfinite(out).all()
    np.testing.assert_allclose(np.asarray(out, float), loop(big, w, SIZES["uneven"]), atol=200 * 0.5)


@functools.partial(jax.jit, static_argnums=0)
def quantize(how, x):
    return how.quantize(x)


def reference(x, w, sizes, ct, config):
    """Output and gradients from the definition, expert by expert, in float64."""
    fwd, dlhs, drhs = config.fwd, config.dlhs, config.drhs

    def quantized(operand, x, contract):
        return x if operand is None else quantize(operand.quantizer(x.ndim, contracting=contract), x)

    left, right = quantized(fwd.lhs, x, (1,)), quantized(fwd.rhs, w, (1,))
    out, dx, dw = loop(left, right, sizes), np.zeros(x.shape), np.zeros(w.shape)
    for i, rows in enumerate(rows_of(sizes)):
        if rows.start == rows.stop:
            continue
        g = ct[rows]
        res, scale = w[i], 1.0
        if dlhs.residual == "reuse" and isinstance(right, QArray) and dlhs.lhs is not None:
            scale = right.scale[i] if right.scale.shape[0] > 1 else right.scale[0]
            res = f64(right)[i] / f64(scale)
        elif dlhs.residual == "requantize":
            res = f64(quantized(dlhs.rhs, right.dequantize()[i], (1,)))
        elif dlhs.rhs is not None:
            res = f64(quantized(dlhs.rhs, res, (1,)))
        elif dlhs.residual == "reuse":
            res = f64(right)[i]
        dx[rows] = f64(quantized(dlhs.lhs, g * scale, (1,))) @ f64(res).T
        res, scale = x[rows], 1.0
        if drhs.residual == "reuse" and isinstance(left, QArray) and drhs.lhs is not None:
            scale = left.scale[rows] if left.scale.shape[0] > 1 else left.scale
            res = f64(left)[rows] / f64(scale)
        elif drhs.residual == "requantize":
            res = f64(quantized(drhs.rhs, left.dequantize()[rows], (0,)))
        elif drhs.rhs is not None:
            res = f64(quantized(drhs.rhs, res, (0,)))
        elif drhs.residual == "reuse":
            res = f64(left)[rows]
        dw[i] = f64(res).T @ f64(quantized(drhs.lhs, g * scale, (0,)))
    return out, dx, dw


RECIPES = {
    "int8": INT8,
    "int4": DotConfig.qt("int4"),
    "fp8": DotConfig.qt("float8_e4m3fn", "float8_e5m2"),
    "nf4": DotConfig.qt("nf4"),
    "qat": DotConfig.qat("int8"),
    "weight_only": DotConfig.weight_only("int8"),
    "weight_only_qt": DotConfig(Matmul(None, BOTH), Matmul(BOTH), Matmul(residual="original")),
    "float_gradients": DotConfig(Matmul(BOTH, BOTH), Matmul(), Matmul()),
    "requantize": DotConfig(
        Matmul(BOTH, BOTH),
        Matmul(BOTH, BOTH, residual="requantize"),
        Matmul(BOTH, BOTH, residual="requantize"),
    ),
    "original": DotConfig(
        Matmul(BOTH, BOTH),
        Matmul(BOTH, BOTH, residual="original"),
        Matmul(BOTH, BOTH, residual="original"),
    ),
    "plain": INT8.replace(lowering="plain"),
    "float": DotConfig(),
}


@pytest.mark.parametrize("recipe", slow_except(("int8", "fp8", "requantize"), RECIPES))
def test_gradients_are_those_of_fake_quantization(recipe):
    x, w, ct = data(1)
    config = RECIPES[recipe]
    for sizes in ("uneven", "short"):
        expected = reference(x, w, SIZES[sizes], ct, config)
        for actual, wanted in zip(step(x, w, sizes_of(sizes), ct, config), expected, strict=True):
            close(actual, wanted)


def test_a_tensor_scale_is_shared_and_not_moved():
    x, w, ct = data(1)
    config = DotConfig.qt("int8", per_tensor=True)
    sizes = sizes_of("uneven")
    out, dx, dw = step(x, w, sizes, ct, config)
    one = lambda a: octavo.quantize(a, "int8")  # noqa: E731
    close(out, loop(one(x), one(w), SIZES["uneven"]))
    close(dx, loop(one(ct), one(w).mT, SIZES["uneven"]))
    close(dw, transposed_loop(one(x), one(ct), SIZES["uneven"]))


@pytest.mark.parametrize("sizes", [[12, 12, 12, 12], [12, 0, 24, 0]])
def test_integers_are_bit_equal_to_one_dot_per_expert(sizes):
    x, w, ct = data(2)
    out, dx, dw = step(x, w, jnp.asarray(sizes), ct, INT8)

    @jax.jit
    def one(x, w, ct):
        out, pull = jax.vjp(lambda x, w: octavo.dot(x, w, config=INT8), x, w)
        return out, *pull(ct)

    for i, rows in enumerate(rows_of(sizes)):
        if rows.start < rows.stop:
            expected = one(x[rows], w[i], ct[rows])
            jax.tree.map(np.testing.assert_array_equal, (out[rows], dx[rows], dw[i]), expected)


@functools.partial(jax.jit, static_argnames="lowering")
def products(lhs, rhs, other, sizes, lowering):
    rows, options = Rows(lhs.shape[0], sizes), MatmulOptions(None, lowering=lowering)
    return (
        rows.keep(rows_by_groups(lhs, rhs, rows, options, contract=1)),
        rows.keep(rows_by_groups(other, rhs, rows, options, contract=2)),
        rows_by_rows(lhs, other, rows, options),
    )


@pytest.mark.codegen
@pytest.mark.parametrize("sizes", SIZES)
def test_lowerings_are_bit_identical_for_integers(sizes):
    rng = np.random.default_rng(0)
    codes = [jnp.asarray(rng.integers(-128, 128, s), jnp.int8) for s in ((M, K), (G, K, N), (M, N))]
    plain, *others = (products(*codes, sizes_of(sizes), name) for name in ("plain", "rows", "auto"))
    assert {out.dtype for out in plain} == {jnp.dtype(jnp.int32)}
    for out in others:
        jax.tree.map(np.testing.assert_array_equal, out, plain)


def test_many_blocks_per_group():
    rng = np.random.default_rng(0)
    sizes = jnp.asarray([130, 0, 300, 7, 128], jnp.int32)
    rows = Rows(600, sizes)
    lhs, rhs, other = (jnp.asarray(rng.integers(-128, 128, s), jnp.int8) for s in ((600, 16), (5, 16, 8), (600, 8)))
    out, transposed, outer = products(lhs, rhs, other, sizes, "rows")
    np.testing.assert_array_equal(out, loop(lhs, rhs, sizes))
    np.testing.assert_array_equal(transposed, loop(other, rhs.swapaxes(1, 2), sizes))
    np.testing.assert_array_equal(outer, transposed_loop(lhs, other, sizes))
    most = np.stack([np.abs(f64(other)[r]).max(0, initial=0) for r in rows_of(sizes)])
    np.testing.assert_array_equal(jax.jit(lambda x: group_absmax(x, rows))(other.astype(jnp.float32)), most)


@pytest.mark.parametrize(
    "recipe", slow_except(("int8", "float"), ["int8", "tensor", "qat", "fp8", "weight_only", "original", "float"])
)
def test_rows_of_no_group_influence_nothing(recipe):
    config = DotConfig.qt("int8", per_tensor=True) if recipe == "tensor" else RECIPES[recipe]
    x, w, ct = data(3)
    total = sum(SIZES["short"])

    def run(fill):
        tail = lambda a: a.at[total:].set(fill)  # noqa: E731
        return step(tail(x), w, sizes_of("short"), tail(ct), config)

    clean, poisoned = run(0.0), run(jnp.nan)
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.asarray(poisoned[0])[total:].any()
    assert not np.asarray(poisoned[1])[total:].any()


def test_tgmm_ignores_rows_of_no_group():
    x, _, ct = data(3)
    total = sum(SIZES["short"])
    for qtype in (None, "int8", "float8_e4m3fn"):
        parts = [a.at[total:].set(jnp.nan) for a in (x, ct)]
        if qtype is not None:
            parts = [octavo.quantize(a, qtype, channelwise_axes=(0,)) for a in parts]
        assert np.isfinite(tgmm(*parts, sizes_of("short"), rows_first=True)).all()


@pytest.mark.parametrize("qtype", slow_except(["int8"], ["int8", "float8_e4m3fn"]))
def test_a_broken_expert_breaks_its_own_rows_only(qtype):
    x, w, ct = data(3)
    config = DotConfig.qt(qtype)
    clean, broken = (step(x, w, sizes_of("uneven"), ct, config) for w in (w, w.at[1].set(jnp.nan)))
    mine = rows_of(SIZES["uneven"])[1]
    others = np.ones(M, bool)
    others[mine] = False
    assert np.isnan(broken[0][mine]).all()
    for a, b in zip(clean[:2], broken[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])


def test_all_three_products_are_of_int8():
    x, w, ct = data()
    types = dot_types(functools.partial(step, config=INT8), x, w, sizes_of("uneven"), ct)
    assert len(types) == 6  # three products, each as a loop for CPUs and as ragged_dot_general
    assert set(types) == {("int8", "int8", "int32")}


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize(
    ("qtype", "bwd", "found"), [("int8", None, {"i8"}), ("fp8", "float8_e5m2", {"f8E4M3FN", "f8E5M2"})]
)
def test_codes_reach_stablehlo(platform, qtype, bwd, found):
    x, w, ct = data()
    config = DotConfig.qt(qtype, bwd)
    run = jax.jit(functools.partial(step, config=config))
    text = jax.export.export(run, platforms=[platform])(x, w, sizes_of("uneven"), ct).mlir_module()
    ragged = re.findall(r'composite "chlo.ragged_dot".*: \(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>', text)
    dots = re.findall(r"stablehlo.dot_general .*: \(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>\)", text)
    assert len(ragged) == 3
    assert {t for pair in (*ragged, *dots) for t in pair} == found


@pytest.mark.slow
def test_a_stack_of_layers_by_scan_and_by_vmap():
    x, w, ct = data()
    sizes = jnp.stack([sizes_of("uneven"), sizes_of("short")])
    layers = jnp.stack([w, -w])
    one = lambda w, sizes: step(x, w, sizes, ct, INT8)  # noqa: E731
    expected = jax.tree.map(lambda *a: jnp.stack(a), *(one(layers[i], sizes[i]) for i in range(2)))
    scanned = jax.lax.scan(lambda c, a: (c, one(*a)), None, (layers, sizes))[1]
    for got in (scanned, jax.vmap(one)(layers, sizes)):
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    same = jax.vmap(lambda w: one(w, sizes[0])[0])(layers)  # only one operand has the axis
    np.testing.assert_array_equal(same[0], expected[0][0])


def test_experts_of_a_shard_under_shard_map():
    x, w, ct = data()
    sizes = sizes_of("short")
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))

    def shard(x, w, ct):
        offset = jax.lax.axis_index("expert") * (G // 2)
        run = lambda x, w: ragged_dot(x, w, sizes, group_offset=offset, config=INT8)  # noqa: E731
        out, pull = jax.vjp(run, jax.lax.pcast(x, "expert", to="varying"), w)
        dx, dw = pull(jax.lax.pcast(ct, "expert", to="varying"))
        return jax.lax.psum(out, "expert"), jax.lax.psum(dx, "expert"), dw

    got = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("expert"), P()), out_specs=(P(), P(), P("expert"))))
    for actual, expected in zip(got(x, w, ct), step(x, w, sizes, ct, INT8), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", slow_except(["int8"], ["int8", "weight", None]))
def test_group_offset_leaves_the_rows_of_other_groups_zero(name):
    x, w, _ = data()
    lhs, rhs = (x, w) if name is None else operands(name, x, w)
    whole = np.array(ragged_dot(lhs, rhs, sizes_of("short")))
    first, second = rows_of(SIZES["short"])[1].start, rows_of(SIZES["short"])[2].stop
    whole[:first], whole[second:] = 0, 0
    out = jax.jit(ragged_dot)(lhs, rhs[1:3], sizes_of("short"), group_offset=jnp.asarray(1))
    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-5)


def test_residuals_are_low_bit_and_named():
    x, w, ct = data(dtype=jnp.bfloat16)
    run = lambda x, w: ragged_dot(x, w, sizes_of("uneven"), config=INT8)  # noqa: E731
    policy = jax.checkpoint_policies.save_only_these_names(RESIDUAL)
    kept = jax.checkpoint(run, policy=policy)
    pull = jax.eval_shape(lambda: jax.vjp(run, x, w)[1])
    assert {leaf.dtype for leaf in jax.tree.leaves(pull) if leaf.size >= M * N} == {jnp.dtype(jnp.int8)}
    again = jax.jit(lambda: jax.vjp(kept, x, w)[1](ct))()
    jax.tree.map(np.testing.assert_array_equal, again, step(x, w, sizes_of("uneven"), ct, INT8)[1:])


def test_no_rows_at_all():
    x, w, ct = data()
    out, dx, dw = step(x[:0], w, sizes_of("none"), ct[:0], INT8)
    assert (out.shape, dx.shape) == ((0, N), (0, K))
    assert not np.asarray(dw).any()


def test_clipped_values_have_no_gradient():
    x, w, ct = data()
    clipped = Operand("int8", calibration="fixed,1")
    for clip in (True, False):
        config = DotConfig(Matmul(clipped, clipped), clip_gradient=clip)
        _, pull = jax.vjp(lambda x, w, c=config: ragged_dot(x, w, sizes_of("even"), config=c), x, w)
        for grad, value in zip(pull(ct), (x, w), strict=True):
            np.testing.assert_array_equal(np.asarray(grad)[np.abs(value) > 1] == 0, clip)


def test_stochastic_rounding_is_right_on_average():
    x, w, ct = data()
    rough = Operand("int4", rounding="stochastic")
    config = DotConfig(dlhs=Matmul(rough, residual="original"), drhs=Matmul(rough, residual="original"))

    def grads(key):
        return jax.vjp(lambda x, w: ragged_dot(x, w, sizes_of("short"), config=config, key=key), x, w)[1](ct)

    mean = jax.tree.map(lambda a: a.mean(0), jax.jit(jax.vmap(grads))(jax.random.split(jax.random.key(0), 256)))
    once = jax.jit(grads)(jax.random.key(1))
    exact = step(x, w, sizes_of("short"), ct, DotConfig())[1:]
    for average, single, truth in zip(mean, once, exact, strict=True):
        error = lambda a, t=truth: np.linalg.norm(a - t) / np.linalg.norm(t)  # noqa: E731
        assert error(average) < 0.1 * error(single)


@pytest.mark.parametrize("config", [INT8, DotConfig.qt("int8", per_tensor=True, calibration="fixed,4")])
def test_second_derivatives_raise(config):
    x, w, _ = data()
    run = lambda x, w: ragged_dot(x, w, sizes_of("even"), config=config)  # noqa: E731
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda x: jax.grad(lambda x: (run(x, w) ** 2).sum())(x).sum())(x)
    # The gradient of the output is constant here, and only the residual depends on x.
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda x: jax.grad(lambda w: run(x, w).sum())(w).sum())(x)


def test_the_gradient_of_a_float_operand_beside_codes():
    """LoRA and frozen experts: codes have no gradient, what they are multiplied with has, of any order."""
    x, w, ct = data()
    _, rhs = operands("weight", x, w)
    run = lambda x: ragged_dot(x, rhs, sizes_of("short"))  # noqa: E731
    close(jax.vjp(run, x)[1](ct)[0], loop(ct, rhs.mT, SIZES["short"]))
    second = jax.grad(lambda x: jax.grad(lambda x: (run(x) ** 3).sum())(x).sum())(x)
    assert np.isfinite(second).all()
    assert np.abs(second).max() > 0
    twice = jax.grad(lambda x: (tgmm(x, ct, sizes_of("short"), rows_first=True) ** 2).sum())(x)
    close(twice, 2 * loop(ct, transposed_loop(x, ct, SIZES["short"]).swapaxes(1, 2), SIZES["short"]))


def test_trackers_and_given_ranges():
    x, w, ct = data()
    operand = Operand("int8", per_tensor=True, tracker=AmaxHistory(2))
    config = DotConfig(Matmul(operand, operand), Matmul(operand), Matmul(operand))
    state = init_scaling(config, x, w, Ragged())
    assert set(state) == {"lhs", "rhs", "dlhs", "drhs"}
    run = lambda x, w, s: ragged_dot(x, w, sizes_of("short"), config=config, scaling=s)  # noqa: E731
    new = jax.vjp(run, x, w, state)[1](ct)[2]
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)
    seen = [float(jnp.max(leaf)) for leaf in jax.tree.leaves(new["lhs"])]
    assert max(seen) == pytest.approx(float(jnp.abs(x[: sum(SIZES["short"])]).max()))
    wide = {"lhs": {"absmax": jnp.full((1, 1), 8.0)}}
    given = ragged_dot(x, w, sizes_of("short"), config=DotConfig.qt("int8", per_tensor=True), scaling=wide)
    fixed = octavo.Quantizer("int8", calibration="fixed,8").quantize(x)
    close(given, loop(fixed, octavo.quantize(w, "int8"), SIZES["short"]))


@pytest.mark.parametrize(
    ("qtype", "residual"),
    slow_except([("int8", "reuse")], [("int8", "reuse"), ("int8", "requantize"), ("mxfp8", "reuse")]),
)
def test_tiled_operands_still_train(qtype, residual):
    x, w, ct = data()
    operand = Operand(qtype) if qtype == "mxfp8" else Operand(qtype, tile=16)
    gradient = Matmul(operand, operand, residual=residual)
    config = DotConfig(Matmul(operand, operand), gradient, gradient)
    actual, exact = (step(x, w, sizes_of("short"), ct, c) for c in (config, DotConfig()))
    for got, wanted in zip(actual, exact, strict=True):
        assert np.linalg.norm(got - wanted) < (0.02 if qtype == "int8" else 0.08) * np.linalg.norm(wanted)


def test_sparse_and_rotated_forward():
    x, w, _ = data()
    sparse = ragged_dot(x, w, sizes_of("even"), config=DotConfig(sparsity=(2, 4)))
    kept = jnp.where(octavo.ops.nm_mask(w, 2, 4, axis=1), w, jnp.zeros_like(w))
    close(sparse, loop(x, kept, SIZES["even"]))
    rotated = DotConfig(Matmul(BOTH, BOTH, rotate=16))
    outlier = x.at[:, 3].mul(50.0)
    exact = loop(outlier, w, SIZES["even"])
    error = lambda c: np.linalg.norm(ragged_dot(outlier, w, sizes_of("even"), config=c) - exact)  # noqa: E731
    assert error(rotated) < error(DotConfig.qat("int8"))


# The three modes of ragged_dot_general.


general = jax.jit(ragged_dot_general, static_argnums=3)


def numbers(contract, batch, ragged, group):
    return jax.lax.RaggedDotDimensionNumbers((contract, batch), ragged, group)


def test_ragged_dot_general_with_ragged_rows_in_any_order_of_axes():
    x, w, ct = data()
    lhs, rhs = operands("int8", x, w)
    how = numbers(((0,), (2,)), ((), ()), (1,), (1,))
    out = general(lhs.T, rhs.transpose(2, 0, 1), sizes_of("short"), how)
    np.testing.assert_array_equal(out, jax.jit(ragged_dot)(lhs, rhs, sizes_of("short")))

    @jax.jit
    def run(x, w):
        return jax.vjp(lambda x, w: ragged_dot_general(x, w, sizes_of("short"), how, config=INT8), x, w)[1](ct)

    _, dx, dw = step(x, w, sizes_of("short"), ct, INT8)
    expected = dx.T, dw.transpose(2, 0, 1)
    jax.tree.map(np.testing.assert_array_equal, run(x.T, w.transpose(2, 0, 1)), expected)


def test_ragged_dot_general_with_a_ragged_contraction_or_batch():
    x, _, ct = data()
    left, right = (octavo.quantize(a, "int8", channelwise_axes=(1,)) for a in (x, ct))
    out = general(left, right.T, sizes_of("short"), numbers(((0,), (1,)), ((), ()), (0,), ()))
    close(out, transposed_loop(left, right, SIZES["short"]))
    a, b = (octavo.quantize(v.reshape(3, 16, -1), "int8", channelwise_axes=(0, 1)) for v in (x, x))
    sizes = jnp.asarray([1, 2])
    out = general(a, b, sizes, numbers(((2,), (2,)), ((0,), (0,)), (0,), ()))
    close(out, np.einsum("bik,bjk->bij", f64(a), f64(b)))


def test_ragged_dot_general_with_batch_axes_dequantizes():
    x, w, _ = data()
    a = octavo.quantize(jnp.stack([x, -x]), "int8", channelwise_axes=(0, 1))
    b = octavo.quantize(jnp.stack([w, w]), "int8", channelwise_axes=(0, 1, 3))
    how = numbers(((2,), (2,)), ((0,), (0,)), (1,), (1,))
    out = general(a, b, jnp.stack([sizes_of("short"), sizes_of("even")]), how)
    for i, sizes in enumerate(("short", "even")):
        close(out[i], loop(a[i], b[i], SIZES[sizes]))


def test_plain_arrays_are_laxs_own():
    x, w, _ = data()
    np.testing.assert_array_equal(
        ragged_dot(x, w, sizes_of("short")), jax.lax.ragged_dot(x, w, sizes_of("short"), precision=None)
    )
    how = numbers(((0,), (0,)), ((), ()), (0,), ())
    np.testing.assert_array_equal(
        ragged_dot_general(x, x, sizes_of("short"), how), jax.lax.ragged_dot_general(x, x, sizes_of("short"), how)
    )


# What the peers get wrong.


def relative(actual, expected):
    return np.linalg.norm(np.asarray(actual) - expected) / np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_qwix_multiplies_the_indices_of_nf4():
    qwix = pytest.importorskip("qwix")
    x, w, _ = data()
    exact = loop(x, w, SIZES["even"])
    theirs = qwix.ragged_dot(
        qwix.quantize(x, "nf4", channelwise_axes=(0,)),
        qwix.quantize(w, "nf4", channelwise_axes=(2,)),
        sizes_of("even"),
    )
    assert relative(theirs, exact) > 100
    assert relative(ragged_dot(*operands("nf4", x, w), sizes_of("even")), exact) < 0.15


@pytest.mark.standard_promotion
def test_qwix_has_no_weight_only_ragged_dot():
    pytest.importorskip("qwix")
    from qwix._src.core.ragged_dot_qt import RaggedDotQtConfig, ragged_dot_qt

    x, w, _ = data()
    with pytest.raises(ValueError, match="None as qtype"):
        ragged_dot_qt(x, w, sizes_of("even"), RaggedDotQtConfig(lhs_qtype=None, rhs_qtype="int8"))
    ours = ragged_dot(x, w, sizes_of("even"), config=DotConfig.weight_only("int8"))
    assert relative(ours, loop(x, w, SIZES["even"])) < 0.01


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_qwix_shares_a_scale_among_experts():
    pytest.importorskip("qwix")
    from qwix._src.core.ragged_dot_qt import RaggedDotQtConfig, ragged_dot_qt

    x, w, ct = data()
    w = w.at[0].mul(0.01)
    small = rows_of(SIZES["even"])[0]
    exact = loop(x, w, SIZES["even"])[small]
    config = RaggedDotQtConfig(lhs_qtype="int8", rhs_qtype="int8", dlhs_grad_qtype="int8", drhs_grad_qtype="int8")
    theirs = ragged_dot_qt(x, w, sizes_of("even"), config)[small]
    out, pull = jax.vjp(lambda x, w: ragged_dot(x, w, sizes_of("even"), config=INT8), x, w)
    assert relative(out[small], exact) < 0.012
    assert relative(theirs, exact) > 20 * relative(out[small], exact)
    # The same for gradients: a group whose gradient is small keeps its precision.
    _, theirs = jax.vjp(lambda x, w: ragged_dot_qt(x, w, sizes_of("even"), config), x, w)
    ct = ct.at[small].mul(0.01)
    exact = transposed_loop(x, ct, SIZES["even"])[0]
    assert relative(pull(ct)[1][0], exact) < 0.015
    assert relative(theirs(ct)[1][0], exact) > 20 * relative(pull(ct)[1][0], exact)


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_aqt_has_no_gradient():
    pytest.importorskip("aqt")
    from aqt.jax.v2 import aqt_ragged_dot, config

    x, w, _ = data()
    theirs = lambda w: aqt_ragged_dot.ragged_dot(  # noqa: E731
        x, w, sizes_of("even"), cfg=config.config_v4(fwd_bits=8, dlhs_bits=8, drhs_bits=8)
    ).sum()
    with pytest.raises(IndexError):
        jax.grad(theirs)(w)
    assert jnp.isfinite(jax.grad(lambda w: ragged_dot(x, w, sizes_of("even"), config=INT8).sum())(w)).all()


# What is refused.


def test_a_config_next_to_a_qarray():
    x, w, ct = data()
    sizes = sizes_of("even")
    rhs = operands("int8", x, w)[1]
    want, pull = jax.vjp(lambda x, w: ragged_dot(x, w, sizes, config=INT8), x, w)
    out, vjp = jax.vjp(lambda x: ragged_dot(x, rhs, sizes, config=INT8), x)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_allclose(vjp(ct)[0], pull(ct)[0], rtol=1e-5, atol=1e-5)


def test_errors_say_what_to_do():
    x, w, ct = data()
    sizes = sizes_of("even")
    lhs, rhs = operands("int8", x, w)
    with pytest.raises(ValueError, match=r"lhs \[m, k\], rhs \[g, k, n\] and group_sizes \[g\]"):
        ragged_dot(x, w, sizes[:2])
    with pytest.raises(ValueError, match=r"rhs \[g, n, k\]"):
        gmm(x, w, sizes, transpose_rhs=True)
    with pytest.raises(ValueError, match=r"tgmm takes lhs \[k, m\]"):
        tgmm(x, ct, sizes)
    with pytest.raises(NotImplementedError, match="takes no out_sharding"):
        ragged_dot(lhs, rhs, sizes, out_sharding=P())
    with pytest.raises(ValueError, match="cannot be rotated"):
        ragged_dot(x, w, sizes, config=DotConfig(drhs=Matmul(residual="original", rotate=16)))
    with pytest.raises(ValueError, match="sums floats in float32"):
        ragged_dot(x, w, sizes, config=DotConfig(Matmul(accumulator="bfloat16")))
    with pytest.raises(ValueError, match="lowering is one of"):
        ragged_dot(x, w, sizes, config=INT8.replace(lowering="fast"))
    with pytest.raises(NotImplementedError, match="quantize the operands and leave the config out"):
        ragged_dot_general(x, x, sizes, numbers(((1,), (1,)), ((0,), (0,)), (0,), ()), config=INT8)
