"""QArray: codes, scale, zero point and format as one pytree that behaves like an array; Tiles, which share a scale."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo import _sharding
from octavo._typing import Array, Bool, DTypeLike, Shape, Shaped
from octavo.numerics import Format, FormatLike, get_format, pack_bits, unpack_bits
from octavo.qarray import display, indexing


@jax.tree_util.register_pytree_with_keys_class
class QArray:
    """A quantized array, a pytree: its values are `(qvalue - zero_point) * scale * outer_scale`.

    Axes in `padding` and `packed` count from the end, so that they stay valid under `vmap` and `scan`.

    Args:
      qvalue: The codes.
      scale: The scales, of the rank of `qvalue`: along each axis one entry for all values (size 1), one per value, or
        one per tile of equal size.
      zero_point: The zero points, of the shape of `scale`; None for symmetric quantization.
      qtype: The number format; by default the one of the dtype of `qvalue`.
      outer_scale: The scale of the scales, for formats with two levels such as nvfp4; else None.
      dtype: The dtype of the dequantized values; by default that of `scale`, or float32 if that is below 16 bits.
      padding: (axis, number of values) for each axis whose last tile is padded.
      packed: (axis, size) if the codes along an axis are packed into bytes.

    >>> import octavo
    >>> q = octavo.quantize(jnp.asarray([[1.0, 2.0], [3.0, -4.0]]), "int4", channelwise_axes=(0,))
    >>> q.T.shape, q[0].dequantize().tolist()
    ((2, 2), [1.0666667222976685, 1.8666667938232422])
    """

    def __init__(
        self,
        qvalue: Any,
        scale: Any,
        zero_point: Any = None,
        qtype: FormatLike | None = None,
        *,
        outer_scale: Any = None,
        dtype: DTypeLike | None = None,
        padding: Sequence[tuple[int, int]] = (),
        packed: tuple[int, int] | None = None,
    ):
        self.qvalue = qvalue
        self.scale = scale
        self.zero_point = zero_point
        self.outer_scale = outer_scale
        self.qtype: Format = get_format(qvalue.dtype if qtype is None else qtype)
        if dtype is None:
            dtype = scale.dtype if scale.dtype.itemsize >= 2 else jnp.float32
        self.dtype: np.dtype = jnp.dtype(dtype)
        self.padding = tuple((int(a), int(n)) for a, n in padding)
        self.packed = packed
        _validate(self)

    # A pytree: the arrays are leaves, the rest is static.

    def tree_flatten_with_keys(self):
        names = ("qvalue", "scale", "zero_point", "outer_scale")
        leaves = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names]
        return leaves, (self.qtype, self.dtype, self.padding, self.packed)

    @classmethod
    def tree_unflatten(cls, static, leaves):
        # No checks here: leaves may be shardings, specs or any other placeholder.
        self = object.__new__(cls)
        self.qvalue, self.scale, self.zero_point, self.outer_scale = leaves
        self.qtype, self.dtype, self.padding, self.packed = static
        return self

    def _replace(self, **changes: Any) -> "QArray":
        new = object.__new__(QArray)
        new.__dict__.update(self.__dict__ | changes)
        return new

    def _map(self, fn, **changes: Any) -> "QArray":
        """Apply a function to each array that is not None."""
        parts = ("qvalue", "scale", "zero_point", "outer_scale")
        mapped = {k: fn(v) for k in parts if (v := getattr(self, k)) is not None}
        return self._replace(**mapped, **changes)

    # Attributes of an array.

    @property
    def _stored_shape(self) -> Shape:
        """The shape of the unpacked codes, padding included."""
        shape = list(self.qvalue.shape)
        if self.packed is not None:
            shape[self.packed[0]] = self.packed[1]
        return tuple(shape)

    @property
    def shape(self) -> Shape:
        """The shape of the dequantized array."""
        if not self.padding and self.packed is None:
            return tuple(self.qvalue.shape)
        shape = list(self._stored_shape)
        for axis, count in self.padding:
            shape[axis] -= count
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return len(self.qvalue.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """The size in bytes of codes, scales and zero points."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self))

    @property
    def tile_shape(self) -> Shape:
        """The number of values that share a scale, along each axis."""
        return tuple(n // max(s, 1) for n, s in zip(self._stored_shape, self.scale.shape, strict=True))

    @property
    def scale_tile_shape(self) -> tuple[int, ...]:
        """Qwix's name for `tile_shape`."""
        return self.tile_shape

    @property
    def zero_point_tile_shape(self) -> tuple[int, ...] | None:
        """The number of values that share a zero point, along each axis; None without zero points."""
        return None if self.zero_point is None else self.tile_shape

    def replace(self, **changes: Any) -> "QArray":
        """The same array with other parts or static fields, by the names of the constructor's arguments.

        >>> import octavo
        >>> q = octavo.quantize(jnp.ones((2, 4)), "int8")
        >>> float(q.replace(scale=2 * q.scale).dequantize()[0, 0] / q.dequantize()[0, 0])
        2.0
        """
        parts = ("qvalue", "scale", "zero_point", "qtype", "outer_scale", "dtype", "padding", "packed")
        given = {name: getattr(self, name) for name in parts} | changes
        if "scale" in changes and "dtype" not in changes:
            given["dtype"] = None if self.dtype == self.scale.dtype else self.dtype
        return QArray(**given)

    @property
    def sharding(self) -> Any:
        """The sharding of the codes."""
        return self.qvalue.sharding

    # Values.

    def dequantize(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Dequantize: computed in float32, returned in `dtype` (by default the array's own)."""
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        if is_eager(self):
            return _dequantize_eagerly(self, dtype)
        where = _sharding.explicit(self.qvalue)
        q = self._map(_sharding.without_reduced).unpack()
        compute = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        tiles = Tiles(q._stored_shape, q.tile_shape, q.scale.shape)
        x = tiles.split(q.qtype.decode(q.qvalue).astype(compute))
        if q.zero_point is not None:
            x = x - tiles.split_scale(q.zero_point).astype(compute)
        scale = tiles.split_scale(jnp.asarray(q.scale)).astype(compute)
        if q.outer_scale is not None:
            scale = scale * tiles.split_scale(q.outer_scale).astype(compute)
        # A value near the end of the dtype's range may round to inf; only a scale that is not finite may give inf.
        limit = jnp.where(jnp.isfinite(scale), float(jnp.finfo(dtype).max), jnp.inf).astype(compute)
        x = jnp.clip(x * scale, -limit, limit)
        return _sharding.restore_reduced(indexing.unpad(tiles.merge(x).astype(dtype), q.padding), where)

    def astype(self, dtype: DTypeLike) -> "QArray":
        """The same codes and scales, with dequantized values of another dtype."""
        return self._replace(dtype=jnp.dtype(dtype))

    def pack(self, axis: int = -1) -> "QArray":
        """The same array with codes of fewer than eight bits packed into bytes along an axis."""
        if self.packed is not None or self.qtype.bits >= 8:
            return self
        axis = indexing.from_end(axis, self.ndim)
        packed = (_pack_eagerly if is_eager(self.qvalue) else _pack)(self.qvalue, self.qtype, axis)
        return self._replace(qvalue=packed, packed=(axis, self.qvalue.shape[axis]))

    def unpack(self) -> "QArray":
        """The same array with one code per element, in the format's own dtype."""
        if self.packed is None:
            return self
        axis, size = self.packed
        bits = unpack_bits(self.qvalue, self.qtype.bits, size, axis=axis)
        return self._replace(qvalue=self.qtype.from_bits(bits), packed=None)

    # Structure.

    def reshape(self, *shape: Any) -> "QArray":
        """The same values in another shape; an error if that would split tiles."""
        return indexing.reshape(self, shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape)

    def transpose(self, *axes: Any) -> "QArray":
        """The axes in another order, reversed by default."""
        return indexing.transpose(self, axes[0] if len(axes) == 1 and isinstance(axes[0], Sequence) else axes)

    def swapaxes(self, axis1: int, axis2: int) -> "QArray":
        order = list(range(self.ndim))
        order[axis1], order[axis2] = order[axis2], order[axis1]
        return self.transpose(order)

    @property
    def T(self) -> "QArray":  # noqa: N802
        return self.transpose()

    @property
    def mT(self) -> "QArray":  # noqa: N802
        return self.swapaxes(-1, -2)

    def __getitem__(self, index: Any) -> "QArray":
        """Index the array; a slice that splits a tile repeats the scale of that axis for each value."""
        return indexing.take(self, index)

    # Printing.

    def __repr__(self) -> str:
        return display.text(self)

    def _repr_html_(self) -> str:
        return display.html(self)


_dequantize_eagerly = jax.jit(QArray.dequantize, static_argnums=1, inline=True)


def _pack(codes: Array, fmt: Format, axis: int) -> Array:
    return pack_bits(fmt.to_bits(codes), fmt.bits, axis=axis)


_pack_eagerly = jax.jit(_pack, static_argnums=(1, 2), inline=True)


class Tiles:
    """A shape whose axes are divided into `counts[i]` tiles of `sizes[i]` values; the last tile may be padded.

    In the *split* form of an array every axis with several tiles of several values becomes two, count and size; values
    that share a scale are those along `axes`.
    """

    def __init__(self, shape: Shape, sizes: Shape, counts: Shape):
        self.shape, self.sizes, self.counts = shape, sizes, counts
        # The shape with the last tiles filled up, and the number of axes of the split form for each axis.
        self.padded = tuple(count * size for count, size in zip(counts, sizes, strict=True))
        self._widths = tuple(1 + (count not in (0, 1) and size != 1) for count, size in zip(counts, sizes, strict=True))
        ends = [sum(self._widths[: axis + 1]) - 1 for axis in range(len(shape))]
        self.axes = tuple(end for end, count, size in zip(ends, counts, sizes, strict=True) if size != 1 or count == 1)
        """The axes of the split form along which values share a scale."""
        self.padding = tuple(
            (axis - len(shape), filled - dim)
            for axis, (filled, dim) in enumerate(zip(self.padded, shape, strict=True))
            if filled != dim
        )
        """(axis counted from the end, values added) for every padded axis."""

    def split(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """An array of this shape, padded with zeros, in split form; axes of size one stay so."""
        if self.padding:
            added = {axis % x.ndim: count for axis, count in self.padding}
            x = jnp.pad(x, [(0, added.get(a, 0) if n == self.shape[a] else 0) for a, n in enumerate(x.shape)])
        return x if sum(self._widths) == x.ndim else _sharding.split(x, self._splits(x.shape))

    def split_scale(self, scale: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """An array with one value per tile (or one for all, along an axis), made to broadcast with the split form."""
        if scale.ndim != len(self.shape) or any(s not in (1, c) for s, c in zip(scale.shape, self.counts, strict=True)):
            raise ValueError(f"shape {scale.shape} does not fit the tiles {self.counts} of an array {self.shape}")
        return _sharding.split(scale, [(dim, 1)[:n] for dim, n in zip(scale.shape, self._widths, strict=True)])

    def merge(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """The inverse of `split` and `split_scale`, the padding kept."""
        return x if sum(self._widths) == len(self.shape) else _sharding.merge(x, self._widths)

    def mask(self) -> Bool[Array, "..."]:
        """False where the split form is padding."""
        mask = jnp.ones((1,) * len(self.shape), bool)
        for axis, _ in self.padding:
            shape = [self.padded[axis] if a == axis % len(self.shape) else 1 for a in range(len(self.shape))]
            mask = jnp.logical_and(mask, (jnp.arange(self.padded[axis]) < self.shape[axis]).reshape(shape))
        return mask.reshape([n for part in self._splits(mask.shape) for n in part])

    def _splits(self, shape: Shape) -> list[Shape]:
        """How each axis of an array of this shape, or with some axes of size one, is split."""
        axes = zip(shape, self.counts, self.sizes, self._widths, strict=True)
        return [
            (dim,) if width == 1 else (count, size) if dim == count * size else (dim, 1)
            for dim, count, size, width in axes
        ]


def is_eager(*trees: Any) -> bool:
    """Whether all leaves are arrays with values, so that a function of them is better compiled as one program.

    Quantizing is some thirty primitives, each a program of its own when called eagerly. Compiled as one program they
    take a third of the time or less at the first call and a tenth at later ones. Under a trace they are part of its
    program, and under `jax.disable_jit` nothing is compiled.
    """
    leaves = jax.tree.leaves(trees)
    return not jax.config.jax_disable_jit and all(
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in leaves
    )


def is_qarray(x: Any) -> bool:
    """Whether `x` is a QArray: the `is_leaf` of tree functions that take QArrays as leaves."""
    return isinstance(x, QArray)


def _validate(q: QArray) -> None:
    if not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in (q.qvalue, q.scale)):
        return
    if q.packed is None and q.qvalue.dtype != q.qtype.storage:
        raise ValueError(f"codes of {q.qtype.name} are stored as {q.qtype.storage}, got {q.qvalue.dtype}")
    shape = q._stored_shape
    for name in ("scale", "zero_point", "outer_scale"):
        part = getattr(q, name)
        if part is None:
            continue
        if len(part.shape) != len(shape):
            raise ValueError(f"the {name} has rank {len(part.shape)} but the values rank {len(shape)}")
        if any(n % max(s, 1) for n, s in zip(shape, part.shape, strict=True)):
            raise ValueError(f"a {name} of shape {part.shape} does not tile values of shape {shape}")
    stored = getattr(q.qtype, "zero_dtype", None) or q.qtype.storage
    if q.zero_point is not None and q.zero_point.dtype != stored:
        raise ValueError(f"the zero point has dtype {q.zero_point.dtype}, but those of {q.qtype.name} {stored}")
