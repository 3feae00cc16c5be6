"""Latent attention and grouped routing; against transformers in tests/pretrained."""

import jax
import jax.numpy as jnp
import numpy as np

from octavo.models import unstack_layers
from octavo.models.moe import best_experts, route_top_k
from tests.arrays import normal
from tests.models.common import LATENT, batch, params_of, run, step_of


def test_routing_token_by_token():
    logits, bias = normal(0, 20, 8), normal(1, 8)
    routing = route_top_k(LATENT, logits, bias)
    probabilities = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    for t, row in enumerate(probabilities):
        scores = row + np.asarray(bias)
        groups = sorted(range(4), key=lambda g: -scores[2 * g : 2 * g + 2].sum())[:2]
        allowed = [e for g in groups for e in (2 * g, 2 * g + 1)]
        wanted = sorted(allowed, key=lambda e: -scores[e])[:2]
        assert routing.experts[t].tolist() == wanted
        np.testing.assert_allclose(routing.weights[t], 2.5 * row[wanted] / row[wanted].sum(), rtol=1e-5)


def test_without_a_bias_groups_are_as_good_as_their_best_expert():
    config = LATENT.replace(router_bias=False, router_top_groups=1)
    scores = jnp.asarray([[0.9, 0.0, 0.6, 0.5, 0.1, 0.1, 0.1, 0.1]])
    assert best_experts(config, scores).tolist() == [[0, 1]]
    assert best_experts(config.replace(router_bias=True), scores).tolist() == [[2, 3]]


def test_experts_that_are_sorted_or_all_computed_give_the_same():
    params, (tokens, positions, segments) = params_of(LATENT), batch(LATENT)
    configs = [LATENT.replace(sparse_matmul=is_sparse) for is_sparse in (False, True)]
    found = [run(config, params, tokens, positions, segments)[0] for config in configs]
    np.testing.assert_allclose(*found, rtol=0, atol=2e-5)
    alone = run(LATENT.replace(scan_layers=False), unstack_layers(params), tokens, positions, segments)[0]
    np.testing.assert_allclose(alone, found[1], rtol=0, atol=2e-5)


def test_all_parameters_but_the_bias_of_the_router_have_gradients():
    config = LATENT.replace(num_layers=1, first_dense_layers=0, scan_layers=False)
    _, grads = step_of(config)(params_of(config), *batch(config))
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert bool(jnp.isfinite(grad).all())
        assert bool((grad != 0).any()) == ("router_bias" not in jax.tree_util.keystr(path)), path
