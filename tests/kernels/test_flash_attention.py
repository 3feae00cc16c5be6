"""The int8 flash kernel for TPUs, interpreted, against its reference and against attention in float."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.kernels import flash_attention as kernel
from octavo.kernels.flash_attention import flash_attention, missing_device
from octavo.kernels.flash_blocks import Flash
from octavo.kernels.flash_reference import flash_reference
from tests.arrays import normal
from tests.transform.test_attention import train


def inputs(length, heads, kv_heads, dtype):
    """Queries, keys whose mean over tokens is large, values and a cotangent.

    They are multiples of 1/16, so that the mean of the keys is the same for any order of its sum.
    """
    of = lambda seed, *shape: (jnp.round(16 * normal(seed, *shape, 128)) / 16).astype(dtype)  # noqa: E731
    q, k, v, g = (of(seed, 2, length, n) for seed, n in enumerate((heads, kv_heads, kv_heads, heads)))
    return q, k + jnp.asarray(8, dtype) * of(4, 1, 1, kv_heads), v, g


def results(attend, q, k, v, g):
    """The context and the three gradients."""

    @jax.jit
    def run(q, k, v, g):
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(g)

    return run(q, k, v, g)


def errors(found, exact):
    """The norms of differences, relative to those of the exact arrays."""
    pairs = [[np.asarray(x, np.float64) for x in pair] for pair in zip(found, exact, strict=True)]
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "causal", "dtype"),
    [
        pytest.param(384, 2, 1, True, "float32", id="three blocks, causal, two queries for each key"),
        pytest.param(256, 1, 1, False, "bfloat16", id="all keys, bfloat16", marks=pytest.mark.slow),
        pytest.param(512, 4, 2, True, "bfloat16", id="one block", marks=pytest.mark.slow),
    ],
)
def test_the_kernel_is_its_reference(length, heads, kv_heads, causal, dtype):
    arrays = inputs(length, heads, kv_heads, dtype)
    found = results(functools.partial(flash_attention, causal=causal, interpret=True), *arrays)
    config = Flash(causal, 128**-0.5, kernel.block_size(length))
    specified = jax.jit(functools.partial(flash_reference, config))(*arrays)
    # Sums in another order: a few codes, and values of the context in bfloat16, are rounded to their other neighbours.
    assert max(errors(found, specified)) < 1e-3

    def exact(q, k, v):
        return jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)), is_causal=causal)

    q, k, v, g = arrays
    out, dq, dk, dv = errors(found, results(exact, q, k, v, g.astype(jnp.float32)))
    assert out < 0.03
    assert max(dq, dk) < 0.04
    assert dv < 0.06  # a channel has one scale for a block of queries, of which the first attend to few keys


def test_rows_do_not_depend_on_later_tokens():
    q, k, v, _ = inputs(256, 1, 1, "float32")
    attend = jax.jit(functools.partial(flash_attention, causal=True, interpret=True))
    changed = attend(q.at[:, 200:].multiply(2), k, v)
    np.testing.assert_array_equal(changed[:, :200], attend(q, k, v)[:, :200])
    assert np.isnan(attend(q.at[0, 3].set(jnp.nan), k, v)[0, 3]).all()


def test_residuals_are_codes():
    q, k, v, _ = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in inputs(256, 2, 2, "bfloat16"))
    attend = functools.partial(flash_attention, causal=True)
    saved = jax.eval_shape(lambda *x: jax.tree.leaves(jax.vjp(attend, *x)[1]), q, k, v)
    by_size = sorted((x.size // q.size, x.dtype.name) for x in saved if x.size >= q.size)
    assert by_size == [(1, "bfloat16"), (1, "int8"), (1, "int8"), (1, "int8")]
    assert sum(x.size * x.dtype.itemsize for x in saved) < 0.7 * 4 * q.size * 2


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        ((2, 256, 4, 128), (2, 128, 4, 128), "differ in length or head size"),
        ((2, 256, 4, 128), (2, 256, 3, 128), "4 heads are no multiple of 3 heads of keys"),
        ((2, 256, 4, 64), (2, 256, 4, 64), "the head size of 64 is no multiple of 128"),
        ((2, 200, 4, 128), (2, 200, 4, 128), "the length of 200 is no multiple of 128"),
        ((1, 65536, 1, 128), (1, 65536, 1, 128), "does not fit on the chip"),
    ],
)
def test_unsupported_shapes(q, k, message):
    with pytest.raises(ValueError, match=f"flash_attention: .*{message}"):
        jax.eval_shape(flash_attention, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (q, k, k)))


def test_no_tpu():
    assert missing_device() == "the kernel is for TPUs"


@pytest.mark.slow
@pytest.mark.compiler("tpu")
@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_the_kernel_compiles_for_tpus(target):
    from octavo.hlo import compile_for, get_accelerator, read_cost

    q, k = (jax.ShapeDtypeStruct((1, 512, n, 128), jnp.bfloat16) for n in (2, 1))
    attend = functools.partial(flash_attention, causal=True)

    def both(q, k, v, g):
        assert missing_device() is None
        return results(attend, q, k, v, g)

    forward, backward = read_cost(compile_for(get_accelerator(target), both, q, k, k, q)).kernels
    assert "int8_flash_forward" in forward.name
    assert backward.flops == 5 * forward.flops // 2 == 2 * 5 * 2 * 512 * 512 * 128
    codes = [shape for shape in backward.arrays if shape.dtype == "s8"]
    assert [shape.dims for shape in codes] == [(1, 512, 256), (1, 512, 128), (1, 512, 128)]


@pytest.mark.slow
@pytest.mark.standard_promotion  # optax
def test_the_loss_of_training_is_that_of_float():
    """Every position learns to attend to the token before it; errors that the first tokens make for all would show."""
    length, size, vocab, steps = 128, 64, 16, 60
    shapes = {"embed": (vocab, size), "place": (length, size), "o": (2, 128, size)} | dict.fromkeys(
        "qkv", (size, 2, 128)
    )
    params = {name: normal(n, *shape, std=0.3 if n < 2 else 0.12) for n, (name, shape) in enumerate(shapes.items())}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, vocab, (steps, 4, length)))
    attends = {"float": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)}
    attends["int8"] = functools.partial(flash_attention, causal=True, interpret=True)
    losses = {name: float(jnp.mean(train(attend, params, tokens)[-20:])) for name, attend in attends.items()}
    assert losses["float"] < 1.2, losses  # it learns, from 2.8
    assert abs(losses["int8"] / losses["float"] - 1) < 0.02, losses
