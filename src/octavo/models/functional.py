"""The model as pure functions of a config and a tree of parameters: nested dictionaries of arrays."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from octavo._typing import Array, PRNGKeyArray
from octavo.models.cached import Cache
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder, layer_groups

type Params = dict[str, Any]


def init_params(config: ModelConfig, key: PRNGKeyArray) -> Params:
    """Random parameters; scanned and unscanned models of the same key have the same.

    >>> from octavo.models import ModelConfig
    >>> sizes = dict(emb_dim=16, num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
    >>> params = init_params(ModelConfig(vocab_size=50, **sizes), jax.random.key(0))
    >>> params["decoder"]["layers"]["mlp"]["wi_0"]["kernel"].shape
    (2, 16, 32)
    """
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(key)), nnx.Param))


def abstract_params(config: ModelConfig) -> Params:
    """The shapes and dtypes of the parameters, of a model of any size.

    >>> from octavo.models import ModelConfig
    >>> sizes = dict(emb_dim=2**14, num_layers=126, num_query_heads=128, num_kv_heads=8, head_dim=128, mlp_dim=53248)
    >>> abstract_params(ModelConfig(vocab_size=128_256, **sizes))["decoder"]["layers"]["mlp"]["wo"]["kernel"].shape
    (126, 53248, 16384)
    """
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def count_params(config: ModelConfig) -> int:
    """How many numbers the parameters are.

    >>> from octavo.models import ModelConfig
    >>> sizes = dict(emb_dim=2**14, num_layers=126, num_query_heads=128, num_kv_heads=8, head_dim=128, mlp_dim=53248)
    >>> f"{count_params(ModelConfig(vocab_size=128_256, tied_logits=False, **sizes)) / 1e9:.0f} billion"
    '406 billion'
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))


def apply(
    config: ModelConfig,
    params: Params,
    tokens: Any,
    positions: Any = None,
    segments: Any = None,
    cache: Cache | None = None,
    last: Any = None,
) -> Any:
    """The logits and more, of parameters from outside: a function to be jitted, differentiated and quantized.

    The result is `(logits, aux)`. With a cache, such as those of `octavo.serve`, the tokens follow what it remembers:
    the result is `(logits, aux, new cache)`, and `last`, a number for each row, picks the one token of each whose
    logits are wanted.

    >>> import octavo
    >>> from octavo.models import ModelConfig
    >>> sizes = dict(emb_dim=16, num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
    >>> config = ModelConfig(vocab_size=50, **sizes)
    >>> low = octavo.quantized(functools.partial(apply, config), octavo.recipe("int8", "decoder/.*layers.*"))
    >>> logits, aux = jax.jit(low)(init_params(config, jax.random.key(0)), jnp.asarray([[3, 14, 15]]))
    """
    inputs = {"tokens": tokens, "positions": positions, "segments": segments}
    arrays = {name: jnp.asarray(x) for name, x in inputs.items() if x is not None}
    _check_inputs(arrays)
    _check_cache(config, cache, segments, last)
    graph, state = _skeleton(config)
    _check_params(params, state)
    model = nnx.merge(graph, nnx.State(params))
    if cache is None:
        return model(**arrays)
    return model.cached(arrays["tokens"], arrays.get("positions"), cache, last)


def _check_cache(config: ModelConfig, cache: Cache | None, segments: Any, last: Any) -> None:
    if cache is None:
        if last is not None:
            raise ValueError("last picks tokens of a call with a cache; without one, index the logits")
        return
    stacks = [group.name for group in layer_groups(config) if group.is_stack]
    if stacks:
        raise ValueError(
            f"a cache keeps every layer by its own name, but {stacks[0]!r} are scanned: use "
            "config.replace(scan_layers=False) and octavo.models.unstack_layers(params)"
        )
    if segments is not None:
        raise ValueError("rows of a cache hold one text each: segments are for calls without a cache")


@functools.lru_cache(maxsize=64)
def _skeleton(config: ModelConfig) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The model without its arrays, and the shape of each of them by its name."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return graph, _shapes(nnx.to_pure_dict(state))


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def _check_params(params: Params, wanted: dict[str, tuple[int, ...]]) -> None:
    given = _shapes(params)
    if given == wanted:
        return
    missing = [name for name in wanted if name not in given]
    beyond = [name for name in given if name not in wanted]
    if missing or beyond:
        text = "; ".join(f"{what} {names[0]!r}" for what, names in (("no", missing), ("but", beyond)) if names)
        raise ValueError(
            f"the parameters are not those of this config: there is {text}. stack_layers and unstack_layers change "
            "between the parameters of scanned and unscanned layers"
        )
    name = next(name for name in wanted if given[name] != wanted[name])
    raise ValueError(f"the parameter {name!r} has the shape {given[name]}, but the config makes it {wanted[name]}")


def _check_inputs(arrays: dict[str, Array]) -> None:
    for name, x in arrays.items():
        if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} are integers of shape [batch, length], got {x.dtype} of shape {x.shape}")
        if x.shape != arrays["tokens"].shape:
            raise ValueError(f"{name} have the shape of tokens, {arrays['tokens'].shape}, got {x.shape}")
