"""Slicing, reshaping and transposing of QArrays: codes, scales, padding and packing together.

`q` is a QArray, whose module imports this one.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo import _sharding
from octavo._typing import Array, Shape, Shaped


def from_end(axis: int, ndim: int) -> int:
    """An axis, counted from the end."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} is out of range for an array of rank {ndim}")
    return axis % ndim - ndim


def unpad(x: Shaped[Array, "..."], padding: Sequence[tuple[int, Any]]) -> Shaped[Array, "..."]:
    """An array without the padding of its last tiles."""
    for axis, count in padding:
        index = [slice(None)] * x.ndim
        index[axis] = slice(0, x.shape[axis] - count)
        x = x[tuple(index)]
    return x


def transpose(q: Any, axes: Sequence[int]) -> Any:
    """Axes in another order."""
    ndim = q.ndim
    order = [a % ndim for a in axes] if axes else list(reversed(range(ndim)))
    if sorted(order) != list(range(ndim)):
        raise ValueError(f"{tuple(axes)} is no order of the {ndim} axes of an array of shape {q.shape}")
    place = {old - ndim: new - ndim for new, old in enumerate(order)}
    return q._map(
        lambda x: jnp.transpose(x, order),
        padding=tuple(sorted((place[axis], count) for axis, count in q.padding)),
        packed=None if q.packed is None else (place[q.packed[0]], q.packed[1]),
    )


def reshape(q: Any, shape: Sequence[int]) -> Any:
    """Another shape, for codes and scales.

    Every axis is a number of tiles times the tile size: a *varying* factor of the scale and a *constant* one. The new
    shape is possible if each new axis consists, in order, of varying factors followed by constant ones.
    """
    shape = _complete(tuple(operator.index(d) for d in shape), q)
    if shape == q.shape:
        return q
    q = q.unpack()
    if q.padding:
        raise ValueError(
            f"{q.shape} is padded along axes {[a for a, _ in q.padding]} to fill its tiles, so its codes cannot be "
            f"reshaped to {shape}: dequantize it first, or choose tiles that divide"
        )
    old = q.shape

    return q._map(lambda x: x.reshape(shape if x is q.qvalue else _reshape_tiles(old, x.shape, shape)))


def _complete(shape: Shape, q: Any) -> Shape:
    if shape.count(-1) == 1:
        rest = math.prod(d for d in shape if d != -1)
        shape = tuple(q.size // max(1, rest) if d == -1 else d for d in shape)
    if math.prod(shape) != q.size or any(d < 0 for d in shape):
        raise ValueError(f"cannot reshape an array of shape {q.shape} into {shape}")
    return shape


def _reshape_tiles(old: tuple[int, ...], part: tuple[int, ...], new: tuple[int, ...]) -> list[int]:
    """The shape of a scale whose values had shape `old` and get shape `new`."""
    factors: list[list[Any]] = []
    for dim, count in zip(old, part, strict=True):
        for size, varies in ((count, True), (dim // max(1, count), False)):
            if size == 1:
                continue
            if factors and factors[-1][1] == varies:
                factors[-1][0] *= size
            else:
                factors.append([size, varies])
    shape = []
    for dim in new:
        varying, constant_seen, rest = 1, False, dim
        while rest > 1:
            size, varies = factors[0]
            step = size if rest % size == 0 else rest if size % rest == 0 else 0
            if not step or (varies and constant_seen):
                raise ValueError(
                    f"a scale of shape {part} over values of shape {old} does not fit shape {new}, which would split "
                    "its tiles; dequantize first, or quantize after the reshape"
                )
            if varies:
                varying *= step
            else:
                constant_seen = True
            rest //= step
            factors[0][0] //= step
            if factors[0][0] == 1:
                factors.pop(0)
        shape.append(varying)
    return shape


def take(q: Any, index: Any) -> Any:
    """`q[index]` for integers, slices, None, Ellipsis and integer arrays.

    The scale is indexed like the codes, tile by tile. Where that is not possible, because a slice splits a tile or the
    axis is padded, the scale is first repeated along that axis for each value.
    """
    entries = _per_axis(index, q.ndim)
    for axis, entry in enumerate([e for e in entries if e is not None]):
        if isinstance(entry, slice) and entry == slice(None):
            continue
        if q.packed is not None and q.packed[0] == axis - q.ndim:
            q = q.unpack()
        if axis - q.ndim in dict(q.padding) or _splits_tiles(q, axis, entry):
            q = repeat_scale(q, axis)
    stored = q._stored_shape

    def pick(x: Any) -> Any:  # arrays of JAX or NumPy
        sizes = zip(x.shape, stored, strict=True)
        return x[tuple(None if e is None else _adapt(e, *next(sizes)) for e in entries)]

    new = q._map(lambda x: x if x is q.qvalue else pick(x))
    new = new._replace(qvalue=q.qvalue[_plain(entries, q.shape)])
    place = {axis: _axis_after(entries, q.ndim, axis) for axis in {a for a, _ in q.padding} | {(q.packed or (0,))[0]}}
    return new._replace(
        padding=tuple((place[axis], count) for axis, count in q.padding),
        packed=None if q.packed is None else (place[q.packed[0]], q.packed[1]),
    )


def dynamic_update_slice(operand: Any, update: Any, start_indices: Sequence[Any]) -> Any:
    """`jax.lax.dynamic_update_slice` of QArrays: the codes, scales and zero points of a slice are replaced.

    Along an axis whose values share a scale, the update has the length of the axis; along tiles it consists of full
    tiles, from a static start.

    Args:
      operand: The QArray to update.
      update: A QArray of the same format, dtype and rank.
      start_indices: The start along each axis; traced numbers where scales are per value.

    Returns:
      The updated QArray, unpacked.

    >>> import octavo
    >>> cache, row = (octavo.quantize(x, "int8", channelwise_axes=(0,)) for x in (jnp.ones((3, 4)), jnp.ones((1, 4))))
    >>> dynamic_update_slice(cache, row, (1, 0)).scale.shape
    (3, 1)
    """
    operand, update = operand.unpack(), update.unpack()
    alike = [(q.qtype, q.dtype, q.ndim, q.zero_point is None, q.outer_scale is None) for q in (operand, update)]
    if alike[0] != alike[1] or len(start_indices) != operand.ndim:
        raise ValueError(
            f"an update has the format, dtype and rank of the array, and a start for each axis; got {update} for "
            f"{operand} at {tuple(start_indices)}"
        )
    if operand.outer_scale is not None or operand.padding or update.padding:
        raise ValueError("arrays with two levels of scales or with padded tiles have no slices that can be replaced")

    def place(x: Array, part: Array) -> Array:
        starts = []
        for axis, start in enumerate(start_indices):
            size, new, count = operand.shape[axis], update.shape[axis], x.shape[axis]
            tile, static = size // max(1, count), isinstance(start, int | np.integer)
            fits = new % tile == 0 and part.shape[axis] == new // tile
            whole = size == new and count == part.shape[axis]
            if not whole and (not fits or (tile > 1 and not (static and start % tile == 0))):
                raise ValueError(
                    f"axis {axis}: {new} values from {start} with {part.shape[axis]} scales do not replace full tiles "
                    f"of {tile} of {size} values: update the full axis, or quantize it with a scale per value"
                )
            starts.append(0 if whole else start // tile)
        return jax.lax.dynamic_update_slice(x, part.astype(x.dtype), starts)

    changes = {
        name: place(getattr(operand, name), getattr(update, name))
        for name in ("qvalue", "scale", "zero_point")
        if getattr(operand, name) is not None
    }
    return operand._replace(**changes)


def _per_axis(index: Any, ndim: int) -> list[Any]:
    """One entry per axis, and None where an axis is added."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(e, bool) or getattr(e, "dtype", None) == np.bool_ for e in entries):
        raise TypeError("a QArray is not indexed by booleans: use jnp.nonzero, or dequantize first")
    entries = [jnp.asarray(e) if isinstance(e, list | np.ndarray) else e for e in entries]
    dots = [i for i, e in enumerate(entries) if e is Ellipsis]
    used = sum(e is not None and e is not Ellipsis for e in entries)
    if used > ndim or len(dots) > 1:
        raise IndexError(f"{index} is not an index of an array of rank {ndim}")
    place = dots[0] if dots else len(entries)
    entries[place : place + len(dots)] = [slice(None)] * (ndim - used)
    return entries


def _plain(entries: list[Any], shape: Shape) -> tuple[Any, ...]:
    """The index of the codes, with integers checked: JAX itself clamps what is out of range."""
    sizes = iter(shape)
    for entry in entries:
        size = 0 if entry is None else next(sizes)
        if isinstance(entry, int | np.integer) and not -size <= entry < size:
            raise IndexError(f"index {entry} is out of range for an axis of size {size}")
    return tuple(entries)


def _splits_tiles(q: Any, axis: int, entry: Any) -> bool:
    if not isinstance(entry, slice):
        return False
    size = q._stored_shape[axis]
    start, stop, step = entry.indices(size)
    parts = [x for x in (q.scale, q.zero_point, q.outer_scale) if x is not None]
    tiles = {size // x.shape[axis] for x in parts if 1 < x.shape[axis] < size}
    return any(step != 1 or start % tile or stop % tile for tile in tiles)


def repeat_scale(q: Any, axis: int) -> Any:
    """The same array with one scale per value along an axis, and no padding there."""
    stored, ndim = q._stored_shape, q.ndim
    own = [(a, n) for a, n in q.padding if a == axis - ndim]

    def per_value(x: Array) -> Array:
        count = x.shape[axis]
        return unpad(_sharding.repeat(x, stored[axis] // count, axis), own) if count not in (0, 1) else x

    q = q._map(lambda x: unpad(x, own) if x is q.qvalue else per_value(x))
    return q._replace(padding=tuple(p for p in q.padding if p not in own))


def _adapt(entry: Any, count: int, size: int) -> Any:
    """The index into an axis of a scale that has `count` entries for `size` values."""
    if count == size or (isinstance(entry, slice) and entry == slice(None)):
        return entry
    if count == 1:
        if isinstance(entry, slice):
            return slice(None)
        return 0 if isinstance(entry, int | np.integer) else jnp.zeros((1,) * entry.ndim, jnp.int32)
    tile = size // count
    if isinstance(entry, slice):
        start, stop, _ = entry.indices(size)
        return slice(start // tile, max(start, stop) // tile)
    if isinstance(entry, int | np.integer):
        return int(entry) % size // tile
    return jnp.where(entry < 0, entry + size, entry) // tile


def _axis_after(entries: list[Any], ndim: int, axis: int) -> int:
    """The position of an unindexed axis after indexing, by NumPy's rules; both count from the end.

    Determined by NumPy itself: the axis is the one whose size changes when it is longer by one.
    """
    plain = tuple(
        0 if isinstance(e, int | np.integer) else e if e is None or isinstance(e, slice) else np.zeros(e.shape, int)
        for e in entries
    )
    short = np.broadcast_to(0, (2,) * ndim)[plain].shape
    long = np.broadcast_to(0, tuple(3 if a == axis % ndim else 2 for a in range(ndim)))[plain].shape
    changed = [i for i, (a, b) in enumerate(zip(short, long, strict=True)) if a != b]
    return changed[0] - len(short) if changed else axis
