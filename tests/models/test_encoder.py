"""The encoder: against a plain reference, and what padding, batches and rules do to it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.models.encoder import (
    EncoderConfig,
    abstract_encoder_params,
    encoder_apply,
    encoder_params,
)
from octavo.models.layers import ACTIVATIONS
from octavo.models.pooling import cls_pool, max_pool, mean_pool, normalize
from tests.arrays import normal, random_params

SMALL = EncoderConfig(vocab_size=31, emb_dim=16, num_layers=2, num_heads=4, mlp_dim=24, max_length=12)
run = jax.jit(encoder_apply, static_argnums=0)


@functools.cache
def params_of(config=SMALL):
    """Random parameters, of which no scale is one and no bias zero."""
    rng = np.random.default_rng(1)
    noisy = lambda x: jnp.asarray(x + 0.3 * rng.standard_normal(x.shape), x.dtype)  # noqa: E731
    return jax.tree.map(noisy, random_params(abstract_encoder_params(config)))


TYPES = jnp.asarray([[0, 0, 1, 1, 1, 0, 1]] * 3)


def batch(length=7):
    tokens = np.random.default_rng(2).integers(0, SMALL.vocab_size, (3, length))
    mask = np.arange(length)[None, :] < np.asarray([length, 4, 1])[:, None]
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(mask)


def states_of(tokens, mask, types=None):
    """The states, by one program for all tests of this shape."""
    return run(SMALL, params_of(), tokens, mask, jnp.zeros_like(tokens) if types is None else types)


def reference(params, tokens, types):
    """One text without padding, in float64, written as the paper has it."""

    def dense(p, x):
        return x @ p["kernel"] + p["bias"]

    def norm(p, x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + SMALL.norm_eps) * p["scale"] + p["bias"]

    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    tables = p["embeddings"]
    rows = tables["word"]["embedding"][tokens] + tables["type"]["embedding"][types]
    x = norm(tables["norm"], rows + tables["position"]["embedding"][: len(tokens)])
    for layer in (p["encoder"][f"layers_{i}"] for i in range(SMALL.num_layers)):
        heads, size = [], SMALL.emb_dim // SMALL.num_heads
        for h in range(SMALL.num_heads):
            part = slice(h * size, (h + 1) * size)
            query, key, value = (dense(layer["self_attention"][n], x)[:, part] for n in ("query", "key", "value"))
            scores = np.exp(query @ key.T / math.sqrt(size))
            heads.append(scores / scores.sum(-1, keepdims=True) @ value)
        x = norm(layer["self_attention_norm"], x + dense(layer["self_attention"]["out"], np.concatenate(heads, -1)))
        hidden = dense(layer["mlp"]["wi_0"], x)
        hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
        x = norm(layer["mlp_norm"], x + dense(layer["mlp"]["wo"], hidden))
    return x


@pytest.mark.slow
def test_states_are_those_of_the_reference():
    tokens, mask = batch()
    states = states_of(tokens, mask, TYPES)
    for row, count in enumerate([7, 4, 1]):
        wanted = reference(params_of(), np.asarray(tokens)[row, :count], np.asarray(TYPES)[row, :count])
        np.testing.assert_allclose(states[row, :count], wanted, rtol=0, atol=2e-5)


def test_token_types_are_zero_by_default():
    tokens, mask = batch()
    first, second = (states_of(tokens, mask, jnp.full(tokens.shape, n, tokens.dtype)) for n in (0, 1))
    np.testing.assert_allclose(run(SMALL, params_of(), tokens, mask), first, rtol=0, atol=1e-5)
    assert float(jnp.abs(first - second).max()) > 0.01


def test_padding_changes_nothing():
    tokens, mask = batch()
    other = jnp.where(mask, tokens, (tokens + 5) % SMALL.vocab_size)
    states, mask = np.asarray(states_of(tokens, mask)), np.asarray(mask)
    np.testing.assert_array_equal(np.asarray(states_of(other, mask))[mask], states[mask])
    longer = [np.pad(x, ((0, 0), (0, 5))) for x in (tokens, mask)]
    np.testing.assert_allclose(np.asarray(states_of(*longer))[:, :7][mask], states[mask], rtol=0, atol=1e-5)
    assert np.isfinite(states_of(tokens, np.zeros_like(mask))).all()


def test_other_texts_of_a_batch_change_nothing():
    tokens, mask = (np.asarray(x) for x in batch())
    together = np.asarray(states_of(tokens, mask))
    for row in range(3):
        alone = [np.where(np.arange(3)[:, None] == row, x, other) for x, other in ((tokens, 5), (mask, True))]
        np.testing.assert_array_equal(np.asarray(states_of(*alone))[row][mask[row]], together[row][mask[row]])


def test_a_token_sees_those_after_it():
    tokens, mask = batch()
    changed = tokens.at[0, 6].set((tokens[0, 6] + 1) % SMALL.vocab_size)
    before, after = (states_of(x, mask)[0, 0] for x in (tokens, changed))
    assert float(jnp.abs(before - after).max()) > 1e-3


def test_a_token_beyond_the_table_is_noticed():
    tokens, mask = batch()
    assert bool(jnp.isnan(states_of(tokens.at[0, 0].set(31), mask)[0]).any())


@pytest.mark.slow
def test_every_parameter_has_a_gradient():
    tokens, mask = batch()
    loss = lambda params: jnp.sum(mean_pool(encoder_apply(SMALL, params, tokens, mask), mask)[:, 0])  # noqa: E731
    found = jax.jit(jax.grad(loss))(params_of())
    biases = [layer["self_attention"]["key"].pop("bias") for layer in found["encoder"].values()]
    assert all(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(found))
    # A bias of the keys adds the same to all scores of a query, which the softmax does not see.
    assert all(float(jnp.abs(bias).max()) < 1e-5 for bias in biases)


def test_all_products_with_weights_are_quantized_and_no_others():
    low = octavo.quantized(functools.partial(encoder_apply, SMALL), octavo.recipe("qat_int8"))
    sites = low.sites(abstract_encoder_params(SMALL), *batch())
    parts = (
        "self_attention/query",
        "self_attention/key",
        "self_attention/value",
        "self_attention/out",
        "mlp/wi_0",
        "mlp/wo",
    )
    wanted = {f"encoder/layers_{i}/{part}" for i in range(2) for part in parts}
    assert {site.path for site in sites if site.config is not None} == wanted
    assert {site.leaf for site in sites if site.config is not None} == {f"{path}/kernel" for path in wanted}
    assert {site.path for site in sites if site.config is None} == {
        f"encoder/layers_{i}/self_attention" for i in range(2)
    }


@pytest.mark.codegen
@pytest.mark.parametrize("name", ["qat_int8", "int8w"])
def test_what_is_converted_is_served_bit_for_bit(name):
    model, rules, inputs = functools.partial(encoder_apply, SMALL), octavo.recipe(name), batch()
    params = octavo.convert(model, params_of(), *inputs, rules=rules)
    kernel = params["encoder"]["layers_1"]["mlp"]["wo"]["kernel"]
    assert (kernel.qtype.name, kernel.shape, kernel.scale.shape) == ("int8", (24, 16), (1, 16))
    served = jax.jit(octavo.served(model, rules))(params, *inputs)
    np.testing.assert_array_equal(served, jax.jit(octavo.quantized(model, rules))(params_of(), *inputs))
    error = np.abs(np.asarray(served - states_of(*inputs)))[inputs[1]].max()
    assert 0 < error < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(dtype):
    config = SMALL.replace(dtype=dtype, weight_dtype=dtype)
    params = jax.tree.map(lambda x: x.astype(dtype), params_of())
    states = run(config, params, *batch())
    assert states.dtype == jnp.dtype(dtype)
    wanted = run(SMALL, jax.tree.map(lambda x: x.astype(jnp.float32), params), *batch(), jnp.zeros_like(TYPES))
    tolerance = 0.15 if dtype == "bfloat16" else 0.02
    np.testing.assert_allclose(states.astype(jnp.float32), wanted, rtol=0, atol=tolerance)


def test_shapes_are_known_without_arrays():
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert shapes(abstract_encoder_params(SMALL)) == shapes(
        jax.eval_shape(lambda key: encoder_params(SMALL, key), jax.random.key(0))
    )


def test_pooling():
    states, mask = normal(0, 2, 3, 4), jnp.asarray([[True, True, False], [False] * 3])
    means = mean_pool(states, mask)
    np.testing.assert_allclose(means[0], states[0, :2].mean(0), rtol=1e-6)
    np.testing.assert_array_equal(means[1], np.zeros(4))
    np.testing.assert_array_equal(cls_pool(states, mask), states[:, 0])
    np.testing.assert_array_equal(max_pool(states, mask)[0], states[0, :2].max(0))
    np.testing.assert_allclose(jnp.linalg.norm(normalize(states), axis=-1), np.ones((2, 3)), rtol=1e-6)
    assert normalize(jnp.zeros((1, 4))).tolist() == [[0.0] * 4]


MODERN = SMALL.replace(
    num_types=0,
    rope_theta=1e4,
    sliding_window=2,
    sliding_layers=(False, True),
    gated_mlp=True,
    norm_place="pre",
    norm_bias=False,
    attention_bias=False,
    mlp_bias=False,
)


def test_options_make_other_parameters():
    layers = abstract_encoder_params(MODERN)["encoder"]
    assert set(layers["layers_0"]) == {"mlp", "mlp_norm", "self_attention"}
    assert set(layers["layers_1"]) - set(layers["layers_0"]) == {"self_attention_norm"}
    assert set(layers["layers_1"]["mlp"]) == {"wi_0", "wi_1", "wo"}
    assert set(abstract_encoder_params(MODERN)["embeddings"]) == {"norm", "word"}
    mpnet = abstract_encoder_params(SMALL.replace(num_types=0, padding_id=1, relative_buckets=32))
    assert mpnet["relative_bias"]["embedding"].shape == (32, 4)
    assert mpnet["embeddings"]["position"]["embedding"].shape == (14, 16)


@pytest.mark.slow
@pytest.mark.parametrize("config", [MODERN, SMALL.replace(num_types=0, padding_id=1, relative_buckets=32)])
def test_options_have_gradients_and_are_quantized(config):
    (tokens, mask), rules = batch(), octavo.recipe("qat_int8")
    model, params = functools.partial(encoder_apply, config), params_of(config)
    loss = lambda params: jnp.sum(mean_pool(octavo.quantized(model, rules)(params, tokens, mask), mask)[:, 0])  # noqa: E731
    found = jax.jit(jax.grad(loss))(params)
    for layer in found["encoder"].values():
        layer["self_attention"]["key"].pop("bias", None)
    assert all(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(found))


def test_gelu_is_the_exact_one():
    x = np.linspace(-4, 4, 33)
    exact = x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    np.testing.assert_allclose(ACTIVATIONS["gelu_exact"](jnp.asarray(x, jnp.float32)), exact, rtol=0, atol=1e-6)
    assert np.abs(np.asarray(ACTIVATIONS["gelu"](jnp.asarray(x, jnp.float32))) - exact).max() > 1e-4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_layers": 0}, "num_layers is at least 1, got 0"),
        ({"num_heads": 3}, "num_heads=3 does not divide emb_dim=16 into equal heads"),
        ({"norm_eps": 0.0}, "norm_eps is positive, got 0.0"),
        ({"activation": "gelo"}, "unknown activation 'gelo': .*gelu"),
        ({"dtype": "float8"}, "unknown dtype 'float8': .*float32"),
        ({"norm_place": "both"}, "unknown norm_place 'both': .*Known: post, pre"),
        ({"rope_theta": -1.0}, "rope_theta is positive, got -1.0"),
        ({"rope_theta": 1e4, "num_heads": 16}, "rotary positions rotate pairs of values, but heads have 1"),
        ({"rope_theta": 1e4, "padding_id": 1}, "padding_id is for learned positions, but rope_theta makes them rotary"),
        ({"sliding_rope_theta": 1e4}, "sliding_rope_theta needs rope_theta"),
        ({"sliding_layers": ()}, "sliding_layers is the pattern of layers with a window"),
    ],
)
def test_what_is_no_config(changes, text):
    with pytest.raises(ValueError, match=text):
        SMALL.replace(**changes)


def test_a_config_is_found_again():
    assert EncoderConfig.from_json(SMALL.to_json()) == SMALL


def test_what_does_not_fit_raises():
    params, (tokens, mask) = params_of(), batch()
    with pytest.raises(ValueError, match=r"tokens are integers of shape \[batch, length\], got int32 of shape \(7,\)"):
        encoder_apply(SMALL, params, tokens[0], mask)
    with pytest.raises(ValueError, match=r"mask has the shape of tokens, \(3, 7\), got \(3, 6\)"):
        encoder_apply(SMALL, params, tokens, mask[:, 1:])
    with pytest.raises(ValueError, match="texts of 13 tokens are longer than max_length=12"):
        encoder_apply(SMALL, params, *batch(13))
    with pytest.raises(ValueError, match="types are given, but this encoder has no token types: num_types=0"):
        encoder_apply(SMALL.replace(num_types=0), params, tokens, mask, TYPES)
    with pytest.raises(ValueError, match="there is no 'encoder/layers_2/"):
        encoder_apply(SMALL.replace(num_layers=3), params, tokens, mask)
    with pytest.raises(ValueError, match="this config: there is an unexpected 'encoder/layers_1/mlp/wi_0/bias'"):
        encoder_apply(SMALL.replace(num_layers=1), params, tokens, mask)
    with pytest.raises(ValueError, match=r"'embeddings/word/embedding' has the shape \(31, 16\), but .* \(32, 16\)"):
        encoder_apply(SMALL.replace(vocab_size=32), params, tokens, mask)
