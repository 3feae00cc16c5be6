"""Attention that the int8 flash kernel computes: what is found, where it replaces the equations, and what it gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo.kernels.flash_attention as kernel
import octavo.transform.flash as flash
from octavo import QtRule
from octavo.transform.softmax import find_keys
from tests.arrays import normal

SAGE = QtRule(scope="activations", act_qtype="int8", bwd_qtype="int8", attention=True)
LENGTH, MASK = 128, np.tril(np.ones((128, 128), bool))


def causal(q, k, v):
    """Grouped heads, normalized before the matmul."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def heads_first(q, k, v):
    """Normalized after the matmul, with a mask that is not computed from positions."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, *(jnp.repeat(x, 2, 2) for x in (k, v))))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / 11.0
    weights = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    return jnp.einsum("bhqk,bhkd->bqhd", weights, v) / jnp.sum(weights, -1).swapaxes(1, 2)[..., None]


def keys_first(q, k, v):
    """The keys are the left operand, and the mask is a constant."""
    scores = jnp.einsum("bkhd,bqhd->bhkq", jnp.repeat(k, 2, 2), q).swapaxes(-1, -2)
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool)[None, None], 0.1 * scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), jnp.repeat(v, 2, 2))


FOUND = {causal: (128**-0.5, True), heads_first: (1 / 11, False), keys_first: (0.1, True)}


def with_bias(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, bias=jnp.ones((1, 2, LENGTH, LENGTH)))


def windowed(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=7)


def masked_by_data(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, mask=q[:, None, :, 0, :1] > 0)


def anticausal(q, k, v):
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool).T, jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, 2, 2)), -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), jnp.repeat(v, 2, 2))


def returned(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, 2, 2))
    weights = jax.nn.softmax(scores)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.repeat(v, 2, 2)), weights


def sliced(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, 2, 2))
    weights = jnp.pad(jax.nn.softmax(scores)[:, :, 1:], ((0, 0), (0, 0), (1, 0), (0, 0)))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.repeat(v, 2, 2))


def masked_ahead(q, k, v):
    ahead = jnp.arange(LENGTH + 3)[3:, None] >= jnp.arange(LENGTH)[None]
    scores = jnp.where(ahead, jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, 2, 2)), -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), jnp.repeat(v, 2, 2))


NOT_FOUND = {
    sliced: "slice of weights",
    masked_ahead: "select_n of scores",
    with_bias: "add of scores: only a number and a causal mask",
    windowed: "select_n of scores",
    masked_by_data: "select_n of scores",
    anticausal: "the mask is not causal",
    returned: "scores are used outside of the softmax",
}


@pytest.fixture(scope="module")
def arrays():
    """Queries, keys whose mean over tokens is large, values and a cotangent."""
    q, k, v, g = (normal(n, 1, LENGTH, heads, 128) for n, heads in enumerate((2, 1, 1, 2)))
    return q, k + 5 * normal(4, 1, 1, 1, 128), v, g


@pytest.fixture
def on_a_tpu(monkeypatch):
    """Programs are traced as for a TPU, and the kernel is interpreted."""
    monkeypatch.setattr(kernel, "missing_device", lambda: None)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(flash, "flash_attention", functools.partial(kernel.flash_attention, interpret=True))


def found_in(fn, arrays):
    jaxpr = jax.make_jaxpr(fn)(*arrays[:3]).jaxpr
    ((n, keys),) = find_keys(jaxpr).items()
    return flash.find_flash(jaxpr, n, keys)


@pytest.mark.parametrize("fn", FOUND, ids=lambda fn: fn.__name__)
def test_attention_is_found(fn, arrays):
    found = found_in(fn, arrays)
    assert (found.scale, found.causal) == (pytest.approx(FOUND[fn][0]), FOUND[fn][1])


@pytest.mark.parametrize("fn", NOT_FOUND, ids=lambda fn: fn.__name__)
def test_other_attention_is_not(fn, arrays):
    with pytest.raises(flash.UnsupportedError, match=NOT_FOUND[fn]):
        found_in(fn, arrays)


@pytest.mark.parametrize("fn", FOUND, ids=lambda fn: fn.__name__)
def test_the_kernel_gives_the_same_attention(fn, arrays, on_a_tpu):
    q, k, v, _ = arrays
    quantized = octavo.quantized(fn, [SAGE], weights=())
    exact, found = jax.jit(fn)(q, k, v), jax.jit(quantized)(q, k, v)
    assert str(jax.make_jaxpr(quantized)(q, k, v)).count("pallas_call") == 1
    assert float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)) < 0.03


def test_without_a_tpu_nothing_changes(arrays, monkeypatch):
    q, k, v, _ = arrays
    program = lambda: jax.jit(octavo.quantized(causal, [SAGE], weights=())).lower(q, k, v).as_text()  # noqa: E731
    before = program()
    assert "octavo_quantize" in before or "dot_general" in before
    monkeypatch.setattr(flash, "find_flash", lambda *_: pytest.fail("looked for"))
    assert program() == before


@pytest.mark.parametrize(
    ("fn", "rule", "note"),
    [
        (causal, SAGE, "; a flash kernel"),
        (with_bias, SAGE, "; no flash kernel: add of scores: only a number and a causal mask change the scores"),
        (
            causal,
            SAGE.replace(bwd_qtype=None),
            "; no flash kernel: the rule is not int8 with measured ranges in all th",
        ),
        (
            causal,
            SAGE.replace(act_qtype="int4"),
            "; no flash kernel: the rule is not int8 with measured ranges in all ",
        ),
        (
            lambda q, k, v: causal(*(x[:, :100] for x in (q, k, v))),
            SAGE,
            "; no flash kernel: the length of 100 is no multiple of 128",
        ),
    ],
    ids=["found", "bias", "float gradients", "int4", "length"],
)
def test_the_plan_says_whether_there_is_a_kernel(fn, rule, note, arrays, on_a_tpu):
    quantized = octavo.quantized(fn, [rule], weights=())
    row, _ = octavo.plan(quantized, None, *arrays[:3]).rows
    assert f"scores: the mean of keys (rhs) is subtracted{note}" in row.note
    assert ("pallas_call" in str(jax.make_jaxpr(quantized)(*arrays[:3]))) == (note == "; a flash kernel")


def test_several_devices_need_a_shard_map(arrays, on_a_tpu, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    quantized = octavo.quantized(causal, [SAGE], weights=())
    row, _ = octavo.plan(quantized, None, *arrays[:3]).rows
    assert row.note.endswith("; no flash kernel: XLA cannot partition the kernel: use jax.shard_map, or one device")
    assert "pallas_call" not in str(jax.make_jaxpr(quantized)(*arrays[:3]))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    local = jax.shard_map(quantized, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    batch = [jnp.concatenate([x] * 8) for x in arrays[:3]]
    assert str(jax.make_jaxpr(local)(*batch)).count("pallas_call") == 1
