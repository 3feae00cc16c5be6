import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import octavo
from octavo.models import Decoder, abstract_params, apply, init_params, unstack_layers
from tests.cases import slow_except
from tests.models import reference
from tests.models.common import DENSE, MIXED, MOE, batch, init, one_document, params_of, run, step_of

VARIANTS = {
    "dense": DENSE,
    "one head": DENSE.replace(num_query_heads=1, num_kv_heads=1, rope_theta=500.0, norm_eps=1e-2),
    "multi-head, untied": DENSE.replace(num_kv_heads=4, tied_logits=False, activation="relu"),
    "moe": MOE,
    "switch": MOE.replace(experts_per_token=1, shared_experts=0),
    "moe, all experts": MOE.replace(sparse_matmul=False),
    "dense, scanned and apart": MIXED,
}


@pytest.mark.parametrize("name", slow_except(["dense", "moe"], VARIANTS))
def test_agrees_with_the_reference(name):
    config = VARIANTS[name]
    params, inputs = params_of(config), batch(config)
    logits, aux = run(config, params, *inputs)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), unstack_layers(params))
    wanted, load = reference.forward(wide, *map(np.asarray, inputs), config)
    assert logits.dtype == jnp.float32
    assert np.std(wanted) > 0.3
    np.testing.assert_allclose(logits, wanted, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(aux.load_balance, load, rtol=1e-5)


@pytest.mark.parametrize("config", [DENSE, pytest.param(MIXED, marks=pytest.mark.slow)], ids=["dense", "mixed"])
def test_scanned_and_unscanned_are_the_same_model(config):
    scanned, inputs = params_of(config), batch(config)
    unscanned, params = config.replace(scan_layers=False), unstack_layers(scanned)
    for got, wanted in zip(run(unscanned, params, *inputs), run(config, scanned, *inputs), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    a, b = init(config, jax.random.key(3)), init(unscanned, jax.random.key(3))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), unstack_layers(a), b)
    one, other = (p["decoder"]["layers"]["self_attention"]["query"]["kernel"] for p in (a, scanned))
    assert bool((one[0] != one[1]).any())
    assert bool((one != other).any())


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2])
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


GRADIENTS = {"dense": DENSE, "moe": MOE, "switch": MOE.replace(experts_per_token=1)}


@pytest.mark.parametrize("name", slow_except(["dense"], GRADIENTS))
def test_gradients_agree_with_finite_differences(name):
    config = GRADIENTS[name]
    params, inputs = jax.tree.map(np.asarray, params_of(config)), batch(config)
    step = step_of(config)
    grads = jax.tree.map(np.asarray, step(params, *inputs)[1])
    assert all(np.any(g != 0) for g in jax.tree.leaves(grads))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        direction = jax.tree.map(lambda x, rng=rng: rng.standard_normal(x.shape).astype(np.float32), params)
        # The choice of experts is discontinuous, so steps are short; float32 leaves three digits of their difference.
        moved = [jax.tree.map(lambda p, d, e=e: p + np.float32(e) * d, params, direction) for e in (3e-4, -3e-4)]
        ahead, behind = (step(params, *inputs)[0] for params in moved)
        slope = (ahead - behind) / 6e-4
        wanted = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))
        np.testing.assert_allclose(slope, wanted, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_the_future_is_unseen(config):
    params, (tokens, *_) = params_of(config), batch(config)
    logits, _ = run(config, params, *one_document(tokens))
    for t in (2, 6):
        other = tokens.at[:, t].set((tokens[:, t] + 1) % config.vocab_size)
        changed, _ = run(config, params, *one_document(other))
        np.testing.assert_allclose(changed[:, :t], logits[:, :t], atol=1e-6)
        assert np.abs(changed[:, t:] - logits[:, t:]).max() > 1e-3


def test_segments_are_apart():
    params, (tokens, positions, segments) = params_of(DENSE), batch(DENSE)
    logits, _ = run(DENSE, params, tokens, positions, segments)
    # The second document alone, with other tokens after it, which it does not see.
    alone, _ = run(DENSE, params, *one_document(jnp.roll(tokens, -3, axis=1)))
    np.testing.assert_allclose(logits[0, 3:], alone[0, :4], atol=1e-5)
    changed, _ = run(DENSE, params, tokens.at[0, 0].add(1), positions, segments)
    np.testing.assert_array_equal(changed[0, 3:], logits[0, 3:])
    together, _ = run(DENSE, params, tokens, positions, jnp.ones_like(segments))
    assert np.abs(together[0, 3:] - logits[0, 3:]).max() > 1e-2


def test_only_distances_count():
    params, (tokens, positions, segments) = params_of(DENSE), one_document(batch(DENSE)[0])
    plain, _ = run(DENSE, params, tokens)
    np.testing.assert_array_equal(run(DENSE, params, tokens, positions)[0], plain)
    np.testing.assert_allclose(run(DENSE, params, tokens, positions + 50, segments)[0], plain, atol=2e-5)
    assert np.abs(run(DENSE, params, tokens, positions * 2, segments)[0] - plain).max() > 1e-3


def test_an_unknown_token_is_noticed():
    tokens = batch(DENSE)[0].at[0, 3].set(DENSE.vocab_size)
    logits, _ = run(DENSE, params_of(DENSE), *one_document(tokens))
    assert bool(jnp.isnan(logits[0, 3:]).all())
    assert bool(jnp.isfinite(logits[1]).all())


BFLOAT16 = [config.replace(dtype="bfloat16") for config in (DENSE, MOE.replace(tied_logits=False))]


@pytest.mark.slow
@pytest.mark.parametrize("config", BFLOAT16, ids=["dense", "moe"])
def test_bfloat16_is_close(config):
    plain = config.replace(dtype="float32")
    params, inputs = params_of(plain), batch(config)
    logits, _ = run(config, params, *inputs)
    wanted, _ = run(plain, params, *inputs)
    assert logits.dtype == jnp.float32
    error = np.linalg.norm(logits - wanted) / np.linalg.norm(wanted)
    assert 1e-4 < error < 0.05
    # Logits are summed in float32 even where they are multiplied in bfloat16.
    narrow, _ = run(config.replace(float32_logits=False), params, *inputs)
    assert not np.array_equal(narrow, narrow.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(narrow, logits, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    "config", [BFLOAT16[0], pytest.param(BFLOAT16[1], marks=pytest.mark.slow)], ids=["dense", "moe"]
)
def test_bfloat16_is_really_used(config):
    def sites(config):
        model = octavo.quantized(functools.partial(apply, config), "int8", on_unmatched="ignore")
        return model.sites(abstract_params(config), *batch(config))

    kinds = {site.path.split("/")[-1]: site.lhs[1] for site in sites(config)}
    assert kinds.get("router", "float32") == "float32"
    assert kinds["query"] == kinds["wo"] == "bfloat16"
    assert kinds["token_embedder" if config.tied_logits else "logits_dense"] == "float32"
    cheap = sites(config.replace(float32_logits=False))
    assert {site.lhs[1] for site in cheap if "router" not in site.path} == {"bfloat16"}


def test_weights_are_kept_in_their_own_dtype():
    config = MOE.replace(weight_dtype="bfloat16")
    params = jax.eval_shape(init, config, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    logits, _ = jax.eval_shape(functools.partial(run, config), params, *batch(MOE))
    assert logits.dtype == jnp.float32


@pytest.mark.slow
def test_as_a_module():
    model = nnx.jit(lambda: Decoder(DENSE, rngs=nnx.Rngs(params=jax.random.key(5))))()
    inputs = batch(DENSE)
    logits, aux = nnx.jit(lambda model, *inputs: model(*inputs))(model, *inputs)
    wanted, _ = run(DENSE, nnx.to_pure_dict(nnx.state(model)), *inputs)
    np.testing.assert_array_equal(logits, wanted)
    assert aux.load_balance == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_initial_logits_have_unit_variance(tied):
    config = DENSE.replace(emb_dim=64, num_layers=24, mlp_dim=128, vocab_size=100, tied_logits=tied)
    tokens = np.random.default_rng(0).integers(0, 100, (4, 32))
    logits = jax.jit(lambda key: apply(config, init_params(config, key), tokens)[0])(jax.random.key(0))
    assert 0.7 < float(logits.std()) < 1.4
    # Experts are a batch axis of the initializer, not inputs.
    kernel = init(MOE, jax.random.key(0))["decoder"]["layers"]["moe_block"]["wi_0"]["kernel"]
    assert 0.9 < float(kernel.std()) * MOE.emb_dim**0.5 < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("config", [DENSE, MIXED], ids=["dense", "mixed"])
def test_a_split_batch_gives_the_same(config):
    params, inputs = params_of(config), batch(config, (6, 7))
    whole, _ = run(config, params, *inputs)
    cut, aux = run(config.replace(batch_split=3), params, *inputs)
    np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-5)
    assert aux.load_balance.shape == ()
    assert (aux.load_balance > 0) == (config.num_experts > 1)
    with pytest.raises(ValueError, match="6 rows cannot be split into batch_split=4 equal parts"):
        run(config.replace(batch_split=4), params, *inputs)
