"""Granularity for a given shape: which values share a scale."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from octavo import _sharding
from octavo._typing import Array, Bool, Shaped


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A shape whose axes are divided into `counts[i]` tiles of `sizes[i]` values; the last tile may be padded.

    In the *split* form of an array every axis with several tiles of several values becomes two, count and size; values
    that share a scale are those along `axes`.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], channelwise: Sequence[int], tiled: Mapping[int, int | float]) -> "Tiles":
        """The tiles of a shape: one value each on channelwise axes, one tile for the rest of the untiled axes."""
        rank = len(shape)
        for axis in (*channelwise, *tiled):
            if not -rank <= axis < rank:
                raise ValueError(f"axis {axis} is out of range for an array of shape {tuple(shape)}")
        channels = {axis % rank for axis in channelwise}
        tiles = {axis % rank: size for axis, size in tiled.items()}
        if both := channels & tiles.keys():
            raise ValueError(f"axes {sorted(both)} are both channelwise and tiled; a channelwise axis has tiles of 1")
        sizes = [
            1 if axis in channels else _tile_size(dim, tiles[axis]) if axis in tiles else max(dim, 1)
            for axis, dim in enumerate(shape)
        ]
        counts = [-(-dim // size) for dim, size in zip(shape, sizes, strict=True)]
        return Tiles(tuple(shape), tuple(sizes), tuple(counts))

    @property
    def padded(self) -> tuple[int, ...]:
        """The shape with the last tiles filled up."""
        return tuple(c * s for c, s in zip(self.counts, self.sizes, strict=True))

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the split form along which values share a scale."""
        axes, place = [], 0
        for count, size in zip(self.counts, self.sizes, strict=True):
            two = count > 1 and size > 1
            if two or size > 1 or count == 1:
                axes.append(place + two)
            place += 1 + two
        return tuple(axes)

    def _split_dim(self, axis: int, dim: int) -> tuple[int, ...]:
        count, size = self.counts[axis], self.sizes[axis]
        if not (count > 1 and size > 1):
            return (dim,)
        return (count, size) if dim == count * size else (dim, 1)

    def split(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """An array of this shape, padded with zeros, in split form; axes of size one stay so."""
        pads = [
            (0, p - d if x.shape[a] == d else 0) for a, (p, d) in enumerate(zip(self.padded, self.shape, strict=True))
        ]
        if any(high for _, high in pads):
            x = jnp.pad(x, pads)
        return _sharding.split(x, [self._split_dim(axis, dim) for axis, dim in enumerate(x.shape)])

    def split_scale(self, scale: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """An array with one value per tile (or one for all, along an axis), made to broadcast with the split form."""
        if scale.ndim != len(self.shape) or any(s not in (1, c) for s, c in zip(scale.shape, self.counts, strict=True)):
            raise ValueError(f"shape {scale.shape} does not fit the tiles {self.counts} of an array {self.shape}")
        return _sharding.split(scale, [(dim, 1)[:n] for dim, n in zip(scale.shape, self._widths, strict=True)])

    @property
    def _widths(self) -> tuple[int, ...]:
        return tuple(1 + (c > 1 and s > 1) for c, s in zip(self.counts, self.sizes, strict=True))

    def merge(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """The inverse of `split` and `split_scale`, the padding kept."""
        return _sharding.merge(x, self._widths)

    def mask(self) -> Bool[Array, "..."] | None:
        """False where the split form is padding; None when nothing is."""
        if self.padded == self.shape:
            return None
        mask = jnp.ones((1,) * len(self.shape), bool)
        for axis, (dim, padded) in enumerate(zip(self.shape, self.padded, strict=True)):
            if dim != padded:
                shape = [padded if a == axis else 1 for a in range(len(self.shape))]
                mask = jnp.logical_and(mask, (jnp.arange(padded) < dim).reshape(shape))
        return mask.reshape([d for axis, dim in enumerate(mask.shape) for d in self._split_dim(axis, dim)])

    @property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """(axis counted from the end, values added) for every padded axis."""
        rank = len(self.shape)
        return tuple((a - rank, p - d) for a, (p, d) in enumerate(zip(self.padded, self.shape, strict=True)) if p != d)


def _tile_size(dim: int, size: int | float) -> int:
    """Values in a tile: `size` of them, or for a float 1/n as many as n tiles need."""
    if isinstance(size, float):
        size = -(-dim // round(1 / size))
    return max(1, min(size, dim))


def check_tile_size(axis: int, size: int | float) -> int | float:
    """A tile size as the user gave it, if it is a valid one."""
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise TypeError(f"the tile size of axis {axis} is a count of values or a fraction 1/n, got {size!r}")
    whole = isinstance(size, float) and 0 < size <= 1 and abs(1 / size - round(1 / size)) < 1e-6
    if size <= 0 or (isinstance(size, float) and not whole):
        raise ValueError(f"the tile size of axis {axis} is a positive integer, or 1/n as a float; got {size!r}")
    return size
