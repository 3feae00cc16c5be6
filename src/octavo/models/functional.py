"""The decoder as pure functions of a config and parameters: nested dictionaries of arrays."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from octavo._typing import PRNGKeyArray
from octavo.models.attention import Cache
from octavo.models.config import PER_LAYER, ModelConfig
from octavo.models.decoder import Decoder, DecoderLayer, layer_groups
from octavo.models.module_params import Params, abstract_module, bind, check_token_arrays, init_module

STACK = re.compile(r"decoder/((?:dense_)?layers)/(.*)")
"""The paths of the parameters of scanned layers."""

_ONE_LAYER = {"num_layers": 1, "first_dense_layers": 0, "unscanned_first": 0, "unscanned_last": 0}


def init_params(config: ModelConfig, key: PRNGKeyArray) -> Params:
    """Random parameters. Scanned and unscanned models have the same values for the same key.

    >>> from octavo.models import ModelConfig
    >>> sizes = dict(emb_dim=16, num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
    >>> params = init_params(ModelConfig(vocab_size=50, **sizes), jax.random.key(0))
    >>> params["decoder"]["layers"]["mlp"]["wi_0"]["kernel"].shape
    (2, 16, 32)
    """
    return init_module(Decoder, config, key)


def abstract_params(config: ModelConfig) -> Params:
    """Shapes and dtypes of the parameters, without memory for them.

    >>> from octavo.models import ModelConfig
    >>> sizes = dict(emb_dim=2**14, num_layers=126, num_query_heads=128, num_kv_heads=8, head_dim=128, mlp_dim=53248)
    >>> abstract_params(ModelConfig(vocab_size=128_256, **sizes))["decoder"]["layers"]["mlp"]["wo"]["kernel"].shape
    (126, 53248, 16384)
    """
    groups = layer_groups(config)
    if any(group.is_stack for group in groups) or any(getattr(config, name) for name in PER_LAYER):
        return abstract_module(Decoder, config)
    # Layers of a kind have the same parameters, so one of each kind is traced: a second for thirty layers otherwise.
    first = {g.is_moe: g.layers[0] for g in groups}
    kinds = {
        is_moe: abstract_module(functools.partial(_decoder_layer, layer), config) for is_moe, layer in first.items()
    }
    rest = abstract_module(Decoder, config.replace(**_ONE_LAYER))
    layers = {group.name: kinds[group.is_moe] for group in groups}
    others = {name: value for name, value in rest["decoder"].items() if name != "layers_0"}
    return jax.tree.map(lambda x: x, {**rest, "decoder": {**layers, **others}})  # keys sorted, as of a trace


def _decoder_layer(layer: int, config: ModelConfig, *, rngs: nnx.Rngs) -> DecoderLayer:
    return DecoderLayer(config, layer, rngs=rngs)


def apply(
    config: ModelConfig,
    params: Params,
    tokens: Any,
    positions: Any = None,
    segments: Any = None,
    cache: Cache | None = None,
    last: Any = None,
) -> Any:
    """Run the decoder: a pure function that can be jitted, differentiated and quantized.

    Args:
        config: The model.
        params: Parameters, as from `init_params`.
        tokens: Token ids `[batch, length]`.
        positions: Positions of the tokens for rotary embeddings; from 0 on, or after those in the cache.
        segments: Documents packed into a row differ in their segment, and do not attend to each other.
        cache: A key and value cache such as `octavo.serve.KVCache`, which the tokens follow.
        last: With a cache, the index in each row of the one token whose logits are wanted.

    Returns:
        `(logits, aux)`, or with a cache `(logits, aux, new_cache)`. Logits are float32 `[batch, length, vocab]`.

    >>> import functools
    >>> import octavo
    >>> from octavo.models import ModelConfig
    >>> sizes = dict(emb_dim=16, num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
    >>> config = ModelConfig(vocab_size=50, **sizes)
    >>> low = octavo.quantized(functools.partial(apply, config), octavo.recipe("int8", "decoder/.*layers.*"))
    >>> logits, aux = jax.jit(low)(init_params(config, jax.random.key(0)), jnp.asarray([[3, 14, 15]]))
    """
    inputs = {"tokens": tokens, "positions": positions, "segments": segments}
    arrays = {name: jnp.asarray(x) for name, x in inputs.items() if x is not None}
    check_token_arrays(arrays)
    _check_cache(config, cache, segments, last)
    hint = ". unstack_layers makes parameters of unscanned layers from those of scanned ones"
    model = bind(Decoder, config, params, hint)
    if cache is None:
        return model(**arrays)
    return model.call_with_cache(arrays["tokens"], arrays.get("positions"), cache, last)


def unstack_layers(params: Params) -> Params:
    """Parameters for `scan_layers=False` from those of the same model with scanned layers.

    >>> sorted(unstack_layers({"decoder": {"layers": {"w": jnp.zeros((2, 3))}}})["decoder"])
    ['layers_0', 'layers_1']
    """
    layers = {}
    for name, stack in params["decoder"].items():
        if not STACK.fullmatch(f"decoder/{name}/"):
            layers[name] = stack
            continue
        for i in range(jax.tree.leaves(stack)[0].shape[0]):
            layers[f"{name}_{i}"] = jax.tree.map(lambda x, i=i: x[i], stack)
    return {**params, "decoder": layers}


def unstacked_paths(path: str, num_layers: int) -> list[tuple[str, int | None]]:
    """The path of each layer's part of a stacked parameter, and its index; of others, the path itself.

    >>> unstacked_paths("decoder/layers/mlp/wo/kernel", 2)
    [('decoder/layers_0/mlp/wo/kernel', 0), ('decoder/layers_1/mlp/wo/kernel', 1)]
    """
    match = STACK.fullmatch(path)
    return [(f"decoder/{match[1]}_{i}/{match[2]}", i) for i in range(num_layers)] if match else [(path, None)]


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
