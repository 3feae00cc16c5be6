import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import octavo
from octavo.models import Decoder, apply, stack_layers, unstack_layers
from tests.models import reference
from tests.models.common import DENSE, MIXED, MOE, batch, init, loss_of, params_of, run, step_of

VARIANTS = {
    "dense": DENSE,
    "one head": DENSE.replace(num_query_heads=1, num_kv_heads=1, rope_theta=500.0, norm_eps=1e-2),
    "multi-head, untied": DENSE.replace(num_kv_heads=4, tied_logits=False, activation="relu"),
    "moe": MOE,
    "switch": MOE.replace(experts_per_token=1, shared_experts=0),
    "moe, all experts": MOE.replace(sparse_matmul=False),
    "dense, scanned and apart": MIXED,
}
variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


@variants
@pytest.mark.sampled(8)
def test_agrees_with_the_reference(config):
    params, inputs = params_of(config), batch(config)
    logits, aux = run(config, params, *inputs)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), unstack_layers(params))
    wanted, load = reference.forward(wide, *map(np.asarray, inputs), config)
    assert logits.dtype == jnp.float32
    assert np.std(wanted) > 0.3
    np.testing.assert_allclose(logits, wanted, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(aux.load_balance, load, rtol=1e-5)


@pytest.mark.parametrize("config", [DENSE, MIXED], ids=["dense", "mixed"])
@pytest.mark.sampled(2)
def test_scanned_and_unscanned_are_the_same_model(config):
    scanned, inputs = params_of(config), batch(config)
    unscanned, params = config.replace(scan_layers=False), unstack_layers(scanned)
    jax.tree.map(np.testing.assert_array_equal, stack_layers(params), scanned)
    for got, wanted in zip(run(unscanned, params, *inputs), run(config, scanned, *inputs), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    a, b = init(config, jax.random.key(3)), init(unscanned, jax.random.key(3))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), unstack_layers(a), b)


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.slow
def test_tokens_sorted_by_expert_give_what_all_experts_give(k):
    config = MOE.replace(experts_per_token=k)
    params, inputs = params_of(config), batch(MOE)
    close = functools.partial(np.testing.assert_allclose, atol=2e-6, rtol=2e-5)
    jax.tree.map(close, step_of(config)(params, *inputs), step_of(config.replace(sparse_matmul=False))(params, *inputs))


@pytest.mark.slow
def test_an_expert_may_have_no_tokens():
    params = params_of(MOE)
    layers = params["decoder"]["layers"]
    blind = jax.tree.map(jnp.zeros_like, layers["moe_block"]["router"])  # equal logits: the first two are picked
    block = {**layers["moe_block"], "router": blind}
    params = {**params, "decoder": {**params["decoder"], "layers": {**layers, "moe_block": block}}}
    _, grads = step_of(MOE)(params, *batch(MOE))
    experts = grads["decoder"]["layers"]["moe_block"]["wi_0"]["kernel"]
    assert bool((experts[:, 2:] == 0).all())
    assert bool((experts[:, :2] != 0).any())
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("config", [DENSE, MOE, MOE.replace(experts_per_token=1)], ids=["dense", "moe", "switch"])
@pytest.mark.sampled(3)
def test_gradients_agree_with_finite_differences(config):
    params, inputs = params_of(config), batch(config)
    loss, (_, grads) = jax.jit(loss_of(config)), step_of(config)(params, *inputs)
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(grads))
    for seed in range(3):
        keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params))))
        way = jax.tree.map(lambda x, keys=keys: jax.random.normal(next(keys), x.shape), params)
        # The choice of experts jumps, so steps are short; float32 leaves three digits of their difference.
        there, back = (jax.tree.map(lambda p, d, e=e: p + e * d, params, way) for e in (3e-4, -3e-4))
        slope = (loss(there, *inputs) - loss(back, *inputs)) / 6e-4
        wanted = sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(way), strict=True))
        np.testing.assert_allclose(slope, wanted, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_the_future_is_unseen(config):
    params, (tokens, *_) = params_of(config), batch(config)
    logits, _ = run(config, params, tokens)
    for t in (2, 6):
        changed, _ = run(config, params, tokens.at[:, t].set((tokens[:, t] + 1) % config.vocab_size))
        np.testing.assert_allclose(changed[:, :t], logits[:, :t], atol=1e-6)
        assert np.abs(changed[:, t:] - logits[:, t:]).max() > 1e-3


def test_segments_are_apart():
    params, (tokens, positions, segments) = params_of(DENSE), batch(DENSE)
    logits, _ = run(DENSE, params, tokens, positions, segments)
    alone, _ = run(DENSE, params, tokens[:1, 3:])
    np.testing.assert_allclose(logits[:1, 3:], alone, atol=1e-5)
    changed, _ = run(DENSE, params, tokens.at[0, 0].add(1), positions, segments)
    np.testing.assert_array_equal(changed[0, 3:], logits[0, 3:])
    together, _ = run(DENSE, params, tokens, positions)
    assert np.abs(together[0, 3:] - logits[0, 3:]).max() > 1e-2


def test_only_distances_count():
    params, (tokens, *_) = params_of(DENSE), batch(DENSE)
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
    plain, _ = run(DENSE, params, tokens)
    np.testing.assert_array_equal(run(DENSE, params, tokens, positions)[0], plain)
    np.testing.assert_allclose(run(DENSE, params, tokens, positions + 50)[0], plain, atol=2e-5)
    assert np.abs(run(DENSE, params, tokens, positions * 2)[0] - plain).max() > 1e-3


def test_an_unknown_token_is_noticed():
    tokens = batch(DENSE)[0].at[0, 3].set(DENSE.vocab_size)
    logits, _ = run(DENSE, params_of(DENSE), tokens)
    assert bool(jnp.isnan(logits[0, 3:]).all())
    assert bool(jnp.isfinite(logits[1]).all())


@pytest.mark.parametrize("config", [DENSE, MOE.replace(tied_logits=False)], ids=["dense", "moe"])
@pytest.mark.sampled(2)
def test_bfloat16_is_close_and_really_used(config):
    low, params, inputs = config.replace(dtype="bfloat16"), params_of(config), batch(config)
    logits, _ = run(low, params, *inputs)
    wanted, _ = run(config, params, *inputs)
    assert logits.dtype == jnp.float32
    error = np.linalg.norm(logits - wanted) / np.linalg.norm(wanted)
    assert 1e-4 < error < 0.05
    sites = octavo.quantized(functools.partial(apply, low), "int8", on_unmatched="ignore").sites(params, *inputs)
    kinds = {site.path.split("/")[-1]: site.lhs[1] for site in sites}
    assert kinds.get("router", "float32") == "float32"
    assert kinds["query"] == kinds["wo"] == "bfloat16"
    assert kinds["token_embedder" if config.tied_logits else "logits_dense"] == "float32"
    cheap = low.replace(float32_logits=False)
    sites = octavo.quantized(functools.partial(apply, cheap), "int8", on_unmatched="ignore").sites(params, *inputs)
    assert {site.lhs[1] for site in sites if "router" not in site.path} == {"bfloat16"}
    # Logits are summed in float32 all the same.
    narrow, _ = run(cheap, params, *inputs)
    assert not np.array_equal(narrow, narrow.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(narrow, logits, rtol=2**-6, atol=2**-6)


def test_weights_are_kept_in_their_own_dtype():
    config = MOE.replace(weight_dtype="bfloat16")
    params = init(config, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    logits, _ = run(config, params, *batch(MOE))
    assert bool(jnp.isfinite(logits).all())


def test_as_a_module():
    model = Decoder(DENSE, rngs=nnx.Rngs(params=jax.random.key(5)))
    tokens, *_ = batch(DENSE)
    logits, aux = model(tokens)
    wanted, _ = apply(DENSE, nnx.to_pure_dict(nnx.state(model)), tokens)
    np.testing.assert_array_equal(logits, wanted)
    assert aux.load_balance == 0.0


def test_first_numbers_are_of_a_sensible_size():
    deep = DENSE.replace(emb_dim=64, num_layers=24, mlp_dim=128, vocab_size=100)
    tokens = jax.random.randint(jax.random.key(0), (4, 32), 0, 100)
    for config in (deep, deep.replace(tied_logits=False)):
        logits, _ = run(config, init(config, jax.random.key(0)), tokens)
        assert 0.7 < float(logits.std()) < 1.4
    kernel = init(MOE, jax.random.key(0))["decoder"]["layers"]["moe_block"]["wi_0"]["kernel"]
    assert 0.9 < float(kernel.std()) * MOE.emb_dim**0.5 < 1.1  # experts count as a batch, not as inputs


@pytest.mark.parametrize("config", [DENSE, pytest.param(MIXED, marks=pytest.mark.slow)], ids=["dense", "mixed"])
def test_a_batch_in_parts_gives_what_it_gives_whole(config):
    params, inputs = params_of(config), batch(config, (6, 7))
    whole, _ = run(config, params, *inputs)
    cut, aux = run(config.replace(batch_split=3), params, *inputs)
    np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-5)
    assert aux.load_balance.shape == ()
    assert (aux.load_balance > 0) == (config.num_experts > 1)
    with pytest.raises(ValueError, match="6 rows cannot be cut into batch_split=4 equal parts"):
        run(config.replace(batch_split=4), params, *inputs)
