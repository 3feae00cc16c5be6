import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models import abstract_params, apply, layer_groups, unstack_layers
from tests.models.common import DENSE, MIXED, MOE, batch, init


@pytest.mark.slow
@pytest.mark.parametrize("config", [DENSE, DENSE.replace(tied_logits=False, scan_layers=False), MIXED])
def test_shapes_are_known_without_arrays(config):
    params, abstract = init(config, jax.random.key(0)), abstract_params(config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    logits, aux = jax.eval_shape(functools.partial(apply, config), abstract, batch(config)[0])
    assert (logits.shape, aux.load_balance.shape) == ((2, 7, config.vocab_size), ())


def test_parameter_counts():
    count = lambda config: sum(x.size for x in jax.tree.leaves(abstract_params(config)))  # noqa: E731
    attention = 16 * 8 * (4 + 2 + 2) + 4 * 8 * 16
    expert, shared = 3 * 16 * 12, 3 * 16 * 24
    mixture = attention + 4 * expert + shared + 16 * 4 + 2 * 16
    assert count(MOE.replace(tied_logits=False)) == 2 * 31 * 16 + 2 * mixture + 16


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
    assert names(DENSE.replace(unscanned_first=2)) == ["first_layers_0", "first_layers_1"]
    assert set(names(apart)) | {"decoder_norm"} == set(abstract_params(apart)["decoder"])


def test_what_does_not_fit_raises():
    params, (tokens, positions, _) = abstract_params(DENSE), batch(DENSE)
    with pytest.raises(ValueError, match=r"no 'decoder/layers_0/.*'; an unexpected 'decoder/layers/.*unstack_layers"):
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
    inputs = [np.asarray(x) for x in batch(DENSE)]
    logits, _ = jax.eval_shape(lambda params: apply(DENSE, params, *inputs), abstract_params(DENSE))
    assert logits.shape == (2, 7, DENSE.vocab_size)


def test_only_scanned_layers_are_unstacked():
    stack = np.arange(22.0).reshape(11, 2)
    tree = {"decoder": {"first_layers_0": {"w": np.ones(2)}, "layers": {"w": stack}}, "other": {}}
    unstacked = unstack_layers(tree)
    assert list(unstacked["decoder"]) == ["first_layers_0", *(f"layers_{i}" for i in range(11))]
    np.testing.assert_array_equal(unstacked["decoder"]["layers_10"]["w"], stack[10])
    assert unstacked["other"] == {}
