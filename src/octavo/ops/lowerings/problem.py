"""A dot of two operands, at least one of them a QArray, and the form in which its codes are multiplied.

Where scales are constant along the contraction, or along tiles of it, codes are multiplied in their own precision and
the result is scaled: tiles become batch axes.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from octavo import _sharding
from octavo._typing import Array
from octavo.ops import codes
from octavo.ops.codes import ArrayOrQArray
from octavo.ops.dims import Dims
from octavo.qarray import QArray

# With shorter tiles the per-tile results are larger than the operands: dequantizing is cheaper.
SMALLEST_TILE = 64


@dataclasses.dataclass(frozen=True, eq=False)
class DotProblem:
    """The input of a lowering: compute `lhs . rhs` in `dtype`."""

    lhs: ArrayOrQArray
    rhs: ArrayOrQArray
    dims: Dims
    dtype: Any
    precision: Any = None
    out_sharding: Any = None
    accumulator: str | None = None

    @functools.cached_property
    def operands(self) -> tuple[ArrayOrQArray, ArrayOrQArray]:
        """Both operands, unpacked and without padding."""
        return codes.unpack(self.lhs), codes.unpack(self.rhs)

    @functools.cached_property
    def split(self) -> "Split | None":
        """The form in which codes are multiplied; None where the operands are dequantized first."""
        lhs, rhs = self.operands
        tiles = _contraction_tiles(lhs, rhs, self.dims)
        kind = None if tiles is None else codes.accumulation_kind(lhs, rhs)
        if tiles is None or kind is None:
            return None
        left = Side(lhs, self.dims.lhs_contract, self.dims.lhs_batch, tiles)
        right = Side(rhs, self.dims.rhs_contract, self.dims.rhs_batch, tiles)
        dims = Dims(left.ndim, right.ndim, left.contract, right.contract, left.batch, right.batch)
        return Split(kind, left, right, dims)

    @property
    def is_integer(self) -> bool:
        """Whether codes are multiplied as integers."""
        return self.split is not None and self.split.kind == "int"


class Split(NamedTuple):
    """Both operands with their tiles as batch axes, and the dimension numbers of their dot."""

    kind: Any
    """ "int", "native" (float8), or the dtype that holds all values exactly."""
    left: "Side"
    right: "Side"
    dims: Dims


def _contraction_tiles(lhs: ArrayOrQArray, rhs: ArrayOrQArray, dims: Dims) -> tuple[int, ...] | None:
    """The tile of each contracted axis in which both scales are constant; None if it is too short to pay off."""
    tiles = []
    for a, b in zip(dims.lhs_contract, dims.rhs_contract, strict=True):
        sizes = [x.tile_shape[axis] for x, axis in ((lhs, a), (rhs, b)) if isinstance(x, QArray)]
        sizes += [_part_tile(x, axis) for x, axis in ((lhs, a), (rhs, b)) if isinstance(x, QArray)]
        small, size = min(sizes), lhs.shape[a]
        if any(s % small for s in sizes if small) or (small < SMALLEST_TILE and small != size):
            return None
        tiles.append(small)
    return tuple(tiles)


def _part_tile(q: QArray, axis: int) -> int:
    return min(q.shape[axis] // max(1, p.shape[axis]) for p in (q.scale, q.zero_point, q.outer_scale) if p is not None)


class Side:
    """One operand with its contracted axes split into [tiles, tile size]; the tile axes are batch axes."""

    def __init__(self, x: ArrayOrQArray, contract: tuple[int, ...], batch: tuple[int, ...], tiles: tuple[int, ...]):
        self.x = x
        self.own_contract, self.own_batch = contract, batch
        cut = {axis: tile for axis, tile in zip(contract, tiles, strict=True) if 0 < tile < x.shape[axis]}
        self.cut = cut
        place, at = {}, 0
        for axis in range(len(x.shape)):
            place[axis] = at
            at += 2 if axis in cut else 1
        self.ndim = at
        self.batch = (*(place[a] for a in batch), *(place[a] for a in contract if a in cut))
        self.contract = tuple(place[a] + (a in cut) for a in contract)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the codes in split form."""
        sizes = [(n // self.cut[a], self.cut[a]) if a in self.cut else (n,) for a, n in enumerate(self.x.shape)]
        return tuple(n for part in sizes for n in part)

    def _split(self, x: Array) -> Array:
        cuts: list[tuple[int, ...]] = []
        for axis, dim in enumerate(x.shape):
            if axis in self.cut:
                tile, size = self.cut[axis], self.x.shape[axis]
                cuts.append((size // tile, tile) if dim == size else (dim, 1))
            else:
                cuts.append((dim,))
        return _sharding.split(x, cuts)

    @property
    def has_zero_point(self) -> bool:
        return isinstance(self.x, QArray) and self.x.zero_point is not None

    def integers(self) -> Array:
        """Codes as int8, without subtracting the zero point."""
        assert isinstance(self.x, QArray)
        return self._split(codes.integers(self.x))

    def zero_point(self) -> Array | None:
        """The zero point of `integers`, as int32 in split form, one per index of the axes that are not contracted."""
        zero = codes.zero_point(self.x)
        return None if zero is None else self._split(self._spread(zero))

    def values(self, kind: Any) -> Array:
        """Codes decoded to floats, exactly and without scales."""
        return self._split(codes.values(self.x, kind))

    def scale(self, *, is_codes: bool) -> Array | None:
        """The float32 scale in split form: of the integer codes if `is_codes`, else of their decoded values."""
        scale = codes.scale(self.x, codes=is_codes)
        return None if scale is None else self._split(self._spread(scale))

    def _spread(self, part: Array) -> Array:
        """One entry per index of remaining axes, and one per tile (or one for all) of contracted axes."""
        for axis, (count, size) in enumerate(zip(part.shape, self.x.shape, strict=True)):
            want = size // self.cut[axis] if axis in self.cut else (1 if axis in self.own_contract else size)
            if 1 < count < want:
                part = _sharding.repeat(part, want // count, axis)
        return part
