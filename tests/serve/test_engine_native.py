"""Tokens made by native layers are those of the model's own code."""

import functools

import jax
import numpy as np
import pytest

from octavo import kernels
from octavo.models import fuse, init_params
from octavo.serve import Engine, KVConfig, SamplingParams
from octavo.serve.engine_native import unsupported_reason
from tests.cases import slow_except
from tests.serve.common import DENSE, MOE, quantized_params

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=kernels.status())
ONE = DENSE.replace(num_layers=1)
PROMPTS = [[1, 2, 3], list(range(20)), [7] * 9]
CASES = {
    "int8": (ONE, "int8"),
    "int4, two layers, bias": (DENSE.replace(qkv_bias=True), "int4"),
    "int8, norms": (ONE.replace(qk_norm=True, tied_logits=False), "int8"),
}


@functools.cache
def engine_of(config=ONE, name="int8", kv=None):
    return Engine(config, quantized_params(config, name, tile=8), slots=2, max_length=40, chunk=8, kv=kv)


def made(engine, params=None):
    events = list(engine.generate(PROMPTS, params or SamplingParams(temperature=0, max_tokens=7)))
    return [[(e.token, e.logprob) for e in events if e.request_id == i] for i in range(len(PROMPTS))]


@needs_kernels
@pytest.mark.parametrize("case", slow_except(["int8"], CASES))
def test_native_layers_make_the_same_tokens(case):
    config, name = CASES[case]
    engine = engine_of(config, name)
    assert engine.programs.decoding == kernels.status()
    assert "octavo_decode_layer" in engine.programs.lowered().as_text()
    got = made(engine)
    with kernels.disabled():
        plain = engine_of.__wrapped__(config, name)
        assert plain.programs.decoding == "XLA, because CPU kernels are switched off here by octavo.kernels.disabled()"
        assert "octavo_" not in plain.programs.lowered().as_text()
        want = made(plain)
    for a, b in zip(got, want, strict=True):
        assert [token for token, _ in a] == [token for token, _ in b]
        np.testing.assert_allclose([x for _, x in a], [x for _, x in b], rtol=0, atol=2e-5)


@needs_kernels
def test_native_layers_read_and_write_an_int8_cache():
    kv = KVConfig.of("int8")
    engine = engine_of(kv=kv)
    assert engine.programs.decoding == kernels.status()
    got = made(engine)
    with kernels.disabled():
        want = made(engine_of.__wrapped__(kv=kv))
    for a, b in zip(got, want, strict=True):
        assert [token for token, _ in a] == [token for token, _ in b]
        # A code next to a tie may be the other one.
        np.testing.assert_allclose([x for _, x in a], [x for _, x in b], rtol=0, atol=2e-3)


@needs_kernels
def test_a_full_cache_ends_the_text():
    events = list(engine_of().generate([[1] * 30], SamplingParams(temperature=0, max_tokens=90)))
    assert (len(events), events[-1].finish) == (10, "length")
    assert all(np.isfinite(e.logprob) for e in events)


FUSED = "the kernel needs fused weights, and has no experts"


@needs_kernels
@pytest.mark.parametrize(
    ("config", "name", "kv", "fused", "reason"),
    [
        (ONE, "int8", KVConfig.of("int4"), True, "the kernel keeps keys and values in float32, or in int8"),
        (ONE, "int8", KVConfig(), False, FUSED),
        (MOE, "int8", KVConfig(), True, FUSED),
        (ONE, None, KVConfig(), True, "query_key_value: the kernel takes quantized weights"),
        (ONE.replace(activation="gelu"), "int8", KVConfig(), True, "computes silu in float32, not gelu in float32"),
        (ONE, "fp8", KVConfig(), True, "takes int8 and packed 4-bit codes, not float8_e4m3fn"),
    ],
    ids=["int4 cache", "not fused", "experts", "float", "gelu", "fp8"],
)
def test_why_layers_are_not_native(config, name, kv, fused, reason):
    def check(config=config):
        key = jax.random.key(0)
        params = init_params(config, key) if name is None else quantized_params.__wrapped__(config, name, 8)
        if fused:
            config, params = fuse(config, params)
        assert reason in unsupported_reason(config, params, kv)

    jax.eval_shape(check)  # shapes and formats decide: nothing is compiled
