import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models import abstract_params, apply, count_params, layer_groups, stack_layers, unstack_layers
from tests.models.common import DENSE, MIXED, MOE, batch, init, params_of


@pytest.mark.slow
@pytest.mark.parametrize("config", [DENSE, DENSE.replace(tied_logits=False, scan_layers=False), MIXED])
def test_shapes_are_known_without_arrays(config):
    params, abstract = init(config, jax.random.key(0)), abstract_params(config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    assert count_params(config) == sum(x.size for x in jax.tree.leaves(params))
    logits, aux = jax.eval_shape(functools.partial(apply, config), abstract, batch(config)[0])
    assert (logits.shape, aux.load_balance.shape) == ((2, 7, config.vocab_size), ())


def test_count_by_hand():
    attention = 16 * 8 * (4 + 2 + 2) + 4 * 8 * 16
    assert count_params(DENSE) == 31 * 16 + 3 * (attention + 3 * 16 * 24 + 2 * 16) + 16
    expert, shared = 3 * 16 * 12, 3 * 16 * 24
    mixture = attention + 4 * expert + shared + 16 * 4 + 2 * 16
    assert count_params(MOE) == 31 * 16 + 2 * mixture + 16
    assert count_params(MOE.replace(tied_logits=False)) == count_params(MOE) + 31 * 16


def test_keys_decide():
    a, b, c = (init(DENSE, jax.random.key(i)) for i in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    kernels = lambda p: p["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]  # noqa: E731
    assert bool((kernels(a) != kernels(c)).any())
    assert bool((kernels(a)[0] != kernels(a)[1]).any())


def test_names_of_layers():
    names = lambda config: [group.name for group in layer_groups(config)]  # noqa: E731
    apart = MOE.replace(num_layers=8, first_dense_layers=3, unscanned_first=1, unscanned_last=2)
    assert names(apart) == ["first_layers_0", "dense_layers", "layers", "last_layers_0", "last_layers_1"]
    assert [len(g.layers) for g in layer_groups(apart)] == [1, 2, 3, 1, 1]
    assert [g.is_moe for g in layer_groups(apart)] == [False, False, True, True, True]
    unscanned = names(apart.replace(scan_layers=False))
    assert unscanned == [
        *("first_layers_0", "dense_layers_0", "dense_layers_1", "layers_0", "layers_1", "layers_2"),
        *("last_layers_0", "last_layers_1"),
    ]
    assert names(DENSE.replace(unscanned_first=3)) == ["first_layers_0", "first_layers_1", "first_layers_2"]
    assert set(names(apart)) | {"decoder_norm"} == set(abstract_params(apart)["decoder"])


def test_what_does_not_fit_is_refused():
    params, (tokens, positions, _) = params_of(DENSE), batch(DENSE)
    with pytest.raises(ValueError, match=r"no 'decoder/layers_0/.*'; but 'decoder/layers/.*stack_layers and unstack"):
        apply(DENSE.replace(scan_layers=False), params, tokens)
    with pytest.raises(ValueError, match=r"'token_embedder/embedding' has the shape \(31, 16\), but .* \(32, 16\)"):
        apply(DENSE.replace(vocab_size=32), params, tokens)
    with pytest.raises(ValueError, match=r"tokens are integers of shape \[batch, length\], got int32 of shape \(7,\)"):
        apply(DENSE, params, tokens[0])
    with pytest.raises(ValueError, match=r"tokens are integers .* got float32"):
        apply(DENSE, params, tokens.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"positions have the shape of tokens, \(2, 7\), got \(1, 7\)"):
        apply(DENSE, params, tokens, positions[:1])


def test_numpy_arrays_are_tokens_too():
    tokens, *rest = (np.asarray(x) for x in batch(DENSE))
    np.testing.assert_array_equal(
        apply(DENSE, params_of(DENSE), tokens, *rest)[0], apply(DENSE, params_of(DENSE), *batch(DENSE))[0]
    )


def test_missing_layers_are_not_stacked():
    tree = {"decoder": {"layers_0": {"w": jnp.ones(2)}, "layers_2": {"w": jnp.ones(2)}}}
    with pytest.raises(ValueError, match="layers are missing: there are layers_0, layers_2"):
        stack_layers(tree)


def test_layers_that_stand_apart_stay_so():
    tree = {"decoder": {"first_layers_0": {"w": jnp.ones(2)}, "layers": {"w": jnp.ones((11, 2))}}, "other": {}}
    unstacked = unstack_layers(tree)
    assert "layers_10" in unstacked["decoder"]
    jax.tree.map(np.testing.assert_array_equal, stack_layers(unstacked), tree)
