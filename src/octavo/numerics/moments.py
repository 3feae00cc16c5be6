"""Formats of optimizer moments: the dynamic map, and a linear map of positive values.

Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2021), section 2.1, and bitsandbytes' create_dynamic_map.
With E decades, decade i = 0 ... E - 1 has n_i = 2^i values (2^(i + 1) without a sign), evenly spaced in it:

    v(i, j) = 10^(i - E + 1) * (0.1 + 0.9 * (j + 1/2) / n_i),  j = 0 ... n_i - 1,    and besides 0 and 1.

So values of 10^-7 of the largest have a code, and the error near the largest is at most 0.45 / n_(E-1).

Li et al., Memory Efficient Optimizers with 4-bit States (2023), section 4: the linear map v(c) = (c + 1) / 2^bits of
second moments has no zero, because a value that is rounded to zero would be divided by.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from octavo._typing import Array, Float, Shaped, UInt8
from octavo.numerics.format import Format, round_unit


class _UnitFormat(Format):
    """A format whose largest value is 1, and whose codes are the indices of its values."""

    def _derive_unit(self, name: str, signed: bool) -> None:
        storage = jnp.dtype(jnp.uint4 if self.bits <= 4 else jnp.uint8)
        values = self.grid()
        self._derive(
            name=name,
            storage=storage,
            bound=1.0,
            largest=1.0,
            smallest=float(values[0]),
            has_zero=0.0 in values,
            signed=signed,
        )

    def to_bits(self, codes: Shaped[Array, "*s"]) -> UInt8[Array, "*s"]:
        return codes.astype(jnp.uint8)

    def from_bits(self, bits: UInt8[Array, "*s"]) -> Shaped[Array, "*s"]:
        return bits.astype(self.storage)


@dataclasses.dataclass(frozen=True, repr=False)
class DynamicFormat(_UnitFormat):
    """The dynamic map of bitsandbytes' 8-bit optimizers: 2^bits values in [-1, 1], or in [0, 1] if unsigned.

    A code is the index of its value in ascending order. There is no -1: the magnitude of a negative value ends below 1.
    If unsigned, only zero is rounded to zero.

    >>> fmt = DynamicFormat()
    >>> [round(x, 6) for x in fmt.round(jnp.asarray([1.0, 0.5, -3e-4, 1e-8])).tolist()]
    [1.0, 0.500781, -0.000269, 0.0]
    """

    bits: int = 8
    unsigned: bool = False

    def __post_init__(self):
        if not 2 <= self.bits <= 8:
            raise ValueError(f"a dynamic map has 2 to 8 bits, got {self.bits}")
        self._derive_unit(f"{'u' * self.unsigned}dynamic{self.bits}", signed=not self.unsigned)

    @functools.cached_property
    def _decades(self) -> tuple[tuple[int, int, float, float], ...]:
        """(index of the first value, number of values, spacing, first value) of each decade, the smallest first."""
        exponents, first, found = self.bits - 1, 1, []
        for i in range(exponents):
            count, top = 2 ** (i + self.unsigned), 10.0 ** (i - exponents + 1)
            found.append((first, count, 0.9 * top / count, top * (0.1 + 0.45 / count)))
            first += count
        return tuple(found)

    @property
    def _zero(self) -> int:
        """The code of zero: as many negative values as there are positive ones below 1."""
        return 0 if self.unsigned else sum(count for _, count, _, _ in self._decades)

    def grid(self) -> np.ndarray:
        below = np.concatenate([start + step * np.arange(count) for _, count, step, start in self._decades])
        return np.concatenate([[] if self.unsigned else -below[::-1], [0.0], below, [1.0]])

    def encode(self, x: Float[Array, "*s"], noise: Float[Array, "*n"] | None = None) -> Shaped[Array, "*s"]:
        magnitude = jnp.maximum(x, 0.0) if self.unsigned else jnp.abs(x)
        index = self._nearest(magnitude)
        if noise is not None:
            below = jnp.maximum(index - (self._value(index) > magnitude).astype(jnp.float32), 0.0)
            low, high = self._value(below), self._value(below + 1)
            index = below + (noise * (high - low) < magnitude - low).astype(jnp.float32)
        index = index.astype(jnp.int32)
        if self.unsigned:
            # A second moment that is rounded to zero would be divided by: it is the least positive value instead.
            index = jnp.maximum(index, (x > 0).astype(jnp.int32))
        else:
            index = jnp.where(x < 0, jnp.maximum(-index, -self._zero), index)
        return (index + self._zero).astype(self.storage)

    def decode(self, codes: Shaped[Array, "*s"]) -> Float[Array, "*s"]:
        index = codes.astype(jnp.float32) - self._zero
        value = self._value(jnp.abs(index))
        return value if self.unsigned else jnp.where(index < 0, -value, value)

    # Arithmetic in each decade instead of a search and a table: selects are vectorized, gathers are not.

    def _nearest(self, magnitude: Float[Array, "*s"]) -> Float[Array, "*s"]:
        """The index of the nearest value, counted from zero."""
        index, last = jnp.zeros_like(magnitude), 0.0
        for first, count, step, start in self._decades:
            place = jnp.floor((magnitude - (start - step / 2)) * (1 / step))
            place = first + jnp.minimum(place, count - 1.0)
            index = jnp.where(magnitude > (last + start) / 2, place, index)
            last = start + step * (count - 1)
        return jnp.where(magnitude > (last + 1) / 2, first + count, index)

    def _value(self, index: Float[Array, "*s"]) -> Float[Array, "*s"]:
        value = jnp.zeros_like(index)
        for first, _, step, start in self._decades:
            value = jnp.where(index >= first, index * step + (start - step * first), value)
        return jnp.where(index >= first + self._decades[-1][1], 1.0, value)


@dataclasses.dataclass(frozen=True, repr=False)
class PositiveFormat(_UnitFormat):
    """Evenly spaced values in (0, 1], without zero: 1 / 2^bits, 2 / 2^bits, ..., 1.

    >>> PositiveFormat(bits=4).round(jnp.asarray([0.0, 0.5, 1.0])).tolist()
    [0.0625, 0.5, 1.0]
    """

    bits: int = 8

    def __post_init__(self):
        if not 1 <= self.bits <= 8:
            raise ValueError(f"a linear map has 1 to 8 bits, got {self.bits}")
        self._derive_unit(f"positive{self.bits}", signed=False)

    def grid(self) -> np.ndarray:
        return np.arange(1, 2**self.bits + 1) / 2.0**self.bits

    def encode(self, x: Float[Array, "*s"], noise: Float[Array, "*n"] | None = None) -> Shaped[Array, "*s"]:
        codes = round_unit(jnp.clip(x, self.smallest, 1.0) * 2.0**self.bits, noise) - 1
        return codes.astype(jnp.int32).astype(self.storage)

    def decode(self, codes: Shaped[Array, "*s"]) -> Float[Array, "*s"]:
        return (codes.astype(jnp.float32) + 1) * 2.0**-self.bits
