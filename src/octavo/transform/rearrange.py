"""Reshape, transpose, slice and gather equations on a QArray."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from octavo.ops.product import REVERSE_ONLY
from octavo.qarray import QArray
from octavo.transform.jaxpr import Equation


def as_array(data: Any) -> Any:
    """A value as an array, dequantized if it is a QArray."""
    return data.dequantize() if isinstance(data, QArray) else data


def rearrange(eqn: Equation, q: QArray, others: list[Any]) -> list[QArray] | None:
    """The results of an equation whose first operand is a QArray; None if it does not only rearrange."""
    handler = _HANDLERS.get(eqn.primitive.name)
    if handler is None:
        return None
    try:
        out = handler(eqn, q, others)
    except ValueError:  # tiles would be split: the caller dequantizes
        return None
    return out if out is None or isinstance(out, list) else [out]


def _broadcast(eqn: Equation, q: QArray, others: list[Any]) -> QArray | None:
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    in_order = all(a < b for a, b in itertools.pairwise(places))
    if not in_order or any(shape[p] != d for p, d in zip(places, q.shape, strict=True)):
        return None
    if any(d != 1 for i, d in enumerate(shape) if i not in places):
        return None
    return q[tuple(slice(None) if i in places else None for i in range(len(shape)))]


def _slice(eqn: Equation, q: QArray, others: list[Any]) -> QArray:
    p = eqn.params
    strides = p["strides"] or (1,) * q.ndim
    return q[tuple(slice(*s) for s in zip(p["start_indices"], p["limit_indices"], strides, strict=True))]


def _dynamic_slice(eqn: Equation, q: QArray, others: list[Any]) -> QArray:
    for axis, (start, size) in enumerate(zip(others, eqn.params["slice_sizes"], strict=False)):
        if size != q.shape[axis]:
            start = jnp.clip(start, 0, q.shape[axis] - size)
            q = q[(slice(None),) * axis + (start + jnp.arange(size, dtype=jnp.asarray(start).dtype),)]
    return q


def _split(eqn: Equation, q: QArray, others: list[Any]) -> list[QArray]:
    parts, start = [], 0
    before = (slice(None),) * eqn.params["axis"]
    for size in eqn.params["sizes"]:
        parts.append(q[(*before, slice(start, start + int(size)))])
        start += int(size)
    return parts


def _gather(eqn: Equation, q: QArray, others: list[Any]) -> QArray | None:
    """`table[ids]` along one axis."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None
    axis = numbers.start_index_map[0]
    if numbers.collapsed_slice_dims != (axis,):
        return None
    if any(s != d for i, (s, d) in enumerate(zip(sizes, q.shape, strict=True)) if i != axis):
        return None
    index = others[0][..., 0]
    rest = [a for a in range(q.ndim) if a != axis]
    ids = jnp.clip(index, 0, q.shape[axis] - 1)
    taken = q.transpose(axis, *rest)[ids]
    if eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP:
        # An index out of range reads NaN, which only a scale can hold.
        known = (index == ids).reshape(index.shape + (1,) * len(rest))
        taken = taken._replace(scale=jnp.where(known, taken.scale, jnp.asarray(jnp.nan, taken.scale.dtype)))
    ndim = index.ndim + len(rest)
    place = iter(range(index.ndim))
    offset = {d: index.ndim + i for i, d in enumerate(numbers.offset_dims)}
    return taken.transpose(*(offset[d] if d in offset else next(place) for d in range(ndim)))


_HANDLERS = {
    "transpose": lambda eqn, q, _: q.transpose(*eqn.params["permutation"]),
    "reshape": lambda eqn, q, _: None if eqn.params.get("dimensions") else q.reshape(*eqn.outvars[0].aval.shape),
    "squeeze": lambda eqn, q, _: q[tuple(0 if a in eqn.params["dimensions"] else slice(None) for a in range(q.ndim))],
    "broadcast_in_dim": _broadcast,
    "convert_element_type": lambda eqn, q, _: q.astype(eqn.params["new_dtype"]),
    "copy": lambda eqn, q, _: q,
    "copy_p": lambda eqn, q, _: q,
    "name": lambda eqn, q, _: q,
    REVERSE_ONLY: lambda eqn, q, _: q,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "split": _split,
    "gather": _gather,
}
