"""The cache: what comes out is what the whole forward pass gives, whatever else the cache holds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.models import QKV, Cache, apply, layer_groups
from octavo.serve import KVCache, KVConfig
from octavo.serve.cache_store import BLOCK
from tests.arrays import normal
from tests.cases import slow_except
from tests.serve.common import DENSE, MOE, dequantized, params_of, quantized_params, run, tokens_of

FORMATS = {
    "float": KVConfig(),
    "bf16": KVConfig(dtype="bfloat16"),
    "int8": KVConfig.of("int8"),
    "int8 heads": KVConfig.of("int8", axis="heads_and_dkv"),
    "int4": KVConfig.of("int4"),
    "fp8": KVConfig.of("fp8"),
    "mixed": KVConfig(keys="int8", values="int4"),
    "keys only": KVConfig(keys="fp8"),
    "kivi": KVConfig.of("int8", axis="kivi", group=4, window=6),
    "kivi int2": KVConfig.of("int2", axis="kivi", group=4, window=0),
    "kivi values": KVConfig(values="int4", axis="kivi", group=8, window=3),
}
every = pytest.mark.parametrize("kv", list(FORMATS.values()), ids=list(FORMATS))
ONE = DENSE.replace(num_layers=1)
close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)


def in_pieces(config, params, tokens, cache, sizes):
    """Logits of tokens that come in pieces."""
    out, start = [], 0
    for size in sizes:
        logits, _, cache = run(config, params, tokens[:, start : start + size], cache=cache)
        out.append(logits)
        start += size
    return jnp.concatenate(out, axis=1), cache


@pytest.mark.parametrize(
    "config",
    [
        DENSE,
        pytest.param(MOE.replace(num_layers=1), marks=pytest.mark.slow),
        pytest.param(DENSE.replace(qk_norm=True, qkv_bias=True), marks=pytest.mark.slow),
    ],
    ids=["dense", "moe", "qwen"],
)
def test_cached_is_the_full_forward(config):
    params, tokens = params_of(config), tokens_of(config, (2, 12))
    cache = KVCache.empty(config, slots=2, max_length=12)
    assert isinstance(cache, Cache)
    got, cache = in_pieces(config, params, tokens, cache, [4, 4, 1, 1, 1, 1])
    close(got, run(config, params, tokens)[0])
    assert cache.lengths.tolist() == [12, 12]


@pytest.mark.slow
@every
def test_pieces_do_not_matter(kv):
    params, tokens = params_of(ONE), tokens_of(ONE, (2, 24))
    empty = KVCache.empty(ONE, kv, slots=2, max_length=24)
    whole, _ = in_pieces(ONE, params, tokens, empty, [24])
    got, _ = in_pieces(ONE, params, tokens, empty, [9, 9, *[1] * 6])
    # A value may fall to the other side of a rounding, since sums differ in their last bits.
    np.testing.assert_allclose(got, whole, atol=1e-5 if kv.keys is None and kv.dtype == "float32" else 5e-2)
    assert np.median(np.abs(got - whole)) < 1e-5


def poisoned(cache, keep):
    """NaN, or the largest code, in every place of a slot that `keep` does not have."""

    def poison(path, x):
        name = jax.tree_util.keystr(path)
        if x.ndim != 4 or "recent" in name:
            return x
        time = 3 if ".keys" in name else 2
        tile = cache.max_length // x.shape[time]
        if tile > 1:
            return x
        shape = [1, 1, 1, 1]
        shape[time] = -1
        place = jnp.arange(x.shape[time])
        good = jnp.stack([(place < n) for n in keep]).reshape(len(keep), *shape[1:])
        bad = jnp.asarray(jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 127, x.dtype)
        return jnp.where(good, x, bad)

    layers = jax.tree_util.tree_map_with_path(poison, cache.layers)
    return dataclasses.replace(cache, layers=layers)


@pytest.mark.parametrize("name", slow_except(["float"], ["float", "int8", "fp8"]))
def test_what_is_not_seen_has_no_influence(name):
    kv = FORMATS[name]
    params, tokens = params_of(ONE), tokens_of(ONE, (3, 12))
    cache = KVCache.empty(ONE, kv, slots=3, max_length=16)
    _, cache = in_pieces(ONE, params, tokens[:, :6], cache, [6])
    logits, _, _ = run(ONE, params, tokens[:, 6:7], cache=cache)
    # Slots 0 and 2 hold nothing but poison, slot 1 has it beyond its length.
    bad = poisoned(cache, [0, 6, 0])
    got, _, after = run(ONE, params, tokens[:, 6:7], cache=bad)
    np.testing.assert_array_equal(got[1], logits[1])
    assert np.isnan(got[0]).all()
    # And a slot that is written anew forgets what it held.
    again, _, _ = run(ONE, params, tokens[:1, :6], cache=after.with_lengths([0, 0, 0]).at([0]))
    fresh = KVCache.empty(ONE, kv, slots=3, max_length=16).at([0])
    np.testing.assert_array_equal(again, run(ONE, params, tokens[:1, :6], cache=fresh)[0])


def test_slots_have_lengths_of_their_own():
    params, tokens = params_of(ONE), tokens_of(ONE, (1, 11))
    cache = KVCache.empty(ONE, slots=3, max_length=16)
    _, _, cache = run(ONE, params, tokens[:, :7], cache=cache.at([2]))
    _, _, cache = run(ONE, params, tokens[:, :7], cache=cache.at([0]))
    assert cache.lengths.tolist() == [7, 0, 7]
    cache = cache.with_lengths([4, 0, 7])
    rows = jnp.stack([tokens[0, 4:5], tokens[0, 0:1], tokens[0, 7:8]])
    got, _, cache = run(ONE, params, rows, cache=cache.at())
    full = run(ONE, params, tokens)[0][0]
    close(got[:, 0], full[jnp.asarray([4, 0, 7])])
    assert cache.lengths.tolist() == [5, 1, 8]


@pytest.mark.slow
def test_filling_does_not_count():
    for kv in (KVConfig(), KVConfig.of("int8", axis="kivi", group=4, window=2)):
        params, tokens = params_of(ONE), tokens_of(ONE, (1, 24))
        empty = KVCache.empty(ONE, kv, slots=1, max_length=24)
        want, _ = in_pieces(ONE, params, tokens, empty, [24])
        filled = tokens.at[0, 13:16].set(0)
        first, _, cache = run(ONE, params, filled[:, :8], cache=empty)
        second, _, cache = run(ONE, params, filled[:, 8:16], cache=cache.at([0], counts=[5]))
        assert cache.lengths.tolist() == [13]
        third, _ = in_pieces(ONE, params, tokens[:, 13:], cache.at(), [1] * 11)
        got = jnp.concatenate([first, second[:, :5], third], axis=1)
        assert np.quantile(np.abs(got - want), 0.9) < 1e-5


@pytest.mark.slow
def test_many_slots_are_written_at_once():
    params, tokens = params_of(DENSE), tokens_of(DENSE, (20, 6))
    got, _ = in_pieces(DENSE, params, tokens, KVCache.empty(DENSE, slots=20, max_length=8), [4, 1, 1])
    close(got, run(DENSE, params, tokens)[0])


@pytest.mark.slow
@pytest.mark.parametrize("kv", [KVConfig(), KVConfig.of("int8")], ids=["float", "int8"])
def test_blocks(kv):
    """Long caches are read in blocks, and the length of one slot does not touch the numbers of another."""
    config, params = ONE, params_of(ONE)
    length = 2 * BLOCK + 8
    tokens = tokens_of(config, (2, length))
    cache = KVCache.empty(config, kv, slots=2, max_length=length)
    got, cache = in_pieces(config, params, tokens, cache, [BLOCK - 3, BLOCK + 5, 1, 1, 1, 1, 1, 1])
    full = run(config, params, tokens)[0]
    np.testing.assert_allclose(got, full, atol=1e-5 if kv.keys is None else 0.1)
    one = jnp.asarray([[3], [4]])
    long, short = cache.with_lengths([40, length - 1]), cache.with_lengths([40, 1])
    np.testing.assert_array_equal(
        run(config, params, one, cache=long)[0][0], run(config, params, one, cache=short)[0][0]
    )


def sqnr(x, y):
    return 10 * np.log10(np.mean(np.square(x)) / np.mean(np.square(x - y)))


def stored_layer(kv, x):
    """What a layer holds of keys and values that are both `x`."""

    @jax.jit
    def store(x):
        cache = KVCache.empty(ONE, kv, slots=1, max_length=64)
        return cache.attend("layers_0", QKV(jnp.zeros((1, 64, 4, 8)), x, x), jnp.arange(64)[None])[1]

    return store(x).layers["layers_0"]


@pytest.mark.slow
def test_signal_to_noise_of_what_is_stored():
    x = normal(0, 1, 64, 2, 8)
    for name, axis, bound in (
        ("int8", "dkv", 44),
        ("int8", "heads_and_dkv", 42),
        ("fp8", "dkv", 30),
        ("int4", "dkv", 18),
    ):
        stored = stored_layer(KVConfig.of(name, axis=axis), x)
        assert sqnr(x, stored.keys.read().transpose(0, 3, 1, 2)) > bound
        assert sqnr(x, stored.values.read().transpose(0, 2, 1, 3)) > bound
        if name == "int8":
            assert np.abs(stored.keys.codes.astype(jnp.int32)).max() == 127


def test_a_loud_head_only_hurts_those_that_share_its_scale():
    x = np.random.default_rng(0).standard_normal((1, 64, 2, 8)).astype(np.float32) * np.float32([[1], [30]])

    def quiet(axis):
        return sqnr(x[:, :, 0], stored_layer(KVConfig.of("int8", axis=axis), x).values.read()[:, 0])

    assert quiet("dkv") > quiet("heads_and_dkv") + 15


@pytest.mark.slow
@every
def test_zeros_stay_zeros(kv):
    @jax.jit
    def attend(query, zeros):
        cache = KVCache.empty(ONE, kv, slots=1, max_length=16)
        return cache.attend("layers_0", QKV(query, zeros, zeros), jnp.arange(16)[None])[0]

    np.testing.assert_array_equal(attend(jnp.ones((1, 16, 4, 8)), jnp.zeros((1, 16, 2, 8))), 0)


def kivi_reference(keys, values, query, position, group, window, bits):
    """One head and one query, with loops."""
    count = position + 1
    old = max(0, (count - window) // group * group)
    keys, values = keys[:count].astype(np.float64).copy(), values[:count].astype(np.float64).copy()

    def rounded(x):
        low, high = min(x.min(), 0), max(x.max(), 0)
        scale = (high - low) / (2**bits - 1) or 1.0
        zero = np.round(-low / scale)
        return (np.clip(np.round(x / scale) + zero, 0, 2**bits - 1) - zero) * scale

    for start in range(0, old, group):
        for channel in range(keys.shape[1]):
            keys[start : start + group, channel] = rounded(keys[start : start + group, channel])
    for place in range(old):
        values[place] = rounded(values[place])
    scores = keys @ query / np.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ values


@pytest.mark.slow
@pytest.mark.parametrize(("group", "window"), [(4, 6), (8, 0)])
def test_kivi_against_loops(group, window):
    kv = KVConfig.of("int4", axis="kivi", group=group, window=window)
    keys = jax.random.split(jax.random.key(3), 3)
    q, k, v = (jax.random.normal(key, (1, 40, heads, 8)) for key, heads in zip(keys, (4, 2, 2), strict=True))
    k = k * jnp.asarray([1, 1, 20, 1, 1, 1, 1, 0.1])[None, None, None] + 0.5  # an outlier among the channels
    cache = KVCache.empty(ONE, kv, slots=1, max_length=40)
    attend, got = jax.jit(lambda cache, *inputs: cache.attend("layers_0", *inputs)), []
    for start, size in ((0, 17), (17, 6), *((i, 1) for i in range(23, 40))):
        part = QKV(*(x[:, start : start + size] for x in (q, k, v)))
        context, cache = attend(cache, part, start + jnp.arange(size)[None])
        got.append(context)
    got = jnp.concatenate(got, axis=1)[0]
    for position in range(40):
        for head in range(4):
            want = kivi_reference(
                np.asarray(k[0, :, head // 2]), np.asarray(v[0, :, head // 2]), np.asarray(q[0, position, head]),
                position, group, window, 4,
            )  # fmt: skip
            np.testing.assert_allclose(got[position, head], want, atol=0.02)


@pytest.mark.slow
def test_bytes():
    sizes = {name: KVCache.empty(DENSE, kv, slots=2, max_length=16) for name, kv in FORMATS.items()}
    per_token = {name: cache.bytes_per_token for name, cache in sizes.items()}
    # Two layers, two heads of eight, keys and values.
    assert per_token["float"] == 2 * 2 * 2 * 8 * 4
    assert per_token["bf16"] == per_token["float"] / 2
    assert per_token["int8"] == 2 * 2 * 2 * (8 + 4)
    assert per_token["int8 heads"] == 2 * 2 * (2 * 8 + 4)
    assert per_token["int4"] == 2 * 2 * 2 * (4 + 4)
    assert sizes["int8"].nbytes == 2 * 16 * per_token["int8"]


@pytest.mark.slow
def test_under_the_transformation():
    """With codes for weights, the embedding table included; and with rules for activations too."""
    config = MOE.replace(num_layers=1)
    low, tokens = quantized_params(config), tokens_of(config, (2, 9))
    params, floats = params_of(config), dequantized(low)
    for kv in (KVConfig(), KVConfig.of("int8")):
        cache = KVCache.empty(config, kv, slots=2, max_length=12)
        call = jax.jit(octavo.served(functools.partial(apply, config)))
        first, _, after = call(low, tokens[:, :8], cache=cache)
        second, _, after = call(low, tokens[:, 8:], cache=after)
        assert after.lengths.tolist() == [9, 9]
        want, _, _ = run(config, floats, tokens, cache=cache)
        np.testing.assert_allclose(jnp.concatenate([first, second], 1), want, atol=1e-4 if kv.keys is None else 0.05)
    rules = octavo.recipe("int8", "decoder/.*layers.*")
    cache = KVCache.empty(config, slots=2, max_length=12)
    model = jax.jit(octavo.quantized(functools.partial(apply, config), rules))
    with_rules, full = model(params, tokens, cache=cache)[0], model(params, tokens)[0]
    np.testing.assert_allclose(with_rules, full, atol=0.05)
    assert np.abs(with_rules - run(config, params, tokens)[0]).max() > 1e-3


def test_errors():
    cache = KVCache.empty(ONE, slots=1, max_length=8)

    def attend(count, length, start=0, layer="layers_0"):
        positions = start + jnp.zeros((count, length), jnp.int32) + jnp.arange(length, dtype=jnp.int32)[None]
        cache.attend(layer, QKV(*(jnp.zeros((count, length, heads, 8)) for heads in (4, 2, 2))), positions)

    with pytest.raises(ValueError, match="9 tokens do not fit into a cache of max_length=8"):
        attend(1, 9)
    with pytest.raises(ValueError, match="position 9 does not fit into a cache of max_length=8"):
        attend(1, 1, start=9)
    with pytest.raises(ValueError, match=r"2 rows of tokens for 1 slots: say which by cache.at"):
        attend(2, 1)
    with pytest.raises(ValueError, match="2 rows of tokens for 1 slots"):
        cache.positions(jnp.zeros((2, 1), jnp.int32))
    with pytest.raises(ValueError, match="the cache has no layer 'layers_7'"):
        attend(1, 1, layer="layers_7")
    with pytest.raises(ValueError, match="unknown keys 'int9': did you mean 'int8'"):
        KVConfig.of("int9")
    with pytest.raises(ValueError, match="unknown axis 'dk'"):
        KVConfig(axis="dk")
    with pytest.raises(ValueError, match="group is at least 1, got 0"):
        KVConfig(group=0)
    with pytest.raises(ValueError, match="keeps old positions in low precision"):
        KVConfig(axis="kivi")
    with pytest.raises(ValueError, match="use int8, int4 or int2, not fp8"):
        KVConfig.of("fp8", axis="kivi")
    with pytest.raises(ValueError, match="a group of 33 does not divide 512"):
        KVCache.empty(DENSE, KVConfig.of("int4", axis="kivi", group=33), slots=1, max_length=8)
    with pytest.raises(ValueError, match="at least one slot and one position"):
        KVCache.empty(DENSE, slots=0, max_length=8)


def test_a_traced_position_beyond_is_nan():
    params = params_of(ONE)
    cache = KVCache.empty(ONE, slots=2, max_length=8)
    logits, _, _ = run(ONE, params, jnp.zeros((2, 1), jnp.int32), jnp.asarray([[8], [7]]), cache=cache)
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()


def test_names_are_those_of_the_layers():
    config = DENSE.replace(num_layers=4, unscanned_first=1, unscanned_last=1)
    names = []
    jax.eval_shape(lambda: names.extend(KVCache.empty(config, slots=1, max_length=8).layers))
    assert names == [g.name for g in layer_groups(config)]
