"""Floating-point formats of up to 16 bits: those JAX has as dtypes, and any other exponent and mantissa width."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array, Float, Shaped, UInt8
from octavo.numerics.format import Format, round_unit

_SPECIALS = ("none", "fn", "fnuz", "ieee")


def round_to_grid(
    x: Float[Array, "*s"],
    *,
    mantissa_bits: int,
    min_exponent: int,
    noise: Float[Array, "*n"] | None = None,
    up: bool = False,
) -> Float[Array, "*s"]:
    """Float32 values rounded to a floating-point grid that has subnormals but no upper end.

    Within one binade the grid is uniform with a power of two as its step, so dividing by the step is exact and the
    question is one of rounding to integers: `round_unit`, hence ties to even or no bias; `up` rounds away from zero.
    """
    magnitude = jnp.abs(x)
    binade = jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(magnitude, jnp.uint32) & jnp.uint32(0x7F800000), jnp.float32
    )
    step = jnp.maximum(binade * 2.0**-mantissa_bits, 2.0 ** (min_exponent - mantissa_bits))
    steps = jnp.ceil(magnitude / step) if up else round_unit(magnitude / step, noise)
    return jnp.copysign(steps * step, x)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class FloatFormat(Format):
    """A sign, `exponent_bits` and `mantissa_bits`, with subnormals.

    `specials` says which codes are not numbers: "none" (all are finite, as in float6 and float4), "fn" (only the
    largest is NaN), "fnuz" (only negative zero is NaN) or "ieee" (the top exponent is infinity and NaN). Formats that
    JAX has as a dtype name it in `dtype` and are stored as it; the others are stored as bit patterns in uint8 or
    uint16.

    >>> FloatFormat(exponent_bits=3, mantissa_bits=1).largest
    24.0
    """

    min_exponent: int = dataclasses.field(init=False, repr=False, compare=False)
    """The exponent of the smallest normal number, and of all subnormals."""
    max_exponent: int = dataclasses.field(init=False, repr=False, compare=False)
    """The exponent of the largest number."""

    exponent_bits: int
    mantissa_bits: int
    bias: int | None = None
    specials: str = "none"
    dtype: str | None = None
    name: str = ""

    def __post_init__(self):
        if self.specials not in _SPECIALS:
            raise ValueError(f"specials is one of {_SPECIALS}, got {self.specials!r}")
        bits = 1 + self.exponent_bits + self.mantissa_bits
        if not 1 <= self.exponent_bits <= 8 or not 0 <= self.mantissa_bits <= 10 or bits > 16:
            raise ValueError(
                "a small float has 1 to 8 exponent bits, 0 to 10 mantissa bits and 16 bits in all; got "
                f"e{self.exponent_bits}m{self.mantissa_bits}"
            )
        bias = self.bias
        if bias is None:
            bias = 2 ** (self.exponent_bits - 1) - (self.specials != "fnuz")
        max_exponent = 2**self.exponent_bits - 1 - (self.specials == "ieee") - bias
        lost = 2 if self.specials == "fn" else 1
        largest = (2.0 - lost * 2.0**-self.mantissa_bits) * 2.0**max_exponent
        self._derive(
            bias=bias,
            name=self.name or self.dtype or f"e{self.exponent_bits}m{self.mantissa_bits}",
            bits=bits,
            storage=jnp.dtype(self.dtype or (np.uint8 if bits <= 8 else np.uint16)),
            min_exponent=1 - bias,
            max_exponent=max_exponent,
            bound=largest,
            largest=largest,
            smallest=-largest,
            has_nan=self.dtype is not None and self.specials != "none",
        )
        if self.min_exponent - self.mantissa_bits < -126 or self.max_exponent > 127:
            raise ValueError(f"{self.name} reaches beyond float32's normal numbers, in which its arithmetic is done")

    def encode(self, x: Float[Array, "*s"], noise: Float[Array, "*n"] | None = None) -> Shaped[Array, "*s"]:
        if noise is not None or self.dtype is None:
            x = round_to_grid(x, mantissa_bits=self.mantissa_bits, min_exponent=self.min_exponent, noise=noise)
        x = jnp.clip(x, -self.largest, self.largest)
        return x.astype(self.storage) if self.dtype is not None else self._pattern(x)

    def _pattern(self, x: Float[Array, "*s"]) -> Shaped[Array, "*s"]:
        """Bit patterns of float32 values that lie on the grid."""
        word = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)
        shift = 23 - self.mantissa_bits
        normal = (word >> shift) - jnp.uint32((126 + self.min_exponent) << self.mantissa_bits)
        step = 2.0 ** (self.min_exponent - self.mantissa_bits)
        subnormal = (jnp.abs(x) * (1.0 / step)).astype(jnp.uint32)
        code = jnp.where(jnp.abs(x) < 2.0**self.min_exponent, subnormal, normal)
        sign = jnp.signbit(x).astype(jnp.uint32) << (self.bits - 1)
        return (sign | code).astype(self.storage)

    def decode(self, codes: Shaped[Array, "*s"]) -> Float[Array, "*s"]:
        if self.dtype is not None:
            return codes.astype(jnp.float32)
        word = codes.astype(jnp.uint32)
        code = word & jnp.uint32(2 ** (self.bits - 1) - 1)
        normal = jax.lax.bitcast_convert_type(
            (code + jnp.uint32((126 + self.min_exponent) << self.mantissa_bits)) << (23 - self.mantissa_bits),
            jnp.float32,
        )
        subnormal = code.astype(jnp.float32) * 2.0 ** (self.min_exponent - self.mantissa_bits)
        magnitude = jnp.where(code < 2**self.mantissa_bits, subnormal, normal)
        return jnp.where(word >> (self.bits - 1) == 1, -magnitude, magnitude)

    def to_bits(self, codes: Shaped[Array, "*s"]) -> UInt8[Array, "*s"]:
        if self.dtype is None:
            return codes.astype(jnp.uint8)
        unsigned = jnp.uint4 if self.bits == 4 else jnp.uint8
        return jax.lax.bitcast_convert_type(codes, unsigned).astype(jnp.uint8)

    def from_bits(self, bits: UInt8[Array, "*s"]) -> Shaped[Array, "*s"]:
        if self.dtype is None:
            return bits.astype(self.storage)
        unsigned = jnp.uint4 if self.bits == 4 else jnp.uint8
        return jax.lax.bitcast_convert_type(bits.astype(unsigned), self.storage)

    def grid(self) -> np.ndarray:
        return self._grid.copy()

    @functools.cached_property
    def _grid(self) -> np.ndarray:
        fraction = np.arange(2**self.mantissa_bits) * 2.0**-self.mantissa_bits
        subnormal = fraction * 2.0**self.min_exponent
        exponents = np.arange(self.min_exponent, self.max_exponent + 1)
        normal = ((1 + fraction) * 2.0 ** exponents[:, None].astype(float)).ravel()
        magnitude = np.concatenate([subnormal, normal])
        magnitude = magnitude[magnitude <= self.largest]
        return np.unique(np.concatenate([-magnitude, magnitude]))
