"""What Llama 3.1, Qwen2 and Qwen3 add, against plain NumPy; and fused matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models import ModelConfig, abstract_params, apply, fuse
from octavo.models.attention import rotary_frequencies
from octavo.serve import KVCache
from tests.arrays import normal
from tests.models import reference
from tests.models.common import DENSE, MOE, batch, params_of, run

PLAIN = DENSE.replace(num_layers=2, scan_layers=False)
QWEN2 = PLAIN.replace(qkv_bias=True, rope_theta=1e6)
QWEN3 = PLAIN.replace(qk_norm=True, tied_logits=False, head_dim=12)
LLAMA = PLAIN.replace(rope_scaling=(8.0, 1.0, 4.0, 16.0))


def test_slow_rotations_are_slowed_down():
    """The formula of Llama 3.1, pair by pair, with its own numbers."""
    config = PLAIN.replace(rope_theta=500_000.0, head_dim=128, rope_scaling=(8.0, 1.0, 4.0, 8192.0))
    want = []
    for i in range(64):
        speed = 500_000.0 ** (-2 * i / 128)
        wavelength = 2 * np.pi / speed
        if wavelength < 8192 / 4:
            want.append(speed)
        elif wavelength > 8192 / 1:
            want.append(speed / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            want.append((1 - smooth) * speed / 8 + smooth * speed)
    np.testing.assert_allclose(rotary_frequencies(config)[0], want, rtol=2e-5)
    unscaled = np.asarray(rotary_frequencies(config.replace(rope_scaling=None))[0])
    assert len(set((want / unscaled).round(3).tolist())) > 3


def plain(config, params, tokens, positions, segments, monkeypatch):
    """The reference, with what these models add to the projections of a head."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    rates = np.asarray(rotary_frequencies(config)[0], np.float64)

    def turn(x, position, config):
        half = config.head_dim // 2
        turned = (x[:half] + 1j * x[half:]) * np.exp(1j * position * rates)
        return np.concatenate([turned.real, turned.imag])

    def attention(x, p, positions, segments, config):
        dim, out = config.head_dim, []

        def head(name, number):
            columns = slice(number * dim, number * dim + dim)
            y = x @ p[name]["kernel"][:, columns]
            y = y + p[name]["bias"][columns] if config.qkv_bias else y
            return reference.norm(y, p[f"{name}_norm"], config) if config.qk_norm and name != "value" else y

        for number in range(config.num_query_heads):
            shared = number * config.num_kv_heads // config.num_query_heads
            q, k, v = head("query", number), head("key", shared), head("value", shared)
            q, k = ([turn(row, t, config) for row, t in zip(y, positions, strict=True)] for y in (q, k))
            rows = []
            for t in range(len(x)):
                seen = [s for s in range(t + 1) if segments[s] == segments[t]]
                weights = reference.softmax(np.array([q[t] @ k[s] / np.sqrt(dim) for s in seen]))
                rows.append(sum(w * v[s] for w, s in zip(weights, seen, strict=True)))
            out.append(np.stack(rows))
        return np.concatenate(out, axis=1) @ p["out"]["kernel"]

    monkeypatch.setattr(reference, "attention", attention)
    return reference.forward(wide, *map(np.asarray, (tokens, positions, segments)), config)[0]


@pytest.mark.slow
@pytest.mark.parametrize("config", [QWEN2, QWEN3, LLAMA], ids=["qwen2", "qwen3", "llama"])
def test_against_numpy(config, monkeypatch):
    params, inputs = params_of(config), batch(config)
    if config.qkv_bias:
        # They begin as zeros.
        for layer in ("layers_0", "layers_1"):
            for number, name in enumerate(("query", "key", "value")):
                part = params["decoder"][layer]["self_attention"][name]
                part["bias"] = normal(number, *part["bias"].shape)
    logits, _ = run(config, params, *inputs)
    np.testing.assert_allclose(logits, plain(config, params, *inputs, monkeypatch), atol=1e-4)
    assert np.abs(logits - run(PLAIN, params_of(PLAIN), *inputs)[0]).max() > 1e-3


def test_defaults_have_no_new_parameters():
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(abstract_params(PLAIN))}
    assert not [name for name in names if "bias" in name or "query_norm" in name or "wi'" in name]


@pytest.mark.parametrize(
    "config",
    [QWEN2.replace(num_layers=1), pytest.param(MOE.replace(num_layers=1, scan_layers=False), marks=pytest.mark.slow)],
    ids=["dense", "moe"],
)
def test_fused_is_the_same_model(config):
    params, inputs = jax.tree.map(np.asarray, params_of(config)), batch(config)
    fused, joined = fuse(config, params)
    np.testing.assert_allclose(run(fused, joined, *inputs)[0], run(config, params, *inputs)[0], atol=1e-5)
    assert fuse(fused, joined) == (fused, joined)
    own = jax.tree.map(lambda x: x, params)
    fuse(config, own, donate=True)
    assert own["decoder"]["layers_0"]["self_attention"]["query"] == {}


def test_errors():
    params, tokens = abstract_params(PLAIN), jnp.zeros((1, 2), jnp.int32)
    cache = KVCache.empty(PLAIN, slots=1, max_length=4)
    with pytest.raises(ValueError, match=r"'layers' are scanned: use .*octavo\.models\.unstack_layers"):
        apply(DENSE, params, tokens, cache=cache)
    with pytest.raises(ValueError, match="segments are for calls without a cache"):
        apply(PLAIN, params, tokens, segments=tokens, cache=cache)
    with pytest.raises(ValueError, match="last picks tokens of a call with a cache"):
        apply(PLAIN, params, tokens, last=jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="rope_scaling is four positive numbers"):
        PLAIN.replace(rope_scaling=(8.0, 0.0, 4.0, 8192.0))
    with pytest.raises(ValueError, match="low frequency factor below the high one"):
        PLAIN.replace(rope_scaling=(8.0, 4.0, 1.0, 8192.0))


def test_config_through_json():
    assert ModelConfig.from_json(LLAMA.to_json()) == LLAMA
