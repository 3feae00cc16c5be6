import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

import octavo
from octavo.models import Decoder, apply, init_params, stack_layers, unstack_layers
from tests.models import reference
from tests.models.common import DENSE, MOE, batch, loss_of, params_of

VARIANTS = {
    "dense": DENSE,
    "one head": DENSE.replace(num_query_heads=1, num_kv_heads=1, rope_theta=500.0, norm_eps=1e-2),
    "multi-head, untied": DENSE.replace(num_kv_heads=4, tied_logits=False, activation="relu"),
    "apart": DENSE.replace(num_layers=4, unscanned_first=1, unscanned_last=1),
    "moe": MOE,
    "switch": MOE.replace(experts_per_token=1, shared_experts=0, first_dense_layers=0),
    "moe, all experts": MOE.replace(sparse_matmul=False),
    "moe apart": MOE.replace(num_layers=4, unscanned_first=2, unscanned_last=1),
}
variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


@functools.cache
def jitted(config):
    return jax.jit(functools.partial(apply, config))


@variants
def test_agrees_with_the_reference(config):
    params, inputs = params_of(config), batch(config)
    logits, aux = jitted(config)(params, *inputs)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), unstack_layers(params))
    wanted, load = reference.forward(wide, *map(np.asarray, inputs), config)
    assert logits.dtype == jnp.float32
    assert np.std(wanted) > 0.3
    np.testing.assert_allclose(logits, wanted, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(aux.load_balance, load, rtol=1e-5)


@variants
def test_scanned_and_unscanned_are_the_same_model(config):
    scanned, inputs = params_of(config), batch(config)
    unscanned = config.replace(scan_layers=False)
    params = unstack_layers(scanned)
    jax.tree.map(np.testing.assert_array_equal, stack_layers(params), scanned)
    for got, wanted in zip(jitted(unscanned)(params, *inputs), jitted(config)(scanned, *inputs), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    a, b = init_params(config, jax.random.key(3)), init_params(unscanned, jax.random.key(3))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), unstack_layers(a), b)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_tokens_sorted_by_expert_give_what_all_experts_give(k):
    sparse = MOE.replace(experts_per_token=k)
    dense, params, inputs = sparse.replace(sparse_matmul=False), params_of(sparse), batch(MOE)
    for value in (lambda c: jitted(c)(params, *inputs), lambda c: jax.jit(jax.grad(loss_of(c)))(params, *inputs)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=2e-5), value(sparse), value(dense))


def test_an_expert_may_have_no_tokens():
    params = params_of(MOE)
    router = params["decoder"]["layers"]["moe_block"]["router"]
    favours = jnp.asarray([1.0, 1.0, 0.0, 0.0])
    only = {**params, "decoder": {**params["decoder"]}}
    only["decoder"]["layers"] = {**params["decoder"]["layers"]}
    block = {**params["decoder"]["layers"]["moe_block"], "router": jax.tree.map(lambda x: x * favours * 0.0, router)}
    only["decoder"]["layers"]["moe_block"] = block
    grads = jax.jit(jax.grad(loss_of(MOE)))(only, *batch(MOE))
    unused = grads["decoder"]["layers"]["moe_block"]["wi_0"]["kernel"]
    assert bool(jnp.isfinite(unused).all())
    assert bool((unused[:, 2:] == 0).all())  # equal logits: the first two are picked
    assert bool((unused[:, :2] != 0).any())


@pytest.mark.parametrize("config", [DENSE, MOE, MOE.replace(experts_per_token=1)], ids=["dense", "moe", "switch"])
def test_gradients_agree_with_finite_differences(config):
    params, inputs = params_of(config), batch(config)
    fn = jax.jit(lambda params: loss_of(config)(params, *inputs))
    # The choice of experts jumps, so steps are small; float32 differences of small steps are coarse.
    check_grads(fn, (params,), order=1, modes=["rev"], eps=2e-3, atol=2e-2, rtol=2e-2)
    grads = jax.jit(jax.grad(loss_of(config)))(params, *inputs)
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_the_future_is_unseen(config):
    params, (tokens, *_) = params_of(config), batch(config)
    logits, _ = jitted(config)(params, tokens)
    for t in (2, 6):
        changed, _ = jitted(config)(params, tokens.at[:, t].set((tokens[:, t] + 1) % config.vocab_size))
        np.testing.assert_allclose(changed[:, :t], logits[:, :t], atol=1e-6)
        assert np.abs(changed[:, t:] - logits[:, t:]).max() > 1e-3


def test_segments_are_apart():
    params, (tokens, positions, segments) = params_of(DENSE), batch(DENSE)
    logits, _ = jitted(DENSE)(params, tokens, positions, segments)
    alone, _ = jitted(DENSE)(params, tokens[:1, 3:])
    np.testing.assert_allclose(logits[:1, 3:], alone, atol=1e-6)
    changed, _ = jitted(DENSE)(params, tokens.at[0, 0].add(1), positions, segments)
    np.testing.assert_array_equal(changed[0, 3:], logits[0, 3:])
    together, _ = jitted(DENSE)(params, tokens, positions)
    assert np.abs(together[0, 3:] - logits[0, 3:]).max() > 1e-2


def test_only_distances_count():
    params, (tokens, *_) = params_of(DENSE), batch(DENSE)
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
    plain, _ = jitted(DENSE)(params, tokens)
    np.testing.assert_array_equal(jitted(DENSE)(params, tokens, positions)[0], plain)
    np.testing.assert_allclose(jitted(DENSE)(params, tokens, positions + 50)[0], plain, atol=2e-5)
    assert np.abs(jitted(DENSE)(params, tokens, positions * 2)[0] - plain).max() > 1e-3


def test_an_unknown_token_is_noticed():
    logits, _ = jitted(DENSE)(params_of(DENSE), jnp.asarray([[1, DENSE.vocab_size]]))
    assert bool(jnp.isfinite(logits[0, 0]).all())
    assert bool(jnp.isnan(logits[0, 1]).all())


@pytest.mark.parametrize("config", [DENSE, MOE.replace(tied_logits=False)], ids=["dense", "moe"])
def test_bfloat16_is_close_and_really_used(config):
    low, params, inputs = config.replace(dtype="bfloat16"), params_of(config), batch(config)
    logits, _ = jitted(low)(params, *inputs)
    wanted, _ = jitted(config)(params, *inputs)
    assert logits.dtype == jnp.float32
    error = np.linalg.norm(logits - wanted) / np.linalg.norm(wanted)
    assert 1e-4 < error < 0.05
    sites = octavo.quantized(functools.partial(apply, low), "int8", on_unmatched="ignore").sites(params, *inputs)
    kinds = {site.path.split("/")[-1]: site.lhs[1] for site in sites}
    assert kinds["query"] == kinds["wo"] == "bfloat16"
    assert kinds.get("router", "float32") == "float32"
    assert kinds["token_embedder" if config.tied_logits else "logits_dense"] == "float32"
    cheap = octavo.quantized(functools.partial(apply, low.replace(float32_logits=False)), "int8")
    assert {site.lhs[1] for site in cheap.sites(params, *inputs) if "router" not in site.path} == {"bfloat16"}


def test_weights_are_kept_in_their_own_dtype():
    params = init_params(MOE.replace(weight_dtype="bfloat16"), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    logits, _ = apply(MOE.replace(weight_dtype="bfloat16"), params, *batch(MOE))
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
        logits, _ = jitted(config)(jax.jit(init_params, static_argnums=0)(config, jax.random.key(0)), tokens)
        assert 0.7 < float(logits.std()) < 1.4
    kernel = init_params(MOE, jax.random.key(0))["decoder"]["layers"]["moe_block"]["wi_0"]["kernel"]
    assert 0.9 < float(kernel.std()) * MOE.emb_dim**0.5 < 1.1  # experts count as a batch, not as inputs
