"""The model knows nothing of quantization; that all of it and no more can be quantized is tested here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import octavo
from octavo.models import Decoder, abstract_params, apply, layer_groups
from tests.cases import slow_except
from tests.models.common import DENSE, MIXED, MOE, batch, loss_of, params_of, step_of

RULES = octavo.recipe("int8", "decoder/.*layers.*")
ATTENTION = ("query", "key", "value", "out")
MLP = ("wi_0", "wi_1", "wo")
REMAT = ("none", "minimal", "full")


def expected(config):
    """Every projection of every layer, and with which operation."""
    found, experts = set(), "ragged_dot" if config.sparse_matmul else "einsum"
    for group in layer_groups(config):
        layer = f"decoder/{group.name}"
        found |= {(f"{layer}/self_attention/{name}", "dot_general") for name in ATTENTION}
        if not group.is_moe:
            found |= {(f"{layer}/mlp/{name}", "dot_general") for name in MLP}
            continue
        found |= {(f"{layer}/moe_block/{name}", experts) for name in MLP}
        if config.shared_experts:
            found |= {(f"{layer}/moe_block/shared_experts/{name}", "dot_general") for name in MLP}
    return found


UNTIED = DENSE.replace(num_layers=2, tied_logits=False)
# Every pair of a model, scanned or unscanned layers and a policy.
MODELS = {
    "dense": UNTIED,
    "dense, unscanned, minimal": UNTIED.replace(scan_layers=False, remat="minimal"),
    "mixed, minimal": MIXED.replace(remat="minimal"),
    "mixed, unscanned": MIXED.replace(scan_layers=False),
    "all experts, minimal": MOE.replace(sparse_matmul=False, remat="minimal"),
    "all experts, unscanned": MOE.replace(sparse_matmul=False, scan_layers=False),
}


@pytest.mark.parametrize("name", slow_except(["dense"], MODELS))
def test_what_is_quantized(name):
    config = MODELS[name]
    low = octavo.quantized(functools.partial(apply, config), RULES)
    sites = low.sites(abstract_params(config), *batch(config))
    assert {(site.path, site.op) for site in sites if site.config is not None} == expected(config)
    for site in sites:
        if site.config is not None:
            assert site.leaf == f"{site.path}/kernel"
            assert sum(site.weights) == 1  # an einsum may put the weight first
    left = {site.path for site in sites if site.config is None}
    layers = {f"decoder/{g.name}": g.is_moe for g in layer_groups(config)}
    assert left == {
        *(f"{name}/self_attention" for name in layers),  # scores and context, of two activations
        *(f"{name}/moe_block/router" for name, is_moe in layers.items() if is_moe),
        "token_embedder" if config.tied_logits else "decoder/logits_dense",
    }
    assert not any(any(site.weights) for site in sites if site.path.endswith("self_attention"))


def test_a_rule_may_pick_the_layers_that_stand_apart():
    config = DENSE.replace(num_layers=4, unscanned_first=1, unscanned_last=1)
    rules = [octavo.QuantizationRule(module_path="decoder/(first|last)_layers.*", skip=True), *RULES]
    low = octavo.quantized(functools.partial(apply, config), rules)
    sites = low.sites(abstract_params(config), *batch(config))
    assert {site.path.split("/")[1] for site in sites if site.config is not None} == {"layers"}


STEPS = {f"{name}-{remat}": (config, remat) for name, config in (("dense", DENSE), ("moe", MOE)) for remat in REMAT}


@pytest.mark.parametrize("name", slow_except(["dense-full"], STEPS))
def test_the_step_is_in_low_precision(name):
    config, remat = STEPS[name]
    config = config.replace(remat=remat)
    params, inputs = abstract_params(config), batch(config)
    low = octavo.quantized(loss_of(config), RULES)
    seen = octavo.verify(jax.value_and_grad(low), params, *inputs)
    plain = octavo.verify(jax.value_and_grad(loss_of(config)), params, *inputs)
    sites = [site for site in low.sites(params, *inputs) if site.config is not None]
    products = sum(site.flops for site in sites)
    # What a product gives that is only added to something is not read in the backward pass, and not computed again.
    unread = ("mlp/wo", "shared_experts/wo")
    again = sum(site.flops for site in sites if not site.path.endswith(unread)) if remat == "full" else 0
    # What is in float now is what no rule was for: attention itself, the router, the logits.
    assert seen.flops("float", backward=False) == plain.flops(backward=False) - products
    assert seen.flops("float", backward=True) == plain.flops(backward=True) - 2 * products - again
    assert seen.flops("native", backward=False) >= products
    assert seen.flops("emulated") == seen.flops("weight_only") == 0
    assert seen.opaque == seen.unknown_loops == ()


@pytest.mark.slow
def test_what_a_policy_keeps_is_not_computed_again():
    config = MOE
    params, inputs = abstract_params(config), batch(config)

    def flops(remat, *kinds):
        low = octavo.quantized(loss_of(config.replace(remat=remat)), RULES)
        seen = octavo.verify(jax.value_and_grad(low), params, *inputs)
        return [seen.flops(kind, backward=True) for kind in kinds]

    assert flops("minimal", "native") == flops("none", "native") < flops("full", "native")
    assert flops("minimal", "float") > flops("none", "float")
    assert flops("dots", "native") == flops("none", "native")
    assert flops("save_qkv_proj", "native") > flops("none", "native")


def distance(tree, wanted):
    """Between two trees, by the length of the second."""
    a, b = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (tree, wanted))
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


@pytest.mark.slow
def test_training_in_low_precision_follows_float():
    config = MOE
    params, inputs = params_of(config), batch(config, (4, 16))
    low = octavo.quantized(loss_of(config), RULES)
    value, grads = jax.jit(jax.value_and_grad(low))(params, *inputs)
    wanted, slopes = step_of(config)(params, *inputs)
    assert abs(value - wanted) < 0.02 * wanted
    assert 1e-4 < distance(grads, slopes) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "minimal_with_context", "dots"])
def test_rematerialization_changes_no_number(remat):
    params, inputs, config = params_of(MOE), batch(MOE), MOE.replace(remat=remat)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, step_of(config)(params, *inputs), step_of(MOE)(params, *inputs))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["minimal", "full"])
def test_rematerialization_in_low_precision(remat):
    params, inputs = params_of(DENSE), batch(DENSE)
    step = lambda config: jax.jit(jax.value_and_grad(octavo.quantized(loss_of(config), RULES)))(params, *inputs)  # noqa: E731
    (value, grads), (wanted, slopes) = step(DENSE.replace(remat=remat)), step(DENSE)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert distance(grads, slopes) < 0.02  # another order of sums, and some values round the other way


@pytest.mark.standard_promotion
@pytest.mark.slow
def test_quantized_as_a_module():
    model = nnx.jit(lambda: Decoder(MOE, rngs=nnx.Rngs(0)))()
    tokens, *_ = batch(MOE)
    call = nnx.jit(lambda model, tokens: model(tokens)[0])
    logits = call(octavo.quantize_model(model, octavo.QtProvider(RULES)), tokens)
    params = nnx.to_pure_dict(nnx.state(model))
    wanted, _ = jax.jit(octavo.quantized(functools.partial(apply, MOE), RULES))(params, tokens)
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert np.abs(logits - call(model, tokens)).max() > 1e-3
