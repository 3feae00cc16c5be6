"""Weights that multiply the same input, concatenated along their columns: fewer and larger matmuls."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from octavo.models.config import ModelConfig
from octavo.models.module_params import Params
from octavo.numerics import BlockFormat, IntFormat, get_format
from octavo.ops.operands import element
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
    return _are_alike(parts) or all(_is_small_integer(part, parts[0]) for part in parts)


def _are_alike(parts: list[Any]) -> bool:
    first = parts[0]
    if not any(isinstance(part, QArray) for part in parts):
        return all(part.dtype == first.dtype for part in parts)
    if not all(isinstance(part, QArray) and _layout(part) == _layout(first) for part in parts):
        return False
    return not any(axis == -1 for axis, _ in first.padding) and (first.packed is None or first.packed[0] != -1)


def concatenate_columns(parts: list[Any]) -> Any:
    """Arrays, or QArrays of one layout or small integers, concatenated along their last axis."""
    if not _are_alike(parts):
        parts = [_widened(part, parts) for part in parts]
    first = parts[0]
    if not isinstance(first, QArray):
        join = np.concatenate if all(isinstance(part, np.ndarray) for part in parts) else jnp.concatenate
        return join(parts, axis=-1)
    fields = ("qvalue", "scale", "zero_point", "outer_scale")
    arrays = {name: [_per_column(part, name) for part in parts] for name in fields if getattr(first, name) is not None}
    return first._replace(**{name: jnp.concatenate(xs, axis=-1) for name, xs in arrays.items()})


def _is_small_integer(part: Any, first: Any) -> bool:
    """Whether codes are signed integers that int8 holds; files mix such types, values of more bits than queries."""
    if not isinstance(part, QArray) or part.dtype != first.dtype or part.padding or part.outer_scale is not None:
        return False
    fmt, zero = element(part), part.zero_point
    is_plain = isinstance(fmt, IntFormat) and fmt.signed and fmt.has_zero and fmt.unit == 1.0 and fmt.bits <= 8
    return is_plain and (zero is None or zero.dtype == jnp.float32) and part.shape[:-1] == first.shape[:-1]


def _widened(part: QArray, parts: list[QArray]) -> QArray:
    """The same values as int8, in tiles that divide those of all parts, with zero points if any part has them."""
    rows = part.shape[-2]
    groups = math.lcm(*(one.scale.shape[-2] for one in parts))

    def spread(x: Any) -> Any:
        return jnp.repeat(x.astype(jnp.float32), groups // x.shape[-2], axis=-2)

    scale, zero, int8 = spread(part.scale), part.zero_point, get_format("int8")
    codes = part.unpack().qvalue.astype(jnp.int8)
    if all(one.zero_point is None for one in parts):
        return QArray(codes, scale, qtype=int8, dtype=part.dtype)
    options = {"scale_dtype": "float32", "scale_rounding": "nearest", "zero_dtype": "float32"}
    fmt = BlockFormat(name=f"int8_g{rows // groups}", element=int8, tile=rows // groups, **options)
    return QArray(codes, scale, jnp.zeros_like(scale) if zero is None else spread(zero), fmt, dtype=part.dtype)


def _per_column(part: QArray, name: str) -> Any:
    """One of a QArray's arrays, repeated to one entry per column."""
    array, columns = getattr(part, name), part.shape[-1]
    return array if array.shape[-1] == columns else jnp.repeat(array, columns // array.shape[-1], axis=-1)


def _layout(part: QArray) -> Any:
    """What QArrays must share to be concatenated."""
    scales = [getattr(part, name) for name in ("scale", "zero_point", "outer_scale")]
    rows = tuple(None if x is None else (x.shape[:-1], x.dtype) for x in scales)
    return part.qtype, part.dtype, part.padding, part.packed, part.qvalue.shape[:-1], part.qvalue.dtype, rows
