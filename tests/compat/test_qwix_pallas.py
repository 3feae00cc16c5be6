"""`qwix.pallas`: kernels with QArrays in interpret mode, against Qwix's own and the dequantized operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix.pallas as theirs
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import octavo.compat.qwix.pallas as ours
from octavo.compat.qwix import to_qwix
from tests.arrays import normal
from tests.cases import slow_except

pytestmark = pytest.mark.standard_promotion

X = normal(0, 16, 32)
W = normal(1, 32, 24)
NUMBERS = (((1,), (0,)), ((), ()))


def quantized(lib, tiles, qtype):
    tiled = ({1: tiles}, {0: tiles}) if tiles else (None, None)
    x = lib.quantize(X, qtype, channelwise_axes=(0,), tiled_axes=tiled[0])
    return x, lib.quantize(W, qtype, channelwise_axes=(1,), tiled_axes=tiled[1])


def matmul(lib, x, w, block=(8, 16, 12), numbers=NUMBERS):
    """A matmul in blocks, accumulated over blocks of the contraction."""

    def kernel(x, w, out):
        @pl.when(pl.program_id(2) == 0)
        def _():
            out[...] = jnp.zeros_like(out)

        load = functools.partial(jax.tree.map, lambda ref: ref[...])
        out[...] += lib.dot_general(load(x), load(w), numbers)

    m, k, n = block
    return lib.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((16, 24), jnp.float32),
        grid=(16 // m, 24 // n, 32 // k),
        in_specs=[pl.BlockSpec((m, k), lambda i, j, k: (i, k)), pl.BlockSpec((k, n), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((m, n), lambda i, j, k: (i, j)),
        interpret=True,
    )(x, w)


@pytest.mark.parametrize("qtype", slow_except(("int8",), ("int8", "float8_e4m3fn")))
@pytest.mark.parametrize("tiles", slow_except((8,), (None, 8, 16)))
def test_a_blocked_matmul_is_that_of_qwix(tiles, qtype):
    x, w = quantized(ours, tiles, qtype)
    got = matmul(ours, x, w)
    np.testing.assert_allclose(got, x.dequantize() @ w.dequantize(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got, matmul(theirs, to_qwix(x), to_qwix(w)), rtol=1e-4, atol=1e-4)


def test_a_weight_alone_may_be_quantized():
    _, w = quantized(ours, 8, "int8")
    np.testing.assert_allclose(matmul(ours, X, w), X @ w.dequantize(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("qtype", ["nf4", "int4", "nvfp4", "mxfp8"])
def test_other_formats(qtype):
    w = ours.quantize(W, qtype, tiled_axes={0: {"nvfp4": 16, "mxfp8": 32}.get(qtype, 8)}, channelwise_axes=(1,))
    np.testing.assert_allclose(matmul(ours, X, w, (8, 32, 12)), X @ w.dequantize(), rtol=1e-4, atol=1e-4)


def test_tiles_of_axes_that_are_not_contracted():
    x = ours.quantize(X, "int8", tiled_axes={0: 4, 1: 8})
    w = ours.quantize(W, "int8", tiled_axes={0: 8, 1: 6})
    np.testing.assert_allclose(matmul(ours, x, w), x.dequantize() @ w.dequantize(), rtol=1e-4, atol=1e-4)


def test_references_are_read_by_indexing():
    x, w = quantized(ours, 8, "int8")

    def kernel(x, w, out):
        out[...] = ours.dot(x[...], w) + 0 * ours.dequantize(x[...])[:, :1]

    out = ours.pallas_call(kernel, jax.ShapeDtypeStruct((16, 24), jnp.float32), interpret=True)(x, w)
    np.testing.assert_allclose(out, x.dequantize() @ w.dequantize(), rtol=1e-4, atol=1e-4)


def test_einsum_with_batch_axes_and_squeezed_blocks():
    a = ours.quantize(X.reshape(2, 8, 32), "int8", channelwise_axes=(0, 1))
    b = ours.quantize(jnp.stack([W, 2 * W]), "int8", channelwise_axes=(0, 2))

    def einsum(lib, a, b):

        def kernel(a, b, out):
            load = functools.partial(jax.tree.map, lambda ref: ref[...])
            out[...] = lib.einsum("mk,kn->mn", load(a), load(b))

        return lib.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((2, 8, 24), jnp.float32),
            grid=(2,),
            in_specs=[
                pl.BlockSpec((None, 8, 32), lambda i: (i, 0, 0)),
                pl.BlockSpec((None, 32, 24), lambda i: (i, 0, 0)),
            ],
            out_specs=pl.BlockSpec((None, 8, 24), lambda i: (i, 0, 0)),
            interpret=True,
        )(a, b)

    got = einsum(ours, a, b)
    np.testing.assert_allclose(got, jnp.einsum("bmk,bkn->bmn", a.dequantize(), b.dequantize()), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got, einsum(theirs, to_qwix(a), to_qwix(b)), rtol=1e-4, atol=1e-4)


def test_prefetched_scalars_choose_blocks():
    def run(lib):
        x = lib.quantize(X, "int8", channelwise_axes=(0,))

        def kernel(rows, x, out):
            out[...] = lib.dequantize(jax.tree.map(lambda ref: ref[...], x))

        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(2,),
            in_specs=[pl.BlockSpec((8, 32), lambda i, rows: (rows[i], 0))],
            out_specs=pl.BlockSpec((8, 32), lambda i, rows: (i, 0)),
        )
        shape = jax.ShapeDtypeStruct((16, 32), jnp.float32)
        call = lib.pallas_call(kernel, shape, grid_spec=spec, interpret=True)
        return call(jnp.asarray([1, 0], jnp.int32), x), lib.dequantize(x)

    got, plain = run(ours)
    np.testing.assert_allclose(got, jnp.concatenate([plain[8:], plain[:8]]), rtol=1e-6)
    np.testing.assert_allclose(got, run(theirs)[0], atol=0.05)


def test_what_a_kernel_cannot_take_raises():
    x, w = quantized(ours, 8, "int8")
    with pytest.raises(ValueError, match="do not hold its 4 scales evenly"):
        matmul(ours, x, w, (8, 4, 12))
    with pytest.raises(ValueError, match="symmetric operands"):
        ours.dot(ours.quantize(X, "int8", calibration_method="minmax"), W)
    with pytest.raises(ValueError, match="different sizes"):
        ours.dot(x, quantized(ours, 16, "int8")[1])
    with pytest.raises(ValueError, match="neither packed nor padded"):
        matmul(ours, ours.quantize(X, "int4").pack(), w)


def test_every_name_of_the_module_is_here():
    assert set(ours.__all__) == set(theirs.__all__)
