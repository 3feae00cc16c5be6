"""Weights that multiply the same input, concatenated along their columns: fewer and larger matmuls."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from octavo.models.config import ModelConfig
from octavo.models.module_params import Params
from octavo.qarray import QArray

FUSED = {"query_key_value": ("query", "key", "value"), "wi": ("wi_0", "wi_1")}
"""The weights that read the same input, by the name of the weight that they are fused into."""


def fuse(config: ModelConfig, params: Params, *, donate: bool = False) -> tuple[ModelConfig, Params] | None:
    """Fuse query, key and value weights, and the two input weights of each gated MLP.

    Args:
        config: The model, with unscanned layers.
        params: Arrays or QArrays. Weights of experts are not fused.
        donate: Remove weights from `params` as soon as they are fused, so that memory never holds the model twice.

    Returns:
        The config and parameters of the fused model; None if the scales of some weights cannot be concatenated.

    >>> import jax
    >>> from octavo.models import init_params
    >>> sizes = dict(emb_dim=16, num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
    >>> config = ModelConfig(vocab_size=50, scan_layers=False, **sizes)
    >>> config, params = fuse(config, init_params(config, jax.random.key(0)))
    >>> params["decoder"]["layers_0"]["self_attention"]["query_key_value"]["kernel"].shape
    (16, 32)
    """
    if config.fused:
        return config, params
    if config.scan_layers:
        raise ValueError("fuse takes unscanned layers: config.replace(scan_layers=False) and unstack_layers(params)")
    if not _can_fuse_all(params):
        return None
    return config.replace(fused=True), _fused(params, donate)


def _can_fuse_all(tree: Params) -> bool:
    """Whether every group of weights can be fused."""
    for names in FUSED.values():
        if _all_dense(tree, names):
            sources = [tree[name] for name in names]
            if not all(_can_concatenate([source[leaf] for source in sources]) for leaf in sources[0]):
                return False
    return all(_can_fuse_all(value) for value in tree.values() if isinstance(value, dict))


def _fused(tree: Params, donate: bool) -> Params:
    new = {}
    parts = {part: name for name, names in FUSED.items() if _all_dense(tree, names) for part in names}
    for key in list(tree):
        if key not in parts:
            new[key] = _fused(tree[key], donate) if isinstance(tree[key], dict) else tree[key]
        elif parts[key] not in new:
            names = FUSED[parts[key]]
            new[parts[key]] = {leaf: concatenate_columns([tree[name][leaf] for name in names]) for leaf in tree[key]}
            if donate:
                for name in names:
                    tree[name] = {}
    return new


def _all_dense(tree: Params, names: tuple[str, ...]) -> bool:
    return all(name in tree and len(tree[name]["kernel"].shape) == 2 for name in names)


def _can_concatenate(parts: list[Any]) -> bool:
    first = parts[0]
    if not any(isinstance(part, QArray) for part in parts):
        return all(part.dtype == first.dtype for part in parts)
    if not all(isinstance(part, QArray) and _layout(part) == _layout(first) for part in parts):
        return False
    return not any(axis == -1 for axis, _ in first.padding) and (first.packed is None or first.packed[0] != -1)


def concatenate_columns(parts: list[Any]) -> Any:
    """Arrays, or QArrays of one layout, concatenated along their last axis."""
    first = parts[0]
    if not isinstance(first, QArray):
        join = np.concatenate if all(isinstance(part, np.ndarray) for part in parts) else jnp.concatenate
        return join(parts, axis=-1)
    fields = ("qvalue", "scale", "zero_point", "outer_scale")
    arrays = {name: [_per_column(part, name) for part in parts] for name in fields if getattr(first, name) is not None}
    return first._replace(**{name: jnp.concatenate(xs, axis=-1) for name, xs in arrays.items()})


def _per_column(part: QArray, name: str) -> Any:
    """One of a QArray's arrays, repeated to one entry per column."""
    array, columns = getattr(part, name), part.shape[-1]
    return array if array.shape[-1] == columns else jnp.repeat(array, columns // array.shape[-1], axis=-1)


def _layout(part: QArray) -> Any:
    """What QArrays must share to be concatenated."""
    scales = [getattr(part, name) for name in ("scale", "zero_point", "outer_scale")]
    rows = tuple(None if x is None else (x.shape[:-1], x.dtype) for x in scales)
    return part.qtype, part.dtype, part.padding, part.packed, part.qvalue.shape[:-1], part.qvalue.dtype, rows
