"""Tokens made by native layers are those of the model's own code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo import kernels
from octavo.models import init_params
from octavo.serve import Engine, KVConfig, SamplingParams
from tests.serve.common import DENSE, MOE

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=kernels.status())
ONE = DENSE.replace(num_layers=1)
PROMPTS = [[1, 2, 3], list(range(20)), [7] * 9]
VARIANTS = {
    "plain": ONE,
    "two layers": DENSE,
    "bias": DENSE.replace(qkv_bias=True),
    "norms": DENSE.replace(qk_norm=True, tied_logits=False),
}


@functools.cache
def low(config, name="int8", group=8):
    """Random parameters whose matrices are quantized."""
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))

    def one(path, x):
        if path[-1].key == "bias":
            return jnp.asarray(np.random.default_rng(0).standard_normal(x.shape), x.dtype)
        if path[-1].key not in ("kernel", "embedding") or x.ndim != 2:
            return x
        axis = 0 if path[-1].key == "kernel" else 1
        q = octavo.quantize(x, name, channelwise_axes=(1 - axis,), tiled_axes={axis: group}, scale_dtype="bfloat16")
        return q.pack(axis) if q.qtype.bits < 8 else q

    return jax.tree_util.tree_map_with_path(one, params)


@functools.cache
def usual():
    """One layer of int8."""
    return engine_of()


def engine_of(config=ONE, params=None, **how):
    return Engine(config, low(config) if params is None else params, slots=2, max_length=40, chunk=8, **how)


def made(engine, params=None):
    events = list(engine.generate(PROMPTS, params or SamplingParams(temperature=0, max_tokens=7)))
    return [[(e.token, e.logprob) for e in events if e.request_id == i] for i in range(len(PROMPTS))]


@needs_kernels
@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[pytest.mark.slow] if v != "plain" else []) for v in VARIANTS]
)
@pytest.mark.parametrize("name", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_native_layers_make_the_same_tokens(variant, name):
    config = VARIANTS[variant]
    engine = usual() if (variant, name) == ("plain", "int8") else engine_of(config, low(config, name))
    assert engine.decoding == kernels.status()
    assert "octavo_decode_layer" in engine._programs.lowered().as_text()
    got = made(engine)
    with kernels.disabled():
        plain = engine_of(config, low(config, name))
        assert plain.decoding == "XLA, because CPU kernels are switched off here by octavo.kernels.disabled()"
        assert "octavo_" not in plain._programs.lowered().as_text()
        want = made(plain)
    for a, b in zip(got, want, strict=True):
        assert [token for token, _ in a] == [token for token, _ in b]
        np.testing.assert_allclose([x for _, x in a], [x for _, x in b], rtol=0, atol=2e-5)


@needs_kernels
def test_a_full_cache_ends_the_text():
    events = list(usual().generate([[1] * 30], SamplingParams(temperature=0, max_tokens=90)))
    assert (len(events), events[-1].finish) == (10, "length")
    assert all(np.isfinite(e.logprob) for e in events)


@needs_kernels
@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (lambda: engine_of(kv=KVConfig.of("int8")), "native layers keep keys and values in float32"),
        (lambda: engine_of(fuse=False), "native layers have fused matrices, and no experts"),
        (lambda: engine_of(MOE, low(MOE)), "native layers have fused matrices, and no experts"),
        (
            lambda: engine_of(ONE, jax.jit(init_params, static_argnums=0)(ONE, jax.random.key(0))),
            "layers_0/self_attention/query_key_value: the kernel takes quantized matrices",
        ),
        (lambda: engine_of(low_gelu(), low(low_gelu())), "native layers compute silu in float32, not gelu in float32"),
        (lambda: engine_of(ONE, low(ONE, "fp8")), "takes int8 and packed 4-bit codes, not float8_e4m3fn"),
    ],
    ids=["int8 cache", "not fused", "experts", "float", "gelu", "fp8"],
)
def test_why_layers_are_not_native(engine, reason):
    found = engine().decoding
    assert found.startswith("XLA, because ")
    assert found.endswith(reason)


def low_gelu():
    return ONE.replace(activation="gelu")
