"""Formats defined by a table of values, such as NF4.

NF4 is the quantile table of Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs (2023), appendix E.
"""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np

from octavo._typing import Array, Float, Shaped, UInt8
from octavo.numerics.format import Format

NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class TableFormat(Format):
    """Up to 256 values in ascending order; a code is a value's place in the table.

    Halfway between two values the lower one is taken.

    >>> TableFormat(name="thirds", values=(-1.0, -1 / 3, 1 / 3, 1.0)).bits
    2
    """

    name: str
    values: tuple[float, ...]

    def __post_init__(self):
        values = tuple(float(np.float32(v)) for v in self.values)
        if not 2 <= len(values) <= 256 or any(a >= b for a, b in itertools.pairwise(values)):
            raise ValueError(f"table {self.name!r} needs 2 to 256 values in strictly ascending order")
        if not np.all(np.isfinite(values)):
            raise ValueError(f"table {self.name!r} holds a value that is not finite")
        bits = max(1, (len(values) - 1).bit_length())
        self._derive(
            values=values,
            bits=bits,
            storage=jnp.dtype(jnp.uint4 if bits <= 4 else jnp.uint8),
            bound=max(-values[0], values[-1]),
            largest=values[-1],
            smallest=values[0],
            has_zero=0.0 in values,
            signed=values[0] < 0,
        )

    @functools.cached_property
    def _midpoints(self) -> tuple[float, ...]:
        """The largest float32 numbers that are not beyond the middle between two values."""
        v = np.asarray(self.values)
        exact = (v[:-1] + v[1:]) / 2
        near = exact.astype(np.float32)
        near = np.where(near.astype(np.float64) > exact, np.nextafter(near, np.float32(-np.inf)), near)
        return tuple(float(m) for m in near)

    def encode(self, x: Float[Array, "*s"], noise: Float[Array, "*n"] | None = None) -> Shaped[Array, "*s"]:
        if noise is None:
            place = _count(x, self._midpoints, strict=True)
        else:
            x = jnp.clip(x, self.smallest, self.largest)
            below = jnp.minimum(_count(x, self.values, strict=False) - 1, len(self.values) - 2)
            below = jnp.maximum(below, 0)
            low, high = _look_up(below, self.values[:-1]), _look_up(below, self.values[1:])
            place = below + (noise * (high - low) < x - low).astype(jnp.int32)
        return place.astype(self.storage)

    def decode(self, codes: Shaped[Array, "*s"]) -> Float[Array, "*s"]:
        return _look_up(codes.astype(jnp.int32), self.values)

    def to_bits(self, codes: Shaped[Array, "*s"]) -> UInt8[Array, "*s"]:
        return codes.astype(jnp.uint8)

    def from_bits(self, bits: UInt8[Array, "*s"]) -> Shaped[Array, "*s"]:
        return bits.astype(self.storage)

    def grid(self) -> np.ndarray:
        return np.asarray(self.values, np.float64)


def _count(x: Float[Array, "*s"], marks: tuple[float, ...], *, strict: bool) -> Shaped[Array, "*s"]:
    """How many of the ascending marks lie below each value (or at it, when not strict)."""
    if len(marks) > 16:
        side = "left" if strict else "right"
        return jnp.searchsorted(jnp.asarray(marks, jnp.float32), x, side=side).astype(jnp.int32)
    # A chain of comparisons vectorizes; a binary search on so few marks does not.
    count = jnp.zeros(x.shape, jnp.int32)
    for mark in marks:
        count += ((x > mark) if strict else (x >= mark)).astype(jnp.int32)
    return count


def _look_up(place: Shaped[Array, "*s"], values: tuple[float, ...]) -> Float[Array, "*s"]:
    if len(values) > 16:
        return jnp.take(jnp.asarray(values, jnp.float32), place, mode="clip")
    # A chain of selects vectorizes on CPUs where a gather runs element by element.
    found = jnp.full(place.shape, values[0], jnp.float32)
    for k, value in enumerate(values[1:], start=1):
        found = jnp.where(place == k, jnp.float32(value), found)
    return found
