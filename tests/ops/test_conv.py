"""The contract of a quantized convolution: geometry x recipe x format, values and both gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import octavo
from octavo import DotConfig, Matmul, Operand, Quantizer
from octavo.calibration import AmaxHistory
from octavo.ops import RESIDUAL, Conv, ConvDims, conv_general_dilated, init_scaling
from tests.cases import slow_except
from tests.ops.walk import dot_types, equations

INT8 = ("int8", "int8", "int32")
INTEGERS = ("int1", "int2", "int4", "int8", "ternary", "uint4", "uint8")
# lhs, rhs, and what lax.conv_general_dilated takes beside them.
NHWC = ("NHWC", "HWIO", "NHWC")
GEOMETRIES = {
    "plain": ((3, 4, 7, 6), (5, 4, 3, 2), {"padding": "VALID"}),
    "same": ((2, 7, 6, 4), (3, 3, 4, 5), {"padding": "SAME", "dimension_numbers": NHWC}),
    "same_lower": ((2, 7, 6, 4), (2, 4, 4, 5), {"padding": "SAME_LOWER", "dimension_numbers": NHWC}),
    "strided": ((2, 8, 7, 3), (3, 3, 3, 4), {"window_strides": (2, 3), "padding": "SAME", "dimension_numbers": NHWC}),
    "explicit": ((2, 3, 6, 5), (4, 3, 2, 3), {"padding": [(2, 1), (-1, 3)], "window_strides": (1, 2)}),
    "atrous": ((2, 9, 8, 3), (3, 2, 3, 4), {"padding": "SAME", "rhs_dilation": (2, 3), "dimension_numbers": NHWC}),
    "transposed": (
        (2, 4, 5, 3), (3, 4, 3, 4),
        {"padding": [(2, 1), (1, 2)], "lhs_dilation": (2, 3), "rhs_dilation": (1, 2), "dimension_numbers": NHWC},
    ),
    "chwn": ((3, 6, 5, 4), (2, 3, 2, 5), {"padding": "VALID", "dimension_numbers": ("CHWN", "HIWO", "HCNW")}),
    "rank1": ((3, 9, 4), (3, 4, 5), {"padding": "SAME", "dimension_numbers": ("NWC", "WIO", "NWC")}),
    "rank3": ((2, 3, 4, 5, 4), (4, 3, 2, 3, 2), {"window_strides": (1, 2, 1), "padding": "SAME"}),
    "grouped": (
        (2, 6, 6, 6), (3, 3, 2, 9),
        {"window_strides": (2, 1), "padding": "SAME", "dimension_numbers": NHWC, "feature_group_count": 3},
    ),
    "grouped_nchw": ((3, 4, 5, 6), (6, 2, 2, 3), {"padding": "VALID", "feature_group_count": 2}),
    "depthwise": ((2, 6, 5, 4), (3, 3, 1, 4), {"padding": "SAME", "dimension_numbers": NHWC, "feature_group_count": 4}),
    "multiplier": (
        (2, 6, 5, 3), (3, 2, 1, 6),
        {"padding": "VALID", "rhs_dilation": (2, 1), "dimension_numbers": NHWC, "feature_group_count": 3},
    ),
    "batch_groups": ((6, 3, 5, 4), (4, 3, 2, 2), {"padding": "VALID", "batch_group_count": 2}),
}  # fmt: skip


def geometry(name):
    """The shapes and the arguments of a convolution."""
    lhs, rhs, kwargs = GEOMETRIES[name]
    return lhs, rhs, {"window_strides": (1,) * (len(lhs) - 2)} | kwargs


def operands(name, seed=0, dtype=jnp.float32):
    """Both operands, a float convolution and a gradient of its output."""
    lhs, rhs, kwargs = geometry(name)
    rng = np.random.default_rng(seed)
    # Rows and channels of different size tell whether each found its own scale.
    draw = lambda shape: jnp.asarray(rng.normal(size=shape) * rng.uniform(0.5, 2, shape[-1]), dtype)  # noqa: E731
    x, w = draw(lhs), draw(rhs)
    conv = functools.partial(jax.lax.conv_general_dilated, **kwargs)
    return x, w, conv, draw(jax.eval_shape(conv, x, w).shape)


def assert_near(actual, expected, tolerance=1e-5):
    """Equal but for the rounding of sums, relative to the largest value."""
    actual, expected = (np.asarray(v, np.float64) for v in (actual, expected))
    assert actual.shape == expected.shape
    largest = np.abs(expected).max()
    assert largest > 0
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * largest)


def assert_close(actual, expected, tolerance):
    """Equal to within the rounding of a format, on the whole."""
    actual, expected = (np.asarray(v, np.float64) for v in (actual, expected))
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) < tolerance * np.linalg.norm(expected)


def both_gradients(fn, *args):
    """The value and the pullback of the two operands, compiled as one program."""

    @jax.jit
    def run(x, w, g):
        out, pull = jax.vjp(fn, x, w)
        return out, *pull(g)

    return run(*args)


@functools.partial(jax.jit, static_argnums=0)
def float_gradients(name, x, w, g):
    """The same of the float convolution, compiled once for a geometry."""
    out, pull = jax.vjp(functools.partial(jax.lax.conv_general_dilated, **geometry(name)[2]), x, w)
    return out, *pull(g)


def over_examples(scale, dims, out_shape):
    """The scale of each output's example, by the definition: a group of examples makes a group of features."""
    examples, features = out_shape[dims.out[0]], out_shape[dims.out[1]]
    width = features // dims.batch_groups
    index = np.asarray([[n + examples * (o // width) for o in range(features)] for n in range(examples)])
    shape = [out_shape[a] if a in dims.out[:2] else 1 for a in range(len(out_shape))]
    return scale.reshape(-1)[(index if dims.out[0] < dims.out[1] else index.T).reshape(shape)]


@functools.partial(jax.jit, static_argnums=0)
def reference(name, x, w, g):
    """Quantized training by hand: everything quantized and dequantized, every product in float."""
    lhs_shape, rhs_shape, kwargs = geometry(name)
    dims = ConvDims.of(lhs_shape, rhs_shape, **kwargs)
    conv = functools.partial(jax.lax.conv_general_dilated, **kwargs)

    def quantize(v, axis):
        return Quantizer("int8", channelwise_axes=(axis,)).quantize(v)

    xq, wq = quantize(x, dims.lhs[0]), quantize(w, dims.rhs[0])
    out = conv(xq.dequantize(), wq.dequantize())
    feature = [1] * g.ndim
    feature[dims.out[1]] = -1
    for_x = quantize(g * wq.scale.reshape(feature), dims.out[0]).dequantize()
    for_w = quantize(g * over_examples(xq.scale, dims, g.shape), dims.out[1]).dequantize()
    dx = jax.vjp(lambda v: conv(v, wq.qtype.decode(wq.qvalue)), x)[1](for_x)[0]
    dw = jax.vjp(lambda v: conv(xq.qtype.decode(xq.qvalue), v), w)[1](for_w)[0]
    return out, dx, dw


@pytest.mark.parametrize("name", slow_except(("same", "grouped", "batch_groups"), GEOMETRIES))
def test_training_equals_fake_quantization(name):
    x, w, _, g = operands(name)
    ours = functools.partial(conv_general_dilated, **geometry(name)[2], config=DotConfig.qt("int8"))
    expected = reference(name, x, w, g)
    for actual, wanted in zip(both_gradients(ours, x, w, g), expected, strict=True):
        assert_near(actual, wanted)
    assert dot_types(lambda x, w, g: jax.vjp(ours, x, w)[1](g), x, w, g) == [INT8] * 3


@pytest.mark.parametrize("seed", slow_except(range(2), range(10)))
def test_gradient_convolutions_are_exact_in_integers(seed):
    """Any layout, rank, stride, padding and dilation, with either kind of groups."""
    rng = np.random.default_rng(seed)
    rank, features = 1 + seed % 3, int(rng.choice([1, 2, 3]))
    batches = int(rng.choice([1, 2])) if features == 1 else 1
    per_group, outputs = rng.integers(1, 3, 2)
    sizes = dict(zip("XYZ", rng.integers(4, 7, rank), strict=False)) | {"N": 2 * batches, "C": features * per_group}
    kernel = dict(zip("XYZ", rng.integers(1, 4, rank), strict=False))
    kernel |= {"I": per_group, "O": features * batches * outputs}
    spatial = "XYZ"[:rank]
    specs = ["".join(rng.permutation(list(letters + spatial))) for letters in ("NC", "OI", "NC")]
    steps = lambda high: tuple(int(v) for v in rng.integers(1, high, rank))  # noqa: E731
    kwargs = {
        "window_strides": steps(4),
        "padding": [(int(low), int(high)) for low, high in rng.integers(0, 4, (rank, 2))],
        "lhs_dilation": steps(3),
        "rhs_dilation": steps(3),
        "dimension_numbers": tuple(specs),
        "feature_group_count": features,
        "batch_group_count": batches,
    }
    shapes = [sizes[c] for c in specs[0]], [kernel[c] for c in specs[1]]
    x, w = (jnp.asarray(rng.integers(-9, 10, shape), jnp.float32) for shape in shapes)
    conv = functools.partial(jax.lax.conv_general_dilated, **kwargs)
    g = jnp.asarray(rng.integers(-9, 10, jax.eval_shape(conv, x, w).shape), jnp.float32)
    assert g.size
    dims = ConvDims.of(x.shape, w.shape, **kwargs)

    @jax.jit
    def integers(x, w, g):
        x, w, g = (v.astype(jnp.int8) for v in (x, w, g))
        dx = dims.arrange(dims.dlhs()(g, dims.kernel(w), dtype=jnp.int32))
        return dims(x, w, dtype=jnp.int32), dx, dims.drhs()(x, g, dtype=jnp.int32)

    for actual, wanted in zip(integers(x, w, g), both_gradients(conv, x, w, g), strict=True):
        assert actual.shape == wanted.shape
        assert np.array_equal(actual, wanted.astype(jnp.int32))


MIXES = {
    "int8": (("int8", "absmax"), ("int8", "absmax")),
    "int8_int4": (("int8", "absmax"), ("int4", "absmax")),
    "int2": (("int2", "absmax"), ("int2", "absmax")),
    "int1": (("int8", "absmax"), ("int1", "absmax")),
    "ternary": (("int8", "absmax"), ("ternary", "absmean")),
    "minmax": (("int8", "minmax"), ("int8", "minmax")),
    "minmax_lhs": (("uint8", "minmax"), ("int8", "absmax")),
    "minmax_rhs": (("int4", "absmax"), ("uint4", "minmax")),
    "fp8": (("float8_e4m3fn", "absmax"), ("float8_e4m3fn", "absmax")),
    "fp8_mixed": (("float8_e4m3fn", "absmax"), ("float8_e5m2", "absmax")),
    "nf4": (("int8", "absmax"), ("nf4", "absmax")),
    "fp4_fp6": (("float4_e2m1fn", "absmax"), ("float6_e3m2fn", "absmax")),
    "int16": (("int16", "absmax"), ("int8", "absmax")),
    "weight_only": (None, ("int4", "absmax")),
    "weight_only_minmax": (None, ("uint8", "minmax")),
    "input_only": (("int8", "absmax"), None),
}


def quantized(x, how, axes):
    return x if how is None else octavo.quantize(x, how[0], channelwise_axes=axes, calibration_method=how[1])


def exact(conv, x, w):
    """The convolution of the dequantized operands in float64."""
    wide = [np.asarray(v.dequantize(jnp.float32) if isinstance(v, octavo.QArray) else v, np.float64) for v in (x, w)]
    with jax.enable_x64(True):
        return np.asarray(conv(*(jnp.asarray(v) for v in wide)))


@pytest.mark.parametrize("mix", slow_except(("int8", "minmax", "fp8", "weight_only"), MIXES))
def test_qarrays_in_any_mix(mix):
    for name in ("same", "grouped", "batch_groups") if mix == "minmax" else ("same",):
        x, w, conv, _ = operands(name, seed=1)
        # Zero points that are not in the middle.
        x, w = (x + 1.0, w - 0.5) if "minmax" in mix else (x, w)
        dims = ConvDims.of(*geometry(name)[:2], **geometry(name)[2])
        ours = functools.partial(conv_general_dilated, **geometry(name)[2])

        @jax.jit
        def run(x, w, dims=dims, ours=ours):
            results = []
            for axes in ((dims.lhs[0],), (dims.rhs[0],)), ((), ()):
                xq, wq = (quantized(v, how, a) for v, how, a in zip((x, w), MIXES[mix], axes, strict=True))
                results.append((xq, wq, ours(xq, wq)))
            return results

        for xq, wq, out in run(x, w):
            assert out.dtype == jnp.float32
            assert_near(out, exact(conv, xq, wq), 2e-6)
    types = dot_types(ours, xq, wq)
    if all(how is not None and how[0] in INTEGERS for how in MIXES[mix]):
        assert set(types) == {INT8}
    else:
        assert types[0][2] == "float32"


@pytest.mark.parametrize("kwargs", [{"channelwise_axes": (1,)}, {"tiled_axes": {3: 2}}, {"tiled_axes": {1: 3}}])
def test_other_granularities_are_dequantized(kwargs):
    x, w, conv, _ = operands("same")
    xq = octavo.quantize(x, "int8", **kwargs)  # axis 1, of 7 values, is padded to tiles of 3
    wq = octavo.quantize(w, "int4", channelwise_axes=(3,)).pack()
    out = conv_general_dilated(xq, wq, **geometry("same")[2])
    assert_near(out, exact(conv, xq, wq), 2e-6)


def test_tiles_of_examples_and_of_output_features():
    x, w, conv, _ = operands("plain")
    x, w = jnp.concatenate([x, x[:1]]), jnp.concatenate([w, w[:1]])
    xq, wq = octavo.quantize(x, "int8", tiled_axes={0: 2}), octavo.quantize(w, "int8", tiled_axes={0: 3})
    out = functools.partial(conv_general_dilated, **geometry("plain")[2])
    assert dot_types(out, xq, wq) == [INT8]
    assert_near(out(xq, wq), exact(conv, xq, wq), 2e-6)


def test_two_arrays_are_left_to_jax():
    x, w, conv, _ = operands("strided")
    assert np.array_equal(conv_general_dilated(x, w, **geometry("strided")[2]), conv(x, w))
    mixed = x.astype(jnp.bfloat16)
    with pytest.raises(TypeError, match="requires arguments to have the same dtypes"):
        conv_general_dilated(mixed, w, **geometry("strided")[2])


RECIPES = {
    "qat": DotConfig.qat("int8"),
    "tensor": DotConfig.qt("int8", per_tensor=True),
    "tensor_minmax": DotConfig.qt("int8", per_tensor=True, calibration="minmax"),
    "minmax": DotConfig.qt("int8", calibration="minmax"),
    "requantize": DotConfig(
        Matmul(Operand("int8"), Operand("int8")),
        Matmul(Operand("int8"), Operand("int8"), residual="requantize"),
        Matmul(Operand("int8"), Operand("int8"), residual="original"),
    ),
    "fp8": DotConfig.qt("float8_e4m3fn", "float8_e5m2"),
    "int4": DotConfig.qt("int4", "int8"),
    "input": DotConfig(
        Matmul(Operand("int8", dequant="input"), Operand("int8", dequant="input")),
        Matmul(Operand("int8", dequant="input"), residual="original"),
        Matmul(None, None, residual="reuse"),
    ),
    "weight_only": DotConfig.weight_only("int8"),
    "weight_reuse": DotConfig(Matmul(None, Operand("int8")), Matmul(Operand("int8")), Matmul(Operand("int8"))),
    "gradient_only": DotConfig(Matmul(), Matmul(Operand("int8"), residual="original")),
}
TOLERANCE = {"int4": 0.2, "fp8": 0.1}


@pytest.mark.parametrize("recipe", slow_except(("requantize", "fp8"), RECIPES))
def test_recipes(recipe):
    """Each recipe has the float gradients, to within its rounding, by products of the types that it says."""
    x, w, _, g = operands("grouped", seed=2)
    ours = functools.partial(conv_general_dilated, **geometry("grouped")[2], config=RECIPES[recipe])
    found, floats = both_gradients(ours, x, w, g), float_gradients("grouped", x, w, g)
    for actual, wanted in zip(found, floats, strict=True):
        assert_close(actual, wanted, TOLERANCE.get(recipe, 0.02))
    types = dot_types(lambda x, w, g: jax.vjp(ours, x, w)[1](g), x, w, g)
    if recipe == "qat":
        assert types == [INT8, *[("float32",) * 3] * 2]
        assert_near(found[1], floats[1], 1e-6)
        assert_near(found[2], floats[2], 1e-6)
    elif recipe in ("tensor", "requantize", "int4", "minmax", "tensor_minmax"):
        assert set(types) == {INT8}
        assert len(types) == 3 if "minmax" not in recipe else len(types) > 3


def test_asymmetric_training_equals_fake_quantization():
    """Zero points of examples cannot follow their scale into g: the residual gets new codes, also in integers."""
    x, w, conv, g = operands("grouped", seed=3)
    x = x + 1.0
    how = {"calibration": "minmax"}
    config = DotConfig.qt("int8").replace(fwd=Matmul(Operand("int8", **how), Operand("int8", **how)))
    ours = functools.partial(conv_general_dilated, **geometry("grouped")[2], config=config)

    @jax.jit
    def by_hand(x, w, g):
        def fake(v, *axes, **how):
            return Quantizer("int8", channelwise_axes=axes, **how).quantize(v).dequantize()

        xq, wq = fake(x, 0, **how), fake(w, 3, **how)
        # The residuals again: one scale per feature of the input, and per input feature and group of the kernel.
        x_again = fake(xq, 3, **how)
        w_again = fake(wq.reshape(3, 3, 2, 3, 3), 2, 3, **how).reshape(wq.shape)
        dx = jax.vjp(lambda v: conv(v, w_again), x)[1](fake(g, 0))[0]
        return conv(xq, wq), dx, jax.vjp(lambda v: conv(x_again, v), w)[1](fake(g, 3))[0]

    for actual, wanted in zip(both_gradients(ours, x, w, g), by_hand(x, w, g), strict=True):
        assert_near(actual, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype):
    x, w, _, g = operands("same", dtype=dtype)
    ours = functools.partial(conv_general_dilated, **geometry("same")[2], config=DotConfig.qt("int8"))
    found = both_gradients(ours, x, w, g)
    wide = reference("same", *(v.astype(jnp.float32) for v in (x, w, g)))
    for actual, wanted in zip(found, wide, strict=True):
        assert actual.dtype == dtype
        assert_near(actual, wanted, 2e-2 if dtype == jnp.bfloat16 else 2e-3)
    wide_out = functools.partial(ours, preferred_element_type=jnp.float32)
    assert wide_out(x, w).dtype == jnp.float32
    assert jax.grad(lambda x: jnp.sum(wide_out(x, w)))(x).dtype == dtype
    qat = functools.partial(wide_out, config=DotConfig.qat("int8"))
    assert jax.grad(lambda x: jnp.sum(qat(x, w)))(x).dtype == dtype


def test_float16_does_not_overflow():
    x, w = jnp.full((1, 64, 5, 5), 8.0, jnp.float16), jnp.full((1, 64, 3, 3), 8.0, jnp.float16)
    out = conv_general_dilated(x, w, (1, 1), "VALID", config=DotConfig.qt("int8"))
    assert_near(out, np.full((1, 1, 3, 3), 64.0 * 64 * 9), 1e-2)


def test_vmap_equals_a_loop():
    x, w, _, g = operands("grouped")
    ours = functools.partial(conv_general_dilated, **geometry("grouped")[2], config=DotConfig.qt("int8"))
    run = lambda x, w, g: (lambda out, pull: (out, *pull(g)))(*jax.vjp(ours, x, w))  # noqa: E731
    many = [jnp.stack([v, 2.0 * v[::-1]]) for v in (x, w, g)]
    together = jax.jit(jax.vmap(run))(*many)
    one = jax.jit(run)
    for i in range(2):
        for a, b in zip(together, one(*(v[i] for v in many)), strict=True):
            assert_near(a[i], b, 1e-6)


def test_only_low_precision_is_saved_for_the_gradient():
    x, w, _, _ = operands("same")
    ours = functools.partial(conv_general_dilated, **geometry("same")[2], config=DotConfig.qt("int8"))
    _, pull = jax.vjp(ours, x, w)
    large = [leaf.dtype for leaf in jax.tree.leaves(pull) if leaf.size >= w.size]
    assert large == [jnp.int8] * 2
    policy = jax.checkpoint_policies.save_only_these_names(RESIDUAL)
    kept = jax.make_jaxpr(jax.grad(lambda x, w: jnp.sum(jax.checkpoint(ours, policy=policy)(x, w))))(x, w)
    assert len(list(equations(kept, ("conv_general_dilated",)))) <= 3


def test_clip_mask_and_stochastic_rounding():
    x, w, _, _ = operands("same")
    clipped = Operand("int8", calibration="absmax,0.5")
    config = DotConfig.qt("int8").replace(fwd=Matmul(clipped, Operand("int8")))
    loss = lambda x, config, **kwargs: jnp.sum(  # noqa: E731
        conv_general_dilated(x, w, **geometry("same")[2], config=config, **kwargs)
    )
    grad = jax.jit(jax.grad(loss), static_argnums=1)(x, config)
    outside = np.abs(x) > 0.5 * np.abs(x).max(axis=(1, 2, 3), keepdims=True)
    assert outside.any()
    assert np.array_equal(np.asarray(grad) == 0, outside)
    unclipped = jax.jit(jax.grad(loss), static_argnums=1)(x, config.replace(clip_gradient=False))
    assert np.all(np.asarray(unclipped) != 0)

    noisy = DotConfig.qt("int8").replace(dlhs=Matmul(Operand("int4", rounding="stochastic")))
    with pytest.raises(ValueError, match="key"):
        jax.grad(loss)(x, noisy)
    drawn = jax.jit(lambda key: jax.grad(loss)(x, noisy, key=key))
    several = jnp.stack([drawn(key) for key in jax.random.split(jax.random.key(0), 32)])
    plain = jax.grad(loss)(x, DotConfig.qat("int8"))
    assert float(jnp.abs(several[0] - several[1]).max()) > 0
    assert_close(several.mean(0), plain, 0.05)


def test_ranges_from_outside_and_trackers():
    x, w, _, _ = operands("same")
    kwargs = geometry("same")[2]
    given = {"lhs": {"absmax": jnp.full((1, 1, 1, 1), 0.5)}}
    config = DotConfig.qt("int8", per_tensor=True)
    out = conv_general_dilated(x, w, **kwargs, config=config, scaling=given)
    clipped = conv_general_dilated(jnp.clip(x, -0.5, 0.5), w, **kwargs, config=config)
    assert_near(out, clipped, 1e-2)  # -0.5 may be the last code or the one before
    tracked = Operand("int8", per_tensor=True, tracker=AmaxHistory(4))
    config = DotConfig(Matmul(tracked, tracked), Matmul(tracked), Matmul(tracked))
    state = init_scaling(config, x, w, Conv(ConvDims.of(x.shape, w.shape, **kwargs)))
    assert set(state) == {"lhs", "rhs", "dlhs", "drhs"}
    loss = lambda state: jnp.sum(conv_general_dilated(x, w, **kwargs, config=config, scaling=state))  # noqa: E731
    new = jax.jit(jax.grad(loss))(state)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)
    assert float(jnp.max(new["lhs"]["amax_history"])) == float(jnp.abs(x).max())
    with pytest.raises(ValueError, match="trackers of"):
        conv_general_dilated(x, w, **kwargs, config=config)


REFUSED = {
    "has tiles of 32, but a convolution has one scale per example": DotConfig.qt("int8", tile=32),
    "fwd.lhs has tiles of 32": DotConfig.qt("mxfp8"),
    "fwd.lhs moves its scale into the other operand": DotConfig(Matmul(Operand("int8", dequant="other"))),
    "dlhs rotates its operands": DotConfig.qat("int8").replace(dlhs=Matmul(residual="original", rotate=4)),
    "no n:m sparsity": DotConfig.qt("int8").replace(sparsity=(2, 4)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_convolution_cannot_honour_raises(message):
    x, w, _, _ = operands("same")
    with pytest.raises(NotImplementedError, match=message):
        conv_general_dilated(x, w, **geometry("same")[2], config=REFUSED[message])


def test_a_config_next_to_a_qarray():
    x, w, _, _ = operands("same")
    kwargs, config = geometry("same")[2], DotConfig.qt("int8")
    want, pull = jax.vjp(lambda x, w: conv_general_dilated(x, w, **kwargs, config=config), x, w)
    dims = Conv(ConvDims.of(x.shape, w.shape, **kwargs)).dims
    q = config.fwd.rhs.quantizer(w.ndim, contracting=dims.rhs_contract, batch=dims.rhs_batch).quantize(w)
    out, vjp = jax.vjp(lambda x: conv_general_dilated(x, q, **kwargs, config=config), x)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_allclose(vjp(want)[0], pull(want)[0], rtol=1e-5, atol=1e-5)


def test_misuse_raises():
    x, w, _, _ = operands("same")
    kwargs, config = geometry("same")[2], DotConfig.qt("int8")
    with pytest.raises(ValueError, match="String padding is not implemented for transposed convolution"):
        conv_general_dilated(x, w, **kwargs, lhs_dilation=(2, 2), config=config)


@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_raise(power):
    """Also where the incoming gradient is constant, and only the residuals depend on the operands."""
    x, w, _, _ = operands("same")
    loss = lambda x, w: jnp.sum(  # noqa: E731
        conv_general_dilated(x, w, **geometry("same")[2], config=DotConfig.qt("int8")) ** power
    )
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.eval_shape(jax.grad(lambda w: jnp.sum(jax.grad(loss)(x, w))), w)


def test_lowers_to_low_precision_for_tpu_and_cuda():
    x, w, _, g = operands("grouped")
    for fmt, types in (("int8", ("xi8>", "xi32>")), ("float8_e4m3fn", ("xf8E4M3FN>", "xf32>"))):
        ours = functools.partial(conv_general_dilated, **geometry("grouped")[2], config=DotConfig.qt(fmt))
        fn = jax.jit(lambda x, w, g, ours=ours: jax.vjp(ours, x, w)[1](g))
        forward = jax.jit(ours)
        for platform in ("tpu", "cuda"):
            for traced, count in ((fn, 2), (forward, 1)):
                text = jax.export.export(traced, platforms=[platform])(*(x, w, g)[: 3 if count == 2 else 2])
                convs = [line for line in text.mlir_module().splitlines() if "stablehlo.convolution" in line]
                assert len(convs) >= count
                for line in convs:
                    assert line.count(types[0]) == 2, line
                    assert types[1] in line.rsplit("->", 1)[1], line


@pytest.mark.parametrize("config", [DotConfig.qt("int8"), DotConfig.qat("int8")])
@pytest.mark.parametrize("name", ["grouped", "depthwise"])
def test_qwix_c4_grouped_and_depthwise_gradients(name, config):
    """Qwix passes the group count straight through to the gradient, which crashes."""
    x, w, _, g = operands(name)
    ours = functools.partial(conv_general_dilated, **geometry(name)[2], config=config)
    for actual, wanted in zip(both_gradients(ours, x, w, g), float_gradients(name, x, w, g), strict=True):
        assert_close(actual, wanted, 0.02)


def test_qwix_c5_weight_only_convolution():
    """Qwix needs both operands in one type; here the weight alone can be in low precision, also to train through."""
    x, w, conv, g = operands("same", dtype=jnp.bfloat16)
    wq = octavo.quantize(w, "int4", channelwise_axes=(3,))
    ours = functools.partial(conv_general_dilated, **geometry("same")[2])
    out, pull = jax.vjp(lambda x: ours(x, wq), x)
    wide = lambda x: conv(x, wq.dequantize(jnp.float32))  # noqa: E731
    expected, expected_pull = jax.vjp(wide, x.astype(jnp.float32))
    assert out.dtype == jnp.bfloat16
    assert_near(out, expected, 1e-2)
    assert_near(pull(g)[0], expected_pull(g.astype(jnp.float32))[0], 2e-2)


def test_aqt_9_gradient_is_not_zero():
    """In AQT the gradient through a quantized convolution is zero, and its forward is not in integers."""
    x, w, _, _ = operands("same")
    loss = lambda x, w: jnp.sum(  # noqa: E731
        jnp.square(conv_general_dilated(x, w, **geometry("same")[2], config=DotConfig.qt("int8")))
    )
    for grad in jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w):
        assert float(jnp.mean((grad != 0).astype(jnp.float32))) > 0.95


@pytest.mark.slow
def test_qwix_c13_out_sharding_is_not_taken_for_precision():
    x, w, _, _ = operands("same")
    x = jnp.concatenate([x] * 4)
    kwargs = geometry("same")[2]
    positional = [kwargs["window_strides"], kwargs["padding"], None, None, NHWC, 1, 1, "highest", None]
    for config in (DotConfig.qt("int8"), DotConfig.qt("int8", calibration="minmax"), DotConfig.weight_only("int8")):
        alone = functools.partial(conv_general_dilated, config=config)
        expected = both_gradients(lambda x, w: alone(x, w, *positional), x, w, jnp.ones((8, 7, 6, 5)))  # noqa: B023
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh):
            args = [
                jax.device_put(np.asarray(v), s)
                for v, s in ((x, P("data")), (w, P()), (np.ones((8, 7, 6, 5), "f4"), P("data")))
            ]
            ours = lambda x, w: alone(x, w, *positional, P("data"))  # noqa: B023, E731
            found = both_gradients(ours, *args)
            main = next(equations(jax.make_jaxpr(ours)(*args[:2]), ("conv_general_dilated",)))
        assert [v.sharding.spec[0] for v in found] == ["data", "data", None]
        for actual, wanted in zip(found, expected, strict=True):
            assert_near(actual, wanted, 1e-6)
        assert main.params["out_sharding"].spec[0] == "data"
        assert (main.params["precision"] is not None) == (config.fwd.lhs is None)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", slow_except(("same",), ["same", "strided", "transposed", "chwn"]))
def test_equals_qwix(name):
    """Forward and both gradients, where Qwix has them: one group."""
    qt = pytest.importorskip("qwix._src.core.conv_general_qt", reason="the oracles group is not installed")
    x, w, _, g = operands(name, seed=4)
    _, _, kwargs = geometry(name)
    config = qt.ConvGeneralQtConfig(
        lhs_qtype=jnp.int8, rhs_qtype=jnp.int8, dlhs_grad_qtype=jnp.int8, drhs_grad_qtype=jnp.int8
    )
    theirs = lambda x, w: qt.conv_general_qt(x, w, config, **kwargs)  # noqa: E731
    ours = functools.partial(conv_general_dilated, **kwargs, config=DotConfig.qt("int8"))
    for actual, wanted in zip(both_gradients(ours, x, w, g), both_gradients(theirs, x, w, g), strict=True):
        assert_near(actual, wanted, 1e-5)
