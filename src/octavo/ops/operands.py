"""The operands of a matmul: their axes, and their codes and scales in the form in which they are multiplied.

Where scales are constant along the contraction, or along tiles of it, codes are multiplied in their own precision and
the result is scaled: tiles become batch axes.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from octavo import _sharding
from octavo._typing import Array, DTypeLike, Shape
from octavo.numerics import BlockFormat, FloatFormat, Format, IntFormat
from octavo.qarray import QArray
from octavo.qarray.indexing import repeat_scale

type ArrayOrQArray = Array | QArray
type Axes = tuple[int, ...]

# With shorter tiles the per-tile results are larger than the operands: dequantizing is cheaper.
SMALLEST_TILE = 64
# Integers are multiplied as such in shorter tiles too if there are few, as where each device has a scale of its own.
FEW_TILES = 16


@dataclasses.dataclass(frozen=True)
class Dims:
    """`lax.dot_general`'s dimension numbers, with the operands' ranks."""

    lhs_ndim: int
    rhs_ndim: int
    lhs_contract: Axes
    rhs_contract: Axes
    lhs_batch: Axes = ()
    rhs_batch: Axes = ()
    lhs_remaining: Axes = dataclasses.field(init=False, repr=False, compare=False)
    rhs_remaining: Axes = dataclasses.field(init=False, repr=False, compare=False)
    numbers: tuple[tuple[Axes, Axes], tuple[Axes, Axes]] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        left, right = (*self.lhs_contract, *self.lhs_batch), (*self.rhs_contract, *self.rhs_batch)
        object.__setattr__(self, "lhs_remaining", tuple(a for a in range(self.lhs_ndim) if a not in left))
        numbers = ((self.lhs_contract, self.rhs_contract), (self.lhs_batch, self.rhs_batch))
        object.__setattr__(self, "numbers", numbers)
        object.__setattr__(self, "rhs_remaining", tuple(a for a in range(self.rhs_ndim) if a not in right))

    @staticmethod
    def of(dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> "Dims":
        """From the dimension numbers of `lax.dot_general`; axes may be negative."""
        (lc, rc), (lb, rb) = dimension_numbers
        norm = lambda axes, ndim: tuple(int(a) % ndim for a in axes)  # noqa: E731
        return Dims(lhs_ndim, rhs_ndim, norm(lc, lhs_ndim), norm(rc, rhs_ndim), norm(lb, lhs_ndim), norm(rb, rhs_ndim))

    @property
    def out_ndim(self) -> int:
        return len(self.lhs_batch) + len(self.lhs_remaining) + len(self.rhs_remaining)

    def swap(self) -> "Dims":
        """The same dot with its operands swapped, which swaps the remaining axes of the result as well."""
        return Dims(self.rhs_ndim, self.lhs_ndim, self.rhs_contract, self.lhs_contract, self.rhs_batch, self.lhs_batch)


class Codes:
    """One operand: its codes, scale and zero point, with its contracted axes split into [tiles, tile size].

    The tile axes are batch axes. Without `tiles`, arrays keep their axes; a scale has one entry per value of an axis
    that is not contracted, or one for all.
    """

    def __init__(self, x: ArrayOrQArray, contract: Axes = (), batch: Axes = (), tiles: Shape = ()):
        self.x = x
        self.format = getattr(x.qtype, "element", x.qtype) if isinstance(x, QArray) else None
        fmt = self.format
        self.has_zero_point = isinstance(x, QArray) and x.zero_point is not None
        self.is_int8 = isinstance(fmt, IntFormat) and fmt.bits <= (8 if fmt.has_zero else 7)
        if self.is_int8 and self.has_zero_point:
            self.is_int8 = not _has_fractions(x)
        self._own_contract = contract
        self._tiles = {
            axis: tile for axis, tile in zip(contract, tiles, strict=False) if tile not in (0, x.shape[axis])
        }
        place = [axis + sum(other < axis for other in self._tiles) for axis in range(len(x.shape))]
        self.ndim = len(place) + len(self._tiles)
        self.batch = (*(place[a] for a in batch), *(place[a] for a in contract if a in self._tiles))
        self.contract = tuple(place[a] + (a in self._tiles) for a in contract)

    def is_constant_along(self, axis: int) -> bool:
        """Whether scales and zero points do not vary along an axis."""
        x = self.x
        parts = (x.scale, x.zero_point, x.outer_scale) if isinstance(x, QArray) else ()
        return all(part is None or part.shape[axis] == 1 for part in parts)

    @property
    def shape(self) -> Shape:
        """The shape of the codes in split form."""
        sizes = [
            (n // self._tiles[a], self._tiles[a]) if a in self._tiles else (n,) for a, n in enumerate(self.x.shape)
        ]
        return tuple(n for part in sizes for n in part)

    def integers(self) -> Array:
        """Codes as int8, without subtracting the zero point."""
        assert isinstance(self.x, QArray)
        assert self.format is not None
        codes = self.x.qvalue
        if not self.format.signed and self.format.bits == 8:
            codes = (codes ^ jnp.uint8(128)).astype(jnp.int8)  # shifted by -128, as are the zero points below
        codes = codes.astype(jnp.int8)
        return self._split(codes if self.format.has_zero else 2 * codes + jnp.int8(1))

    def zero_point(self) -> Array | None:
        """The zero point of `integers`, as int32, one per index of the axes that are not contracted."""
        if not isinstance(self.x, QArray) or self.x.zero_point is None:
            return None
        assert self.format is not None
        shift = 128 if not self.format.signed and self.format.bits == 8 else 0
        return self._split(self.x.zero_point.astype(jnp.int32) - shift)

    def values(self, kind: Any) -> Array:
        """Codes decoded to floats, exactly and without scales."""
        x = self.x
        if not isinstance(x, QArray):
            return self._split(x.astype(kind))
        if kind == "native":
            return self._split(x.qvalue)
        exact = x.qtype.decode(x.qvalue)
        if x.zero_point is not None:
            ones = QArray(x.qvalue, jnp.ones_like(x.scale, jnp.float32), x.zero_point, x.qtype)
            exact = ones.dequantize(jnp.float32)
        return self._split(exact.astype(kind))

    def scale(self, *, is_codes: bool) -> Array | None:
        """The float32 scale: of the integer codes if `is_codes`, else of their decoded values; None for one."""
        if not isinstance(self.x, QArray):
            return None
        fmt, outer = self.format, self.x.outer_scale
        unit = fmt.unit * (1.0 if fmt.has_zero else 0.5) if is_codes and isinstance(fmt, IntFormat) else 1.0
        if isinstance(self.x.scale, np.ndarray) and unit == 1.0 and outer is None and np.all(self.x.scale == 1):
            return None
        scale = jnp.asarray(self.x.scale, jnp.float32)
        scale = scale if outer is None else scale * outer.astype(jnp.float32)
        return self._split(scale if unit == 1.0 else scale * unit)

    def _split(self, part: Array) -> Array:
        """Repeat a scale to one entry per index of remaining axes and per tile of contracted ones, then split it."""
        splits: list[Shape] = []
        for axis, (count, size) in enumerate(zip(part.shape, self.x.shape, strict=True)):
            tile = self._tiles.get(axis)
            want = size // tile if tile else 1 if axis in self._own_contract else size
            if count not in (1, want, size):
                part, count = _sharding.repeat(part, want // count, axis), want
            splits.append((count,) if tile is None else (want, tile) if count == size else (count, 1))
        return _sharding.split(part, splits) if self._tiles else part


class Split(NamedTuple):
    """Both operands of a dot with their tiles as batch axes, and the dimension numbers of their dot."""

    kind: Any
    """The `accumulation_kind`."""
    left: Codes
    right: Codes
    dims: Dims


class MatmulOptions(NamedTuple):
    """The static options of a matmul."""

    dtype: Any
    """The dtype of the result."""
    precision: Any = None
    """As in `jax.lax.dot_general`, for dots computed in float."""
    lowering: str = "auto"
    accumulator: str | None = None
    """The dtype in which floats, and the partial sums of tiles, are accumulated; None for float32."""
    out_sharding: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class DotProblem:
    """The input of a lowering: a dot of two operands, at least one of them a QArray."""

    lhs: ArrayOrQArray
    rhs: ArrayOrQArray
    dims: Dims
    options: MatmulOptions

    @functools.cached_property
    def operands(self) -> tuple[ArrayOrQArray, ArrayOrQArray]:
        """Both operands, unpacked and without padding."""
        return unpack(self.lhs), unpack(self.rhs)

    @functools.cached_property
    def split(self) -> Split | None:
        """The form in which codes are multiplied; None where the operands are dequantized first."""
        (lhs, rhs), dims, tiles = self.operands, self.dims, []
        integers = Codes(lhs).is_int8 and Codes(rhs).is_int8
        for a, b in zip(dims.lhs_contract, dims.rhs_contract, strict=True):
            size = lhs.shape[a]
            sizes = [
                size // max(part.shape[axis], 1)
                for x, axis in ((lhs, a), (rhs, b))
                if isinstance(x, QArray)
                for part in (x.scale, x.zero_point, x.outer_scale)
                if part is not None
            ]
            shorter = [n for n in sizes if n != size]
            tile = min(shorter, default=size) if all(isinstance(n, int) for n in shorter) else 0
            few = integers and bool(shorter) and tile > 1 and not at_least(size, FEW_TILES * tile + 1)
            if shorter and ((tile < SMALLEST_TILE and not few) or any((n % tile) != 0 for n in sizes)):
                return None
            tiles.append(tile)
        left = Codes(lhs, dims.lhs_contract, dims.lhs_batch, tuple(tiles))
        right = Codes(rhs, dims.rhs_contract, dims.rhs_batch, tuple(tiles))
        kind = accumulation_kind(left, right)
        dims = Dims(left.ndim, right.ndim, left.contract, right.contract, left.batch, right.batch)
        return None if kind is None else Split(kind, left, right, dims)


def at_least(size: Any, bound: int) -> bool:
    """Whether a size is at least `bound`; a symbolic one, which is not known, counts as large.

    >>> at_least(3, 2), at_least(1, 2)
    (True, False)
    """
    return not isinstance(size, int) or size >= bound


def unpack(x: ArrayOrQArray) -> ArrayOrQArray:
    """Unpack an operand and remove its padding."""
    if not isinstance(x, QArray):
        return x
    x = x if x.packed is None else x.unpack()
    for axis, _ in x.padding:
        x = repeat_scale(x, axis % x.ndim)
    return x


def accumulation_kind(left: Codes, right: Codes) -> Any:
    """ "int" for an integer dot, "native" for float8, or the dtype that holds all values exactly; None if none does."""
    if left.is_int8 and right.is_int8:
        return "int"
    if _is_float8(left.format) and _is_float8(right.format):
        return "native"
    carriers = _carrier(left.x), _carrier(right.x)
    return None if carriers[0] is None or carriers[1] is None else wider(carriers[0], carriers[1])


def code_pair(left: Codes, right: Codes, kind: Any) -> tuple[Array, Array]:
    """Both operands in the form in which an `accumulation_kind` multiplies them."""
    return (left.integers(), right.integers()) if kind == "int" else (left.values(kind), right.values(kind))


def element(q: QArray) -> Format:
    """The format of single codes; the element format of a block format."""
    return q.qtype.element if isinstance(q.qtype, BlockFormat) else q.qtype


def _has_fractions(x: ArrayOrQArray) -> bool:
    """Whether an operand has zero points that are not integers."""
    zero = x.zero_point if isinstance(x, QArray) else None
    return zero is not None and jnp.issubdtype(zero.dtype, jnp.floating)


def _is_float8(fmt: Format | None) -> bool:
    return isinstance(fmt, FloatFormat) and fmt.dtype is not None and fmt.bits == 8


def _carrier(x: ArrayOrQArray) -> np.dtype | None:
    if not isinstance(x, QArray):
        return jnp.dtype(x.dtype) if x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32) else None
    if x.zero_point is not None:
        return jnp.dtype(jnp.bfloat16) if x.qtype.bits <= 8 and not _has_fractions(x) else jnp.dtype(jnp.float32)
    carrier = x.qtype.carrier
    return jnp.dtype(jnp.bfloat16) if carrier == np.int8 else carrier


def wider(a: np.dtype, b: np.dtype) -> np.dtype:
    """The float dtype that holds the values of both, independent of JAX's promotion mode."""
    if a == b:
        return a
    return np.dtype(np.float64 if np.float64 in (a, b) else np.float32)


def dequantize(lhs: ArrayOrQArray, rhs: ArrayOrQArray) -> tuple[Array, Array]:
    """Both operands as floats of one dtype."""
    wide = [x.dequantize() if isinstance(x, QArray) else x for x in (lhs, rhs)]
    common = wider(wide[0].dtype, wide[1].dtype)
    return wide[0].astype(common), wide[1].astype(common)


def result_dtype(lhs: ArrayOrQArray, rhs: ArrayOrQArray, preferred: DTypeLike | None) -> Any:
    """The result dtype: the preferred one, or the promoted dtype of the operands; int32 for narrower integers."""
    if preferred is not None:
        return jnp.dtype(preferred)
    return widen_integer(jnp.promote_types(lhs.dtype, rhs.dtype))


def widen_integer(dtype: Any) -> Any:
    """int32 for narrower integers, in which sums overflow; other dtypes unchanged."""
    return jnp.dtype("int32") if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 32 else dtype
