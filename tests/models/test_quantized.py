"""The model knows nothing of quantization; that all of it and no more can be quantized is tested here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import octavo
from octavo.models import POLICIES, Decoder, apply, layer_groups
from tests.models.common import DENSE, MOE, batch, loss_of, params_of

RULES = octavo.recipe("int8", "decoder/.*layers.*")
ATTENTION = ("query", "key", "value", "out")
MLP = ("wi_0", "wi_1", "wo")


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


@pytest.mark.parametrize("remat", ["none", "minimal"])
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])
@pytest.mark.parametrize(
    "config",
    [
        DENSE.replace(num_layers=2, tied_logits=False),
        MOE.replace(num_layers=4, unscanned_first=1, unscanned_last=1),
        MOE.replace(sparse_matmul=False, first_dense_layers=0, num_layers=2),
    ],
    ids=["dense", "moe", "moe, all experts"],
)
def test_what_is_quantized(config, scan, remat):
    config = config.replace(scan_layers=scan, remat=remat)
    low = octavo.quantized(functools.partial(apply, config), RULES)
    sites = low.sites(params_of(config), *batch(config))
    assert {(site.path, site.op) for site in sites if site.config is not None} == expected(config)
    for site in sites:
        if site.config is not None:
            assert site.leaf == f"{site.path}/kernel"
            assert site.weights == (False, True)
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
    sites = low.sites(params_of(config), *batch(config))
    assert {site.path.split("/")[1] for site in sites if site.config is not None} == {"layers"}


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("remat", ["none", "minimal", "full"])
def test_the_step_is_in_low_precision(config, remat):
    config = config.replace(remat=remat)
    params, inputs = params_of(config), batch(config)
    low = octavo.quantized(loss_of(config), RULES)
    seen = octavo.verify(jax.value_and_grad(low), params, *inputs)
    plain = octavo.verify(jax.value_and_grad(loss_of(config)), params, *inputs)
    # What stays in float is what stays in float without rules: attention itself, the router, the logits.
    quantized = sum(site.flops for site in low.sites(params, *inputs) if site.config is not None)
    assert seen.flops("native", backward=False) == quantized
    assert seen.flops(backward=False) == plain.flops(backward=False)
    again = 0 if remat != "full" else quantized
    assert quantized * 2 <= seen.flops("native", backward=True) <= quantized * 2 + again
    assert seen.opaque == seen.unknown_loops == ()


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_training_in_low_precision_follows_float(config):
    params, inputs = params_of(config), batch(config, (4, 16))
    low = octavo.quantized(loss_of(config), RULES)
    value, grads = jax.jit(jax.value_and_grad(low))(params, *inputs)
    wanted, slopes = jax.jit(jax.value_and_grad(loss_of(config)))(params, *inputs)
    assert abs(value - wanted) < 0.02 * wanted
    flat, slope = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (grads, slopes))
    assert 1e-4 < float(jnp.linalg.norm(flat - slope) / jnp.linalg.norm(slope)) < 0.2


@pytest.mark.parametrize("remat", [name for name in POLICIES if name != "none"])
def test_rematerialization_changes_no_number(remat):
    params, inputs = params_of(MOE), batch(MOE)
    for wrap in (lambda fn: fn, lambda fn: octavo.quantized(fn, RULES)):
        value = lambda config: jax.jit(jax.value_and_grad(wrap(loss_of(config))))(params, *inputs)  # noqa: B023, E731
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            value(MOE.replace(remat=remat)),
            value(MOE),
        )


@pytest.mark.standard_promotion
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_quantized_as_a_module(config):
    model = Decoder(config, rngs=nnx.Rngs(0))
    tokens, *_ = batch(config)
    logits, _ = octavo.quantize_model(model, octavo.QtProvider(RULES))(tokens)
    wanted, _ = octavo.quantized(functools.partial(apply, config), RULES)(nnx.to_pure_dict(nnx.state(model)), tokens)
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert np.abs(logits - model(tokens)[0]).max() > 1e-3
