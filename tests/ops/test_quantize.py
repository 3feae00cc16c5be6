"""Quantizing an operand is one equation, and on one CPU a custom call with the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import octavo
from octavo import kernels
from octavo.ops import dot_general

PLAIN = (((1,), (0,)), ((), ()))
INT8 = octavo.DotConfig.qt("int8", "int8")
SHAPES = [(32, 64), (64, 48), (32, 48)]


def data(shapes):
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def gradients(x, w, g):
    """The result and both gradients; a new function for each call, so that nothing is cached."""
    out, vjp = jax.vjp(lambda x, w: dot_general(x, w, PLAIN, config=INT8), x, w)
    return (out, *vjp(g))


def lowered(*args):
    return jax.jit(lambda *args: gradients(*args)).lower(*args)


needs_kernels = pytest.mark.skipif(not kernels.available(), reason=kernels.status())


def test_a_jaxpr_has_one_equation_for_each_operand():
    assert str(jax.make_jaxpr(gradients)(*data(SHAPES))).count("= octavo_quantize[") == 4


@needs_kernels
def test_the_custom_call_has_the_bits_of_xlas_operations():
    args = data(SHAPES)
    program = lowered(*args)
    assert program.as_text().count("@octavo_quantize") == 4
    with kernels.disabled():
        plain = lowered(*args)
    assert "octavo_quantize" not in plain.as_text()
    for got, want in zip(program.compile()(*args), plain.compile()(*args), strict=True):
        np.testing.assert_array_equal(got, want)


@needs_kernels
def test_the_custom_call_quantizes_tiles():
    (x, w), config = data([(2, 9, 256), (256, 48)]), octavo.DotConfig.qat("int8", tile=32).replace(lowering="plain")
    program = jax.jit(lambda x, w: dot_general(x, w, (((2,), (0,)), ((), ())), config=config)).lower(x, w)
    assert program.as_text().count("@octavo_quantize") == 2
    with kernels.disabled():
        plain = jax.jit(lambda x, w: dot_general(x, w, (((2,), (0,)), ((), ())), config=config)).lower(x, w)
    np.testing.assert_array_equal(program.compile()(x, w), plain.compile()(x, w))


@needs_kernels
def test_programs_that_are_partitioned_or_exported_have_no_custom_call():
    args = data(SHAPES)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = P("data"), P(), P("data")
    sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
    assert "octavo_quantize" not in lowered(*sharded).as_text()
    assert "octavo_quantize" not in jax.export.export(jax.jit(gradients))(*args).mlir_module()


def test_vmap_is_a_loop():
    args = data([(3, *shape) for shape in SHAPES])
    batched = jax.jit(jax.vmap(gradients))(*args)
    one = jax.jit(gradients)
    for i in range(3):
        for got, want in zip(batched, one(*(x[i] for x in args)), strict=True):
            np.testing.assert_array_equal(got[i], want)


@pytest.mark.parametrize(("rows", "value"), [(0, 0.0), (32, 0.0), (32, jnp.nan)])
def test_degenerate_operands(rows, value):
    x = jnp.full((rows, 64), value)
    args = [x, *data(SHAPES[1:2]), jnp.ones((len(x), 48))]
    with jax.debug_nans(False):
        for got, want in zip(jax.jit(gradients)(*args), gradients(*args), strict=True):
            np.testing.assert_array_equal(got, want)
