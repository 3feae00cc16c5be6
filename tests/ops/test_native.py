"""When a product runs in a native kernel, and that it is the same product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import octavo
from octavo import kernels
from octavo.hlo import read_communication
from octavo.ops import Dims
from octavo.ops.lowerings import describe, multiply
from octavo.ops.operands import MatmulOptions
from tests.cases import slow_except

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.status())

DEPTH, COLUMNS = 256, 192
UNIT = 2.0**-24


def weight(shape=(DEPTH, COLUMNS), seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def rows(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(1).standard_normal((*shape, DEPTH)), dtype)


def quantized(name, *, group=None, transposed=False, **how):
    axis = 1 if transposed else 0
    tiles = {"tiled_axes": {axis: group}} if group else {}
    q = octavo.quantize(weight().T if transposed else weight(), name, channelwise_axes=(1 - axis,), **tiles, **how)
    return q.pack(axis)


def dims_of(x, q, transposed=False):
    return Dims.of((((x.ndim - 1,), (1 if transposed else 0,)), ((), ())), x.ndim, q.ndim)


@functools.partial(jax.jit, static_argnums=(2, 3))
def run(x, q, dims, lowering):
    return multiply(x, q, dims, MatmulOptions(jnp.float32, lowering=lowering))


def text(x, q, dims, *, platform="cpu", lowering="auto"):
    lowered = run.trace(x, q, dims, lowering).lower(lowering_platforms=(platform,))
    return lowered.as_text()


def bound(x, q, dims):
    """On the difference of two float32 sums, in any order, of what is multiplied."""
    absolute = jax.lax.dot_general(jnp.abs(x.astype(jnp.float32)), jnp.abs(q.dequantize(jnp.float32)), dims.numbers)
    return 4 * (DEPTH + 8) * UNIT * np.asarray(absolute)


KINDS = {
    "int8": ("int8", {}),
    "int8 in groups": ("int8", {"group": 64}),
    "int4 in groups of 32": ("int4", {"group": 32}),
    "int4 per channel": ("int4", {}),
    "int4 with float16 scales": ("int4", {"group": 32, "scale_dtype": "float16"}),
    "nf4": ("nf4", {"group": 64}),
    "mxfp4": ("mxfp4", {"group": 32}),
    "nvfp4": ("nvfp4", {"group": 16}),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", slow_except(("int8", "int4 in groups of 32"), KINDS))
def test_the_kernel_agrees_with_the_plain_product(kind, transposed):
    name, how = KINDS[kind]
    how = dict(how)
    scale_dtype = how.pop("scale_dtype", None)
    q = quantized(name, transposed=transposed, **how)
    if scale_dtype:
        q = octavo.QArray(q.qvalue, q.scale.astype(scale_dtype), None, q.qtype, dtype=jnp.float32, packed=q.packed)
    x = rows(2, 3)
    dims = dims_of(x, q, transposed)
    assert "octavo_float_matvec" in text(x, q, dims)
    got, wanted = run(x, q, dims, "auto"), run(x, q, dims, "plain")
    assert got.shape == (2, 3, COLUMNS)
    assert np.all(np.abs(np.asarray(got - wanted)) <= bound(x, q, dims))
    assert describe(x, q, dims) == f"{name} weights, CPU kernel"


TILED = {
    "int8 rows in groups, int4 in groups": (32, "int4", {"group": 32}),
    "int8 rows in groups, int8 per channel": (32, "int8", {}),
    "int8 rows in larger groups": (128, "int4", {"group": 32}),
    "int8 rows with one scale each": (None, "int4", {"group": 64}),
}


def int8_rows(*shape, group=32):
    tiled = {} if group is None else {"tiled_axes": {len(shape): group}}
    return octavo.quantize(rows(*shape), "int8", channelwise_axes=range(len(shape)), **tiled)


@pytest.mark.parametrize("case", TILED)
def test_codes_in_groups_times_codes(case):
    row_group, name, how = TILED[case]
    x, q = int8_rows(2, 33, group=row_group), quantized(name, **how)
    dims = dims_of(x, q)
    assert "octavo_tiled_matmul" in text(x, q, dims)
    assert "octavo_" not in text(x, q, dims, platform="tpu")
    got, wanted = run(x, q, dims, "auto"), run(x, q, dims, "plain")
    assert got.shape == (2, 33, COLUMNS)
    assert np.all(np.abs(np.asarray(got - wanted)) <= bound(x.dequantize(), q, dims))
    assert describe(x, q, dims) == f"int8 x {name} in tiles, CPU kernel"


def test_codes_in_groups_that_the_kernel_does_not_multiply():
    x = int8_rows(3)
    for q, transposed in (
        (quantized("nf4", group=32), False),
        (quantized("int4", group=32, transposed=True), True),
        (quantized("int4", group=32, calibration_method="minmax"), False),
    ):
        dims = dims_of(x, q, transposed)
        assert "octavo_tiled_matmul" not in text(x, q, dims)
        np.testing.assert_allclose(run(x, q, dims, "auto"), run(x, q, dims, "plain"), rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="lowering='kernel'"):
            run(x, q, dims, "kernel")


def test_gradients_of_codes_in_groups():
    """With respect to scales, as of the dequantized product."""
    x, q = int8_rows(3), quantized("int4", group=32)
    dims = dims_of(x, q)

    def total(scale, lowering):
        low = octavo.QArray(x.qvalue, scale, None, x.qtype, dtype=x.dtype)
        return jnp.sum(run(low, q, dims, lowering) ** 2)

    got, wanted = (jax.grad(total)(x.scale, lowering) for lowering in ("auto", "plain"))
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


@pytest.mark.parametrize("name", ["int8", "uint4"])
def test_zero_points_are_taken_off(name):
    q = octavo.quantize(
        weight() + 1.0, name, channelwise_axes=(1,), tiled_axes={0: 32}, calibration_method="minmax"
    ).pack(0)
    assert q.zero_point is not None
    x = rows(4)
    dims = dims_of(x, q)
    assert "octavo_float_matvec" in text(x, q, dims)
    difference = np.abs(np.asarray(run(x, q, dims, "auto") - run(x, q, dims, "plain")))
    codes = jnp.abs(x) @ (jnp.full(q.shape, 255.0) * jnp.repeat(q.scale, 32, axis=0))
    assert np.all(difference <= 4 * (DEPTH + 8) * UNIT * np.asarray(codes))


def test_a_depth_that_tiles_do_not_divide():
    q = octavo.quantize(weight((250, COLUMNS)), "int4", channelwise_axes=(1,), tiled_axes={0: 32}).pack(0)
    assert q.padding
    x = rows(2)[:, :250]
    dims = dims_of(x, q)
    assert "octavo_float_matvec" in text(x, q, dims)
    np.testing.assert_allclose(run(x, q, dims, "auto"), run(x, q, dims, "plain"), rtol=1e-4, atol=1e-4)


def test_heads_are_columns_and_contracted_heads_are_rows():
    q = octavo.quantize(weight((DEPTH, 6, 32)), "int4", channelwise_axes=(1, 2), tiled_axes={0: 32}).pack(0)
    x = rows(3)
    dims = dims_of(x, q)
    assert "octavo_float_matvec" in text(x, q, dims)
    np.testing.assert_allclose(run(x, q, dims, "auto"), run(x, q, dims, "plain"), rtol=1e-4, atol=1e-4)
    q = octavo.quantize(weight((8, 32, COLUMNS)), "int4", channelwise_axes=(2,), tiled_axes={1: 16}).pack(1)
    dims = Dims.of((((1, 2), (0, 1)), ((), ())), 3, 3)
    x = rows(3).reshape(3, 8, 32)
    assert "octavo_float_matvec" in text(x, q, dims)
    np.testing.assert_allclose(run(x, q, dims, "auto"), run(x, q, dims, "plain"), rtol=1e-4, atol=1e-4)


def test_other_platforms_get_no_custom_call():
    x, q = rows(1), quantized("int4", group=32)
    for platform in ("tpu", "cuda"):
        assert "octavo_" not in text(x, q, dims_of(x, q), platform=platform)


def test_without_the_library_the_numbers_are_the_same(monkeypatch):
    x, q = rows(2), quantized("int4", group=32)
    dims = dims_of(x, q)
    with kernels.disabled():
        assert "octavo_" not in text(x, q, dims)
        assert describe(x, q, dims) == "dequantized"
        without = run(x, q, dims, "auto")
    assert np.all(np.abs(np.asarray(run(x, q, dims, "auto") - without)) <= bound(x, q, dims))
    monkeypatch.setattr(kernels.library, "load", lambda: kernels.library.Library(problem="not built: build it"))
    jax.clear_caches()
    assert "octavo_" not in text(x, q, dims)
    np.testing.assert_array_equal(run(x, q, dims, "auto"), without)
    jax.clear_caches()


def test_bfloat16_rows_are_multiplied_in_float32():
    x, q = rows(2, dtype=jnp.bfloat16), quantized("int8")
    dims = dims_of(x, q)
    difference = np.abs(np.asarray(run(x, q, dims, "auto") - run(x.astype(jnp.float32), q, dims, "plain")))
    assert np.all(difference <= bound(x, q, dims))
    assert octavo.dot(x, q.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_gradients_are_those_of_the_plain_product():
    x, q = rows(2), quantized("int4", group=32)
    dims = dims_of(x, q)

    def loss(x, scale, lowering):
        y = run(x, q._replace(scale=scale), dims, lowering)
        return jnp.sum(jnp.sin(y))

    for got, wanted in zip(*(jax.grad(loss, (0, 1))(x, q.scale, how) for how in ("auto", "plain")), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)


def test_vmap_and_scan():
    x, q = rows(3, 2), quantized("int8")
    dims = dims_of(x[0], q)
    wanted = np.stack([run(each, q, dims, "auto") for each in x])
    np.testing.assert_allclose(jax.vmap(lambda x: run(x, q, dims, "auto"))(x), wanted, rtol=1e-5, atol=1e-5)
    scanned = jax.lax.scan(lambda _, x: (None, run(x, q, dims, "auto")), None, x)[1]
    np.testing.assert_allclose(scanned, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_integers_are_bit_equal(transposed):
    x = octavo.quantize(rows(3), "int8", channelwise_axes=(0,))
    q = quantized("int8", transposed=transposed)
    dims = dims_of(x, q, transposed)
    assert "octavo_int_matvec" in text(x, q, dims)
    assert describe(x, q, dims) == "int8 -> int32, CPU kernel"
    np.testing.assert_array_equal(run(x, q, dims, "auto"), run(x, q, dims, "plain"))
    np.testing.assert_array_equal(run(x, q, dims, "kernel"), run(x, q, dims, "plain"))


def test_verify_counts_what_the_kernel_does():
    x, q = rows(2), quantized("int4", group=32)
    found = octavo.verify(lambda x: octavo.dot(x, q), x)
    (product,) = found.matmuls
    assert (product.kind, product.flops, found.opaque) == ("weight_only", 2 * 2 * DEPTH * COLUMNS, ())


def small(name="int8"):
    return octavo.quantize(jnp.ones((8, 4)), name, channelwise_axes=(1,))


def test_small_products_stay_with_xla_unless_they_are_forced():
    x, q = jnp.ones((2, 8)), small()
    dims = dims_of(x, q)
    assert "octavo_" not in text(x, q, dims)
    assert "octavo_" in text(x, q, dims, lowering="kernel")


PACKED = octavo.quantize(jnp.ones((8, 4)), "int4", channelwise_axes=(1,)).pack(0)
REFUSED = {
    "rows": (jnp.ones((65, 8)), small(), "1 to 64 rows, got an operand of shape \\(65, 8\\) with 65"),
    "unpacked": (jnp.ones((1, 8)), small("int4"), "packed along the contraction for the kernel: QArray.pack"),
    "type": (jnp.ones((1, 8)), small("float8_e4m3fn"), "takes int8 and packed 4-bit codes, not float8_e4m3fn"),
    "order": (small().T, jnp.ones((8, 2)), "a float array by a QArray, in this order"),
    "floats": (
        octavo.quantize(jnp.ones((1, 8)), "float8_e4m3fn"),
        small("float8_e4m3fn"),
        "of two QArrays the kernel multiplies integers",
    ),
    "many integers": (octavo.quantize(jnp.ones((17, 8)), "int8"), small(), "1 to 16 rows"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_forced_kernel_says_what_it_lacks(what):
    x, q, message = REFUSED[what]
    with pytest.raises(ValueError, match=f"lowering='kernel': .*{message}"):
        multiply(x, q, dims_of(x, q), MatmulOptions(jnp.float32, lowering="kernel"))


def test_a_forced_kernel_says_that_axes_batches_and_accumulators_are_not_for_it():
    x, q = jnp.ones((2, 2, 8)), octavo.quantize(jnp.ones((2, 8, 4)), "int8", channelwise_axes=(0, 2))
    with pytest.raises(ValueError, match="the kernel has no batch axes"):
        multiply(x, q, Dims.of((((2,), (1,)), ((0,), (0,))), 3, 3), MatmulOptions(jnp.float32, lowering="kernel"))
    with pytest.raises(ValueError, match="contracts the first axes of a matrix or its last ones"):
        multiply(x[0], q, Dims.of((((1,), (1,)), ((), ())), 2, 3), MatmulOptions(jnp.float32, lowering="kernel"))
    options = MatmulOptions(jnp.float32, lowering="kernel", accumulator="bfloat16")
    with pytest.raises(ValueError, match="accumulates in float32, not in bfloat16"):
        multiply(jnp.ones((1, 8)), small(), Dims(2, 2, (1,), (0,)), options)


def test_ragged_products_have_no_kernel():
    config = octavo.DotConfig.qat("int8").replace(lowering="kernel")
    with pytest.raises(ValueError, match="ragged products have no kernel"):
        octavo.ragged_dot(jnp.ones((4, 8)), jnp.ones((2, 8, 4)), jnp.asarray([2, 2]), config=config)


# Several devices: XLA cannot cut a custom call, and would bring all of the matrix to every device for it.

MESH = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))


def spread(q, axis):
    """A QArray whose arrays are cut along an axis where it is long enough."""
    spec = lambda x: P(*("fsdp" if a == axis and x.shape[a] % 8 == 0 else None for a in range(x.ndim)))  # noqa: E731
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(MESH, spec(x))), q)


@pytest.mark.parametrize("axis", [0, 1], ids=["depth", "columns"])
@pytest.mark.parametrize("kind", ["float rows, int8", "float rows, int4", "int8 rows, int8"])
def test_on_a_mesh_no_matrix_is_gathered(kind, axis):
    x = rows(4)
    q = quantized("int4", group=32) if "int4" in kind else quantized("int8")
    if kind.startswith("int8"):
        x = octavo.quantize(x, "int8", channelwise_axes=(0,))
    dims = dims_of(x, q)
    assert "octavo_" in text(x, q, dims)
    wanted = run(x, q, dims, "auto")
    everywhere = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(MESH, P())), x)
    with jax.set_mesh(MESH):
        compiled = run.lower(everywhere, spread(q, axis), dims, "auto").compile()
        found = run(everywhere, spread(q, axis), dims, "auto")
    assert "octavo_" not in compiled.as_text()
    assert not [c for c in read_communication(compiled.as_text()).collectives if c.kind == "all-gather"]
    if kind.startswith("int8"):
        np.testing.assert_array_equal(found, wanted)
    else:
        assert (np.abs(np.asarray(found) - np.asarray(wanted)) <= bound(x, q, dims)).all()


def test_inside_of_shard_map_each_device_runs_the_kernel():
    x, q = rows(4), quantized("int8")
    dims = dims_of(x, q)
    body = lambda x, q: multiply(x, q, dims, MatmulOptions(jnp.float32))  # noqa: E731
    specs = jax.tree.map(lambda leaf: P(None, "fsdp"), q)
    fn = jax.jit(jax.shard_map(body, mesh=MESH, in_specs=(P(), specs), out_specs=P(None, "fsdp"), check_vma=False))
    wide = octavo.quantize(weight((DEPTH, 8 * COLUMNS)), "int8", channelwise_axes=(1,))
    assert "octavo_float_matvec" in fn.lower(x, wide).as_text()
    np.testing.assert_array_equal(fn(x, wide), run(x, wide, dims, "auto"))


def test_a_forced_kernel_raises_on_a_mesh():
    x, q = rows(4), quantized("int8")
    with jax.set_mesh(MESH), pytest.raises(ValueError, match=r"over the devices of the mesh: use jax\.shard_map"):
        run(x, q, dims_of(x, q), "kernel")
