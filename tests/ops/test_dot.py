"""The contract of a quantized matmul: recipe x dtype x axes, values and both gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import octavo
from octavo import DotConfig, Matmul, Operand, QArray, dot_general
from octavo.calibration import AmaxHistory, RunningMean
from octavo.ops import RESIDUAL, Dims, Dot, init_scaling, rotate
from tests.cases import slow_except
from tests.ops.walk import dot_types

SR = "stochastic"
RECIPES = {
    "int8": DotConfig.qt("int8"),
    "int8_qat": DotConfig.qat("int8"),
    "int8_tensor": DotConfig.qt("int8", per_tensor=True),
    "int8_tiled": DotConfig.qt("int8", tile=64),
    "int8_short_tiles": DotConfig.qt("int8", tile=16),
    "int8_local": DotConfig.qt("int8").replace(drhs=Matmul(Operand("int8", tile=1 / 2, tile_axis=0))),
    "int8_requantized": DotConfig(
        Matmul(Operand("int8"), Operand("int8")),
        Matmul(Operand("int8"), Operand("int8"), residual="requantize"),
        Matmul(Operand("int8"), Operand("int8"), residual="original"),
    ),
    "int8_minmax": DotConfig(Matmul(Operand("int8", calibration="minmax"), Operand("int8"))),
    "uint8_minmax": DotConfig(Matmul(Operand("uint8", calibration="minmax"), Operand("uint4", calibration="minmax"))),
    "int8_minmax_qt": DotConfig.qt("int8").replace(
        fwd=Matmul(Operand("int8", calibration="minmax"), Operand("int8", calibration="minmax"))
    ),
    "int8_fake": DotConfig.qt("int8").replace(
        fwd=Matmul(Operand("int8", dequant="input"), Operand("int8", dequant="input"))
    ),
    "int8_other": DotConfig(Matmul(Operand("int8", dequant="other"), Operand("int8"))),
    "int4": DotConfig.qt("int4"),
    "int2": DotConfig.qt("int2"),
    "ternary": DotConfig.weight_only("ternary", calibration="absmean"),
    "int1": DotConfig(Matmul(Operand("int8"), Operand("int1"))),
    "w8": DotConfig.weight_only("int8"),
    "w4_tiled": DotConfig.weight_only("int4", tile=32),
    "nf4": DotConfig.weight_only("nf4", tile=64),
    "fp8": DotConfig.qt("float8_e4m3fn", "float8_e5m2"),
    "fp8_fnuz": DotConfig.qt("float8_e4m3fnuz", "float8_e5m2fnuz"),
    "fp8_square": DotConfig.qt("float8_e4m3fn", tile=64, square=True),
    "fp8_deepseek": DotConfig(
        Matmul(Operand("fp8", tile=64), Operand("fp8", tile=64, square=True)),
        Matmul(Operand("fp8", tile=64)),
        Matmul(Operand("fp8", tile=64), Operand("fp8", tile=64), residual="requantize"),
    ),
    "fp4": DotConfig.qt("float4_e2m1fn"),
    "fp6": DotConfig.qt("float6_e2m3fn"),
    "mxfp8": DotConfig.qt("mxfp8"),
    "mxfp4": DotConfig.qt("mxfp4"),
    "mxint8": DotConfig.qt("mxint8"),
    "nvfp4": DotConfig.qt("nvfp4"),
    "int16": DotConfig.qt("int16"),
    "w4a8": DotConfig(Matmul(Operand("int8"), Operand("int4")), Matmul(Operand("int8")), Matmul(Operand("int8"))),
    "mixed": DotConfig(Matmul(Operand("int8"), Operand("fp8"))),
    "clipped": DotConfig.qt("int8", calibration="rms,2"),
    "rotated": DotConfig(
        Matmul(Operand("int4"), Operand("int4"), rotate=32),
        drhs=Matmul(Operand("int8"), Operand("int8"), residual="original", rotate=16),
    ),
    "sparse": DotConfig.qt("int8").replace(sparsity=(2, 4)),
    "bf16_sum": DotConfig(Matmul(Operand("fp8"), Operand("fp8"), accumulator="bfloat16")),
}
# One recipe for each code path: integers, tiles, new codes for gradients, zero points, float8, blocks, weights only.
CORE = ("int8", "int8_tiled", "int8_requantized", "int8_minmax_qt", "fp8", "nvfp4", "w4_tiled")
recipes = pytest.mark.parametrize("recipe", RECIPES)
PLAIN = (((1,), (0,)), ((), ()))
SHAPES = {
    "plain": ((128, 128), (128, 192), PLAIN),
    "batch": ((2, 128, 3, 32), (2, 64, 128), (((1,), (2,)), ((0,), (0,)))),
    "two": ((64, 32, 8), (8, 32, 128), (((2, 1), (0, 1)), ((), ()))),
    "transposed": ((128, 64), (64, 128), (((0,), (1,)), ((), ()))),
    "batch_last": ((64, 64, 2), (64, 2, 64), (((0,), (2,)), ((2,), (1,)))),
}


def data(shapes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


# The parts of the reference are compiled whole: one primitive after the other, a block format is two hundred programs.


@functools.partial(jax.jit, static_argnums=0)
def quantize(how, x):
    q = how.quantize(x)
    return q, q.dequantize(jnp.float32)


@functools.partial(jax.jit, static_argnums=2)
def fold(grad_in, q, transpose):
    """The gradient with the scale of the residual moved into it, and what is left of that; None if it cannot be."""
    folded = transpose.fold(grad_in, q, quantized=True)
    if folded is None:
        return None
    grad_in = folded[0].product() if hasattr(folded[0], "product") else folded[0]
    return grad_in, folded[1].dequantize(jnp.float32)


def fake(operand, x, contract, batch=()):
    """An operand as the matmul sees it: quantized, dequantized, in float64."""
    if operand is None:
        return np.asarray(x, np.float64)
    return np.asarray(quantize(operand.quantizer(x.ndim, contracting=contract, batch=batch), x)[1], np.float64)


def exact(lhs, rhs, dims):
    """A dot_general in float64."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    left, right = [next(letters) for _ in range(lhs.ndim)], [next(letters) for _ in range(rhs.ndim)]
    for a, b in zip(dims.lhs_contract + dims.lhs_batch, dims.rhs_contract + dims.rhs_batch, strict=True):
        right[b] = left[a]
    out = [left[a] for a in (*dims.lhs_batch, *dims.lhs_remaining)] + [right[a] for a in dims.rhs_remaining]
    return np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(out)}", lhs, rhs)


def reference(config, lhs, rhs, g, numbers):
    """Value and gradients by explicit fake quantization, one operand at a time, multiplied in float64."""
    product = Dot(Dims.of(numbers, lhs.ndim, rhs.ndim))
    dims = product.dims
    if config.sparsity:
        rhs = jnp.where(octavo.ops.nm_mask(rhs, *config.sparsity, axis=dims.rhs_contract[-1]), rhs, 0)
    sides = {
        "lhs": (config.fwd.lhs, lhs, dims.lhs_contract, dims.lhs_batch),
        "rhs": (config.fwd.rhs, rhs, dims.rhs_contract, dims.rhs_batch),
    }
    hat = {}
    for name, (operand, x, contract, batch) in sides.items():
        x = rotate(x, config.fwd.rotate, axis=contract[-1]) if config.fwd.rotate else x
        hat[name] = fake(operand, x, contract, batch)
    if config.fwd.lhs is not None and config.fwd.lhs.dequant == "other":
        how = config.fwd.lhs.quantizer(lhs.ndim, contracting=dims.lhs_contract, batch=dims.lhs_batch)
        q, _ = quantize(how, lhs)
        scale = np.asarray(q.scale, np.float32).T
        hat["lhs"] = np.asarray(q.qvalue, np.float64)
        hat["rhs"] = fake(config.fwd.rhs, rhs * scale, dims.rhs_contract)
    out = exact(hat["lhs"], hat["rhs"], dims)
    grads = []
    for name, matmul, of_lhs in (("rhs", config.dlhs, True), ("lhs", config.drhs, False)):
        operand, x, _, _ = sides[name]
        gradient = product.transpose(of_lhs)
        d = gradient.dims
        grad_in, residual = g, jnp.asarray(hat[name], jnp.float32)
        if matmul.residual == "original":
            residual = x
        if matmul.rotate:
            grad_in = rotate(grad_in, matmul.rotate, axis=d.lhs_contract[-1])
            residual = rotate(residual, matmul.rotate, axis=d.rhs_contract[-1])
        if matmul.residual == "reuse" and operand is not None and matmul.lhs is not None:
            q, _ = quantize(operand.quantizer(x.ndim, contracting=sides[name][2], batch=sides[name][3]), x)
            folded = fold(grad_in, q, gradient)
            if folded is None:
                residual = jnp.asarray(fake(matmul.rhs or operand, residual, d.rhs_contract, d.rhs_batch), jnp.float32)
            else:
                grad_in, residual = folded
        elif matmul.residual != "reuse":
            residual = jnp.asarray(fake(matmul.rhs, residual, d.rhs_contract, d.rhs_batch), jnp.float32)
        hat_g = fake(matmul.lhs, grad_in, d.lhs_contract, d.lhs_batch)
        residual = np.asarray(residual, np.float64)
        grad = exact(residual, hat_g, d.swap()) if gradient.swapped else exact(hat_g, residual, d)
        grad = np.transpose(grad, gradient.order)
        own = sides["lhs" if of_lhs else "rhs"]
        if own[0] is not None and own[0].calibration.may_clip and config.clip_gradient:
            how = own[0].quantizer(own[1].ndim, contracting=own[2], batch=own[3])
            grad = np.where(octavo.qarray.inside(how, own[1]), grad, 0)
        grads.append(grad)
    if config.sparsity:
        grads[1] = np.where(rhs != 0, grads[1], 0)
    return out, *grads


@functools.partial(jax.jit, static_argnames=("config", "numbers"))
def run(config, lhs, rhs, g, numbers, **kwargs):
    out, vjp = jax.vjp(functools.partial(dot_general, dimension_numbers=numbers, config=config, **kwargs), lhs, rhs)
    return out, *vjp(g.astype(out.dtype))


def out_shape(lhs, rhs, numbers):
    return jax.eval_shape(lambda a, b: jax.lax.dot_general(a, b, numbers), lhs, rhs).shape


@pytest.mark.parametrize(
    ("recipe", "shapes"),
    slow_except(
        [*((r, "plain") for r in CORE), *(("int8", s) for s in SHAPES)],
        # Any recipe with plain axes, and any axes with one recipe for each way in which axes matter.
        dict.fromkeys(
            [(r, "plain") for r in RECIPES]
            + [(r, s) for s in SHAPES for r in ("int8", "int8_tiled", "nvfp4", "fp8_square", "rotated")]
        ),
    ),
)
def test_values_and_gradients_equal_explicit_fake_quantization(recipe, shapes):
    config = RECIPES[recipe]
    a, b, numbers = SHAPES[shapes]
    lhs, rhs = data((a, b))
    (g,) = data([out_shape(lhs, rhs, numbers)], seed=1)
    got = run(config, lhs, rhs, g, numbers)
    want = reference(config, lhs, rhs, g, numbers)
    # float32 sums against float64; a code may fall the other way where float32 folds a scale into the gradient.
    tight = 2e-2 if recipe == "bf16_sum" else 3e-4 if recipe in ("int4", "int2", "fp4", "nvfp4", "mxfp4") else 2e-5
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert np.linalg.norm(np.asarray(x, np.float64) - y) <= tight * np.linalg.norm(y)
    if recipe in ("int8", "int8_tiled", "int8_requantized", "int8_minmax_qt", "int8_local"):
        # The reference shares the decision how a scale is moved, so the float product is asked as well: a scale on the
        # wrong axis would show here.
        out, vjp = jax.vjp(lambda a, b: jax.lax.dot_general(a, b, numbers), lhs, rhs)
        for x, y in zip(got, (out, *vjp(g)), strict=True):
            assert np.linalg.norm(x - y) <= 0.02 * np.linalg.norm(y)


@pytest.mark.parametrize("recipe", slow_except(("int8", "nvfp4"), RECIPES))
def test_low_precision_inputs(recipe):
    config = RECIPES[recipe]
    low = [(*data(SHAPES["plain"][:2], t), *data([(128, 192)], t, seed=1)) for t in (jnp.bfloat16, jnp.float16)]
    wide = jax.tree.map(lambda *xs: jnp.stack([x.astype(jnp.float32) for x in xs]), *low)
    step = max(2.0 ** -(o.qtype.bits - 1) for o in (config.fwd.lhs, config.fwd.rhs, config.dlhs.lhs) if o is not None)

    @jax.jit
    def both(low, wide):
        return [run(config, *x, PLAIN) for x in low], jax.lax.map(lambda x: run(config, *x, PLAIN), wide)

    every, want = both(low, wide)
    for i, (got, dtype) in enumerate(zip(every, (jnp.bfloat16, jnp.float16), strict=True)):
        for x, y in zip(got, (w[i] for w in want), strict=True):
            assert x.dtype == dtype
            assert np.isfinite(np.asarray(x, np.float32)).all()
            off = np.linalg.norm(np.asarray(x, np.float64) - np.asarray(y, np.float64)) / np.linalg.norm(y)
            # bfloat16 keeps scales in bfloat16, which moves some codes by one; the rest is the rounding of the result.
            assert off <= (step / 3 + 0.02 if dtype == jnp.bfloat16 else step / 30 + 2e-3)


def test_float16_does_not_overflow_on_the_way():
    """AQT bug 2: the int32 accumulator is cast to float16 before scaling, so 64 ones make infinity."""
    x, w = jnp.ones((8, 512), jnp.float16) * 8, jnp.ones((512, 8), jnp.float16)
    out = dot_general(x, w, PLAIN, config=RECIPES["int8"])
    np.testing.assert_allclose(out, 4096, rtol=1e-2)


INT8 = ("int8", "int8", "int32")


@pytest.mark.parametrize(
    ("recipe", "types"),
    [
        ("int8", {INT8}),
        ("int8_tiled", {INT8}),
        ("int8_requantized", {INT8}),
        ("int8_minmax_qt", {INT8}),
        ("int4", {INT8}),
        ("int2", {INT8}),
        ("int8_qat", {INT8, ("float32", "float32", "float32")}),
        ("int1", {INT8, ("float32", "float32", "float32")}),
    ],
)
def test_integer_matmuls_are_integers_in_the_jaxpr(recipe, types):
    lhs, rhs = data(SHAPES["plain"][:2])
    (g,) = data([(128, 192)], seed=1)
    found = dot_types(functools.partial(run, RECIPES[recipe], numbers=PLAIN), lhs, rhs, g)
    assert set(found) == types
    assert len(found) >= 3


ON_ACCELERATORS = {
    "int8": "i8", "int4": "i8", "int8_tiled": "i8", "fp8": "f8E4M3FN", "fp8_square": "f8E4M3FN",
    "fp8_fnuz": "f8E4M3FNUZ", "fp4": "bf16", "mxfp8": "f32",
}  # fmt: skip


@pytest.mark.parametrize("recipe", slow_except(("int8", "fp8", "fp4"), ON_ACCELERATORS))
def test_low_precision_operands_reach_stablehlo_for_accelerators(recipe):
    lhs, rhs = data(SHAPES["plain"][:2])
    (g,) = data([(128, 192)], seed=1)
    fn, operand = jax.jit(functools.partial(run, RECIPES[recipe], numbers=PLAIN)), ON_ACCELERATORS[recipe]
    dots = []
    for platform in ("tpu", "cuda"):
        text = jax.export.export(fn, platforms=[platform])(lhs, rhs, g).mlir_module()
        scaled = [line for line in text.splitlines() if 'stablehlo.composite "xla.scaled_dot"' in line]
        if recipe == "mxfp8" and platform == "cuda":
            assert [line.count("xf8E4M3FN>") for line in scaled] == [2, 2, 2]
        else:
            assert not scaled
            dots += [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(dots) == (3 if recipe == "mxfp8" else 6)
    for line in dots:
        inputs = line.split(" : ")[-1].split("->")[0]
        assert inputs.count(f"x{operand}>") + inputs.count("xf8E5M2>") + inputs.count("xf8E5M2FNUZ>") == 2, line


def test_fp8_gradients_are_e5m2_for_accelerators():
    lhs, rhs = data(SHAPES["plain"][:2])
    (g,) = data([(128, 192)], seed=1)
    fn = jax.jit(functools.partial(run, RECIPES["fp8"], numbers=PLAIN))
    text = jax.export.export(fn, platforms=["cuda"])(lhs, rhs, g).mlir_module()
    dots = [line.split(" : ")[-1] for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert sum("f8E5M2>" in d and "f8E4M3FN>" in d for d in dots) == 2


@pytest.mark.codegen
@pytest.mark.parametrize(
    ("recipe", "shapes"),
    [*(("int8", s) for s in SHAPES), *((r, "batch") for r in ("int4", "int8_tiled", "int8_minmax_qt", "int1"))],
)
def test_integer_lowerings_agree_bit_for_bit(recipe, shapes):
    a, b, numbers = SHAPES[shapes]
    lhs, rhs = data((a, b))
    (g,) = data([out_shape(lhs, rhs, numbers)], seed=1)
    got = [
        run(RECIPES[recipe].replace(lowering=name), lhs, rhs, g, numbers)
        for name in octavo.ops.lowerings()
        # For few rows, for block formats and for ragged dots: test_native.py, test_block_scaled.py, test_tokamax.py.
        if name not in ("kernel", "scaled", "tokamax")
    ]
    for other in got[1:]:
        jax.tree.map(np.testing.assert_array_equal, got[0], other)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_few_rows(rows):
    x, w = data([(rows, 256), (256, 64)])
    config = RECIPES["int8"]
    fast = jax.jit(lambda x, w: dot_general(x, w, PLAIN, config=config))(x, w)
    plain = jax.jit(lambda x, w: dot_general(x, w, PLAIN, config=config.replace(lowering="plain")))(x, w)
    np.testing.assert_array_equal(fast, plain)


REUSING = [n for n, c in RECIPES.items() if "original" not in (c.dlhs.residual, c.drhs.residual) and n != "int16"]


@pytest.mark.parametrize("recipe", slow_except(("int8", "fp8", "nvfp4"), REUSING))
def test_only_low_bit_residuals_are_saved(recipe):
    lhs, rhs = data(SHAPES["plain"][:2])
    residuals = jax.jit(lambda a, b: jax.vjp(lambda a, b: dot_general(a, b, PLAIN, config=RECIPES[recipe]), a, b)[1])
    vjp = jax.eval_shape(residuals, lhs, rhs)
    saved = [x for x in jax.tree.leaves(vjp) if getattr(x, "size", 0) > 4096 and x.dtype != bool]
    assert sum(x.size * x.dtype.itemsize for x in saved) <= lhs.size + rhs.size


def test_residuals_have_a_name_for_rematerialization():
    lhs, rhs = data(SHAPES["plain"][:2])
    policy = jax.checkpoint_policies.save_only_these_names(RESIDUAL)
    fn = jax.checkpoint(
        lambda a, b: jnp.sum(jnp.sin(dot_general(jnp.tanh(a), b, PLAIN, config=RECIPES["int8"]))), policy=policy
    )
    _, vjp = jax.vjp(fn, lhs, rhs)
    assert any(x.dtype == jnp.int8 and x.shape == (128, 128) for x in jax.tree.leaves(vjp))
    plain = jax.grad(lambda a, b: jnp.sum(jnp.sin(dot_general(jnp.tanh(a), b, PLAIN, config=RECIPES["int8"]))), (0, 1))
    for got, want in zip(jax.jit(jax.grad(fn, (0, 1)))(lhs, rhs), jax.jit(plain)(lhs, rhs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "recipe", slow_except(("int8", "nvfp4"), ["int8", "int8_tiled", "fp8", "nvfp4", "int8_minmax_qt", "clipped"])
)
def test_vmap_and_scan_equal_a_loop(recipe):
    config = RECIPES[recipe]
    lhs, rhs, g = data([(3, 64, 128), (3, 128, 64), (3, 64, 64)])
    one = functools.partial(run, config, numbers=PLAIN)
    loop = [one(lhs[i], rhs[i], g[i]) for i in range(3)]
    mapped = jax.jit(jax.vmap(one))(lhs, rhs, g)
    _, scanned = jax.jit(lambda *xs: jax.lax.scan(lambda c, x: (c, one(*x)), 0, xs))(lhs, rhs, g)
    for i in range(3):
        for together in (mapped, scanned):
            for x, y in zip(together, loop[i], strict=True):
                np.testing.assert_allclose(x[i], y, rtol=1e-5, atol=1e-4)


SPECS = {
    "rows and columns": (P("x", None), P(None, "y")),
    "contraction": (P(None, "x"), P("x", None)),
    "all": (P("x", "y"), P("y", None)),
}


@pytest.mark.parametrize(
    ("recipe", "specs"),
    slow_except(
        [("int8", "rows and columns"), ("nvfp4", "contraction")],
        [
            *(("int8", s) for s in SPECS),
            ("nvfp4", "contraction"),
            ("fp8", "contraction"),
            ("int8_tiled", "all"),
            ("w4_tiled", "all"),
        ],
    ),
)
def test_eight_devices_equal_one(recipe, specs):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    lhs, rhs = data(SHAPES["plain"][:2])
    (g,) = data([(128, 192)], seed=1)
    fn = jax.jit(functools.partial(run, RECIPES[recipe], numbers=PLAIN))
    want = fn(lhs, rhs, g)
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((lhs, rhs), SPECS[specs], strict=True)]
    got = fn(*placed, jax.device_put(g, NamedSharding(mesh, P("x", None))))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)


def test_shard_map_over_rows_equals_one_device():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    lhs, rhs = data(SHAPES["plain"][:2])

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("x", None), P()), out_specs=P("x", None))
    def forward(a, b):
        return dot_general(a, b, PLAIN, config=RECIPES["int8"])

    got = jax.jit(forward)(jax.device_put(lhs, NamedSharding(mesh, P("x", None))), rhs)
    np.testing.assert_array_equal(got, jax.jit(lambda a, b: dot_general(a, b, PLAIN, config=RECIPES["int8"]))(lhs, rhs))


def test_explicit_sharding_and_out_sharding_are_honoured():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    lhs, rhs = data(SHAPES["plain"][:2])
    with jax.set_mesh(mesh):
        a = jax.device_put(lhs, NamedSharding(mesh, P("x", None)))
        out = jax.jit(lambda a, b: dot_general(a, b, PLAIN, config=RECIPES["int8"]))(a, rhs)
        assert out.sharding.spec == P("x", None)
        contracted = jax.device_put(lhs, NamedSharding(mesh, P(None, "x")))
        weights = jax.device_put(rhs, NamedSharding(mesh, P("x", None)))
        summed = jax.jit(lambda a, b: dot_general(a, b, PLAIN, out_sharding=P("x", None), config=RECIPES["int8"]))
        got = summed(contracted, weights)
        assert got.sharding.spec == P("x", None)
    np.testing.assert_array_equal(got, dot_general(lhs, rhs, PLAIN, config=RECIPES["int8"]))


def test_gradients_and_transposed_einsums_on_an_explicit_mesh():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    lhs, rhs = data(SHAPES["plain"][:2])
    (g,) = data([(128, 192)], seed=1)
    want = run(RECIPES["int8"], lhs, rhs, g, PLAIN)
    with jax.set_mesh(mesh):
        rows = jax.device_put(lhs, NamedSharding(mesh, P("x", None)))
        there = jax.device_put(g, NamedSharding(mesh, P("x", None)))
        whole = jax.device_put(rhs, NamedSharding(mesh, P(None, None)))
        got = jax.jit(functools.partial(run, RECIPES["int8"], numbers=PLAIN))(rows, whole, there)
        assert [x.sharding.spec for x in got] == [P("x", None), P("x", None), P(None, None)]
        a = jax.device_put(lhs, NamedSharding(mesh, P(None, "x")))
        b = jax.device_put(rhs, NamedSharding(mesh, P("x", None)))
        turned = jax.jit(
            lambda a, b: octavo.einsum("ab,bc->ca", a, b, out_sharding=P("x", None), config=RECIPES["int8"])
        )
        out = turned(a, b)
        assert out.sharding.spec == P("x", None)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(out, want[0].T)


def test_preferred_element_type_and_precision_are_honoured():
    lhs, rhs = data(SHAPES["plain"][:2], jnp.bfloat16)
    out = dot_general(lhs, rhs, PLAIN, None, jnp.float32, config=RECIPES["int8"])
    assert out.dtype == jnp.float32
    text = str(jax.make_jaxpr(lambda a, b: dot_general(a, b, PLAIN, "highest", config=RECIPES["w8"]))(lhs, rhs))
    assert "HIGHEST" in text


def test_second_derivatives_raise_and_are_never_silent_zeros():
    """AQT's hessian runs and returns zeros."""
    x, w = data([(8, 16), (16, 8)])
    grad = jax.grad(lambda x: jnp.sum(dot_general(x, w, PLAIN, config=RECIPES["int8"]) ** 2))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda x: jnp.sum(grad(x)))(x)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.jvp(grad, (x,), (x,))
    # Here the incoming gradient is a constant, and only the residuals depend on the other operand.
    mixed = jax.grad(lambda w: jnp.sum(jax.grad(lambda x: jnp.sum(octavo.dot(x, w, config=RECIPES["int8"])))(x)))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        mixed(w)


@pytest.mark.slow
def test_stochastic_rounding_of_gradients_is_unbiased():
    config = DotConfig.qt("int8").replace(
        dlhs=Matmul(Operand("int4", rounding=SR)), drhs=Matmul(Operand("int4", rounding=SR))
    )
    lhs, rhs, g = data([(8, 16), (16, 8), (8, 8)])
    keys = jax.random.split(jax.random.key(0), 3000)
    _, dlhs, drhs = jax.jit(jax.vmap(lambda key: run(config, lhs, rhs, g, PLAIN, key=key)))(keys)
    exact = run(DotConfig.qt("int8", "int16"), lhs, rhs, g, PLAIN)
    for got, want in ((dlhs, exact[1]), (drhs, exact[2])):
        mean, error = got.mean(0), got.std(0) / np.sqrt(len(keys))
        assert np.all(np.abs(mean - want) <= 5 * error + 2e-3)
    with pytest.raises(ValueError, match="needs a random key"):
        run(config, lhs, rhs, g, PLAIN)


def test_static_ranges_enter_as_values():
    lhs, rhs = data(SHAPES["plain"][:2])
    config = RECIPES["int8"]
    bounds = {"lhs": {"absmax": jnp.full((1, 1), 2.0)}}
    out, dlhs, _ = run(config, lhs, rhs, jnp.ones((128, 192)), PLAIN, scaling=bounds)
    hat = octavo.Quantizer("int8").quantize(lhs, bounds=bounds["lhs"]).dequantize()
    right = octavo.quantize(rhs, "int8", channelwise_axes=(1,)).dequantize()
    np.testing.assert_allclose(out, hat @ right, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(dlhs)[np.abs(np.asarray(lhs)) > 2], 0)
    with pytest.raises(ValueError, match="ranges for lhs, rhs, dlhs and drhs"):
        run(config, lhs, rhs, jnp.ones((128, 192)), PLAIN, scaling={"left": bounds["lhs"]})


def test_delayed_scaling_state_comes_back_updated():
    tracker = AmaxHistory(length=3)
    operand = functools.partial(Operand, per_tensor=True, tracker=tracker)
    gradient = Matmul(operand("float8_e5m2"))
    config = DotConfig(Matmul(operand("float8_e4m3fn"), operand("float8_e4m3fn")), gradient, gradient)
    lhs, rhs = data(SHAPES["plain"][:2])
    state = init_scaling(config, lhs, rhs, PLAIN)
    assert {k: v["amax_history"].shape for k, v in state.items()} == dict.fromkeys(
        ["lhs", "rhs", "dlhs", "drhs"], (3, 1, 1)
    )

    @jax.jit
    def step(lhs, state):
        loss = lambda lhs, rhs, s: jnp.sum(dot_general(lhs, rhs, PLAIN, config=config, scaling=s) * 3)  # noqa: E731
        return jax.grad(loss, 2)(lhs, rhs, state)

    first = step(lhs, state)
    assert first["lhs"]["amax_history"][0].item() == np.abs(lhs).max()
    second = step(2 * lhs, first)
    np.testing.assert_array_equal(second["lhs"]["amax_history"].ravel(), [2 * np.abs(lhs).max(), np.abs(lhs).max(), 0])
    assert second["dlhs"]["amax_history"][0].item() > 0
    with pytest.raises(ValueError, match="need their state"):
        dot_general(lhs, rhs, PLAIN, config=config)
    mean = config.replace(fwd=Matmul(Operand("int8", per_tensor=True, tracker=RunningMean()), Operand("int8")),
                          dlhs=Matmul(residual="original"), drhs=Matmul(residual="original"))  # fmt: skip
    counted = jax.grad(lambda s: jnp.sum(dot_general(lhs, rhs, PLAIN, config=mean, scaling=s)), allow_int=True)(
        init_scaling(mean, lhs, rhs, PLAIN)
    )
    assert counted["lhs"]["sum_of_absmax"].item() == np.abs(lhs).max()


def test_a_cotangent_with_one_history_has_the_gradients_of_two():
    lhs, rhs = data(SHAPES["plain"][:2])
    wide = functools.partial(Operand, "int8", per_tensor=True)
    grads = []
    for length in (3, 4):
        matmuls = (Matmul(wide(tracker=AmaxHistory(n, initial=0.5))) for n in (3, length))
        config = DotConfig(Matmul(wide(), wide()), *matmuls)
        state = init_scaling(config, lhs, rhs, PLAIN)
        loss = lambda *args, config=config: jnp.sum(dot_general(*args[:2], PLAIN, config=config, scaling=args[2]) ** 2)  # noqa: E731
        for _ in range(2):
            *both, state = jax.jit(jax.grad(loss, (0, 1, 2)))(lhs, rhs, state)
        grads.append((*both, state["dlhs"], state["drhs"]["amax_history"][:3]))
    jax.tree.map(np.testing.assert_array_equal, *grads)
    np.testing.assert_array_equal(grads[0][2]["amax_history"], grads[0][3])


@pytest.mark.slow
@pytest.mark.compiler("tpu")
def test_tpus_round_and_measure_delayed_operands_in_one_pass():
    from octavo.hlo import compile_for, get_accelerator, read_cost

    operand = Operand("int8", per_tensor=True, tracker=AmaxHistory(3, initial=8.0))
    config = DotConfig(Matmul(operand, operand), Matmul(operand), Matmul(operand))
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    loss = lambda x, w, s: jnp.sum(dot_general(x, w, PLAIN, config=config, scaling=s))  # noqa: E731
    state = jax.eval_shape(lambda: init_scaling(config, x, x, PLAIN))
    ops = read_cost(compile_for(get_accelerator("v6e"), jax.grad(loss, (0, 1, 2)), x, x, state)).ops
    codes = [op.type for op in ops if "s8[1024,1024" in op.type]
    assert codes
    assert all("f32[]" in kind or "f32[1" in kind for kind in codes), codes


@pytest.mark.slow
@pytest.mark.compiler("tpu")
@pytest.mark.parametrize("tokens", [1024, 2048])
def test_tpus_measure_cotangents_where_attention_writes_them(tokens):
    from octavo.hlo import compile_for, get_accelerator, read_cost

    config = DotConfig.qt()

    def gradients(x, weights, scores, values):
        dot = lambda x, weights: [dot_general(x, w, PLAIN, config=config) for w in weights]  # noqa: E731
        heads = [jnp.einsum("nts,snh->tnh", p, values) for p in scores]
        return jax.vjp(dot, x, weights)[1]([g.reshape(len(g), -1) for g in heads])

    x, w = (jax.ShapeDtypeStruct((n, 512), jnp.bfloat16) for n in (tokens, 512))
    scores, values = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4, tokens, tokens), (tokens, 4, 128)))
    ops = read_cost(compile_for(get_accelerator("v6e"), gradients, x, [w, w], [scores, scores], values)).ops
    assert any("_product_bwd" in op.site for op in ops)
    assert not [op for op in ops if "_product_bwd" in op.site and op.site.endswith("reduce_max")]
    measured = [op.type.count("f32[") for op in ops if f"bf16[4,128,{tokens}]" in op.type and "f32[" in op.type]
    # Large ones each in its own matmul, small ones together in the last.
    assert measured == ([2, 2] if tokens * 512 >= octavo.ops.vjp.LARGE else [4])


def test_own_values_are_a_barrier_on_tpus_only():
    from octavo.ops.lowerings.xla import own_values

    x, scale = jnp.arange(6.0).reshape(2, 3), jnp.ones(3)
    traced = jax.jit(jax.vmap(lambda x, y: own_values(x, -y), in_axes=(0, None), out_axes=[0, None])).trace(x, scale)
    texts = [traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("tpu", "cpu", "cuda")]
    assert ["optimization_barrier" in text for text in texts] == [True, False, False]
    jax.tree.map(np.testing.assert_array_equal, jax.vmap(own_values, (0, None), [0, None])(x, scale), [x, scale])


def test_the_first_step_of_delayed_scaling_has_the_initial_range():
    tracker = AmaxHistory(length=3, initial=8.0)
    operand = Operand("int8", per_tensor=True, tracker=tracker)
    config = DotConfig(Matmul(operand, Operand("int8")), Matmul(), Matmul())
    lhs, rhs = data(SHAPES["plain"][:2])
    state = init_scaling(config, lhs, rhs, PLAIN)
    fixed = config.replace(fwd=Matmul(Operand("int8", per_tensor=True, calibration="fixed,8"), Operand("int8")))
    want = dot_general(lhs, rhs, PLAIN, config=fixed)
    np.testing.assert_array_equal(dot_general(lhs, rhs, PLAIN, config=config, scaling=state), want)
    loss = lambda s: jnp.sum(dot_general(lhs, rhs, PLAIN, config=config, scaling=s))  # noqa: E731
    assert jax.grad(loss)(state)["lhs"]["amax_history"][0].item() == np.abs(lhs).max()


# QArrays as operands.

KINDS = {
    "int8": octavo.Quantizer("int8", channelwise_axes=(1,)),
    "int4 packed": octavo.Quantizer("int4", channelwise_axes=(1,), tiled_axes={0: 64}),
    "uint4": octavo.Quantizer("uint4", channelwise_axes=(1,), tiled_axes={0: 32}, calibration="minmax"),
    "nf4": octavo.Quantizer("nf4", channelwise_axes=(1,), tiled_axes={0: 32}),
    "fp8": octavo.Quantizer("fp8", tiled_axes={0: 64, 1: 64}),
    "nvfp4": octavo.Quantizer("nvfp4", tiled_axes={0: 16}),
    "padded": octavo.Quantizer("int8", channelwise_axes=(1,), tiled_axes={0: 48}),
    "padded kept": octavo.Quantizer("int8", tiled_axes={1: 100}),
    "per row": octavo.Quantizer("int8", channelwise_axes=(0,)),
    "binary": octavo.Quantizer("binary", channelwise_axes=(1,), calibration="absmean"),
    "int16": octavo.Quantizer("int16", channelwise_axes=(1,)),
}


LEFT = ["array", "bfloat16", "int8", "fp8", "uint8", "mxfp4"]


@pytest.mark.parametrize(
    ("left", "right"),
    slow_except(
        [("array", "int8"), ("int8", "int8"), ("mxfp4", "nvfp4")],
        dict.fromkeys(
            [*((a, b) for a in ("array", "int8") for b in KINDS), *((a, b) for a in LEFT for b in ("int8", "nvfp4"))]
        ),
    ),
)
def test_any_mix_of_arrays_and_qarrays(left, right):
    x, w = data([(64, 128), (128, 192)])
    q = KINDS[right].quantize(w)
    q = q.pack() if "packed" in right else q
    a = {
        "array": lambda: x,
        "bfloat16": lambda: x.astype(jnp.bfloat16),
        "int8": lambda: octavo.quantize(x, "int8", channelwise_axes=(0,)),
        "fp8": lambda: octavo.quantize(x, "fp8", channelwise_axes=(0,)),
        "uint8": lambda: octavo.quantize(x, "uint8", channelwise_axes=(0,), calibration_method="minmax"),
        "mxfp4": lambda: octavo.quantize(x, "mxfp4"),
    }[left]()
    values = np.asarray(a.dequantize(jnp.float32) if isinstance(a, QArray) else a, np.float64)
    want = values @ np.asarray(q.dequantize(), np.float64)
    got = jax.jit(lambda a, q: octavo.dot(a, q, preferred_element_type=jnp.float32))(a, q)
    # A bfloat16 operand that has to be dequantized next to makes a bfloat16 matmul, whose products are exact.
    np.testing.assert_allclose(got, want, rtol=0, atol=(2e-2 if left == "bfloat16" else 1e-5) * np.abs(want).max())
    flipped = jax.jit(lambda q, a: dot_general(q, a, (((0,), (1,)), ((), ())), preferred_element_type=jnp.float32))(
        q, a
    )
    np.testing.assert_allclose(
        flipped, want.T, rtol=0, atol=(2e-2 if left == "bfloat16" else 1e-5) * np.abs(want).max()
    )


def test_gradients_flow_past_a_frozen_weight():
    x, w = data([(8, 64), (64, 32)])
    q = octavo.quantize(w, "int4", channelwise_axes=(1,), tiled_axes={0: 32})
    grad = jax.grad(lambda x: jnp.sum(octavo.dot(x, q)))(x)
    np.testing.assert_allclose(grad, jnp.broadcast_to(q.dequantize().sum(1), (8, 64)), rtol=1e-4, atol=1e-4)


def test_dot_has_numpy_semantics():
    for a, b in [((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)), ((2, 4), (3, 4, 5))]:
        x, y = data([a, b])
        np.testing.assert_allclose(octavo.dot(x, y), jnp.dot(x, y), rtol=1e-6)
        low = jax.eval_shape(lambda x, y: octavo.dot(x, y, config=RECIPES["int8"]), x, y)
        assert low.shape == jnp.dot(x, y).shape
    np.testing.assert_array_equal(octavo.dot(jnp.float32(2), jnp.ones(3)), np.full(3, 2.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Operand("int9"), "did you mean"),
        (lambda: Operand("int8", dequant="out"), "dequant is one of"),
        (lambda: Operand("int8", square=True), "need a tile size"),
        (lambda: Operand("int8", tile=64, dequant="other"), "no tile"),
        (lambda: Operand("int8", tile_axis=1), "tile_axis is -1"),
        (lambda: Operand("int8", tile=0), "positive integer"),
        (lambda: Operand("int8", calibration="minmax", tracker=RunningMean()), "symmetric"),
        (lambda: Matmul(residual="keep"), "residual is one of"),
        (lambda: Matmul(rotate=12), "power of two"),
        (lambda: Matmul(residual="requantize"), "needs rhs"),
        (lambda: Matmul(accumulator="int8"), "accumulator is"),
        (lambda: Matmul(Operand("int8", dequant="other"), Operand("int8", dequant="other")), "only one operand"),
        (lambda: DotConfig(Matmul(residual="original")), "no residual"),
        (lambda: DotConfig(Matmul(rotate=16), Matmul()), "rotated codes"),
        (lambda: DotConfig(dlhs=Matmul(rotate=16)), "cannot reuse codes"),
        (lambda: DotConfig(Matmul(Operand("int8", dequant="other")), Matmul()), "mixes the operands"),
        (lambda: DotConfig(sparsity=(4, 2)), "keeps n of m"),
        (lambda: octavo.dot(jnp.ones((2, 2)), jnp.ones((2, 2)), config=DotConfig.qt().replace(lowering="x")), "one of"),
        (lambda: octavo.dot(jnp.ones((2, 12)), jnp.ones((12, 2)), config=DotConfig(Matmul(rotate=16))), "not divide"),
    ],
)  # fmt: skip
def test_impossible_configs_cannot_be_built(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@recipes
def test_configs_print_and_round_trip_through_json(recipe):
    config = RECIPES[recipe]
    assert DotConfig.from_json(config.to_json()) == config
    assert hash(config) == hash(DotConfig.from_json(config.to_json()))
    assert repr(config).startswith("DotConfig(")


def test_narrow_activations_are_copied_before_they_are_widened_on_tpus():
    # Attention writes bfloat16 with transposed heads, which TPU's compiler would copy as float32.
    x, w = jax.ShapeDtypeStruct((2, 8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((16, 4), jnp.bfloat16)
    config = DotConfig.qt("int8")

    def loss(x, w):
        return jnp.sum(octavo.dot_general(x, w, (((2,), (0,)), ((), ())), config=config).astype(jnp.float32))

    def copies(fn, x, platform):
        text = jax.jit(fn).trace(x, w.update(dtype=x.dtype)).lower(lowering_platforms=(platform,)).as_text()
        return [
            line.split("->")[-1].strip() for line in text.splitlines() if "@LayoutConstraint" in line and "bf16" in line
        ]

    gradient = jax.grad(loss, argnums=(0, 1))
    assert copies(loss, x, "tpu") == ["tensor<1x2x8x16xbf16>"]
    assert copies(gradient, x, "tpu").count("tensor<1x2x8x4xbf16>") == 2  # for each gradient; XLA merges them
    # On CPUs only scales, of the dtype of the values, are constrained.
    assert set(copies(gradient, x, "cpu")) == {"tensor<2x8x1xbf16>", "tensor<1x4xbf16>"}
    assert not copies(loss, jax.ShapeDtypeStruct((2, 8, 16), jnp.float32), "tpu")
