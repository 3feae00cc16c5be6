"""Integer formats: signed, unsigned, ternary and binary, with AQT's four bucket conventions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array, Float, Shaped, UInt8
from octavo.numerics.format import Format, round_unit


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class IntFormat(Format):
    """Integers of 1 to 16 bits, each code standing for `unit * code`.

    Two switches choose among AQT's conventions. With `preserve_zero` the buckets are centred on integers and zero is
    one of them; without it they lie between integers, at the halves, and zero is not representable. With
    `preserve_max` the end of the range lands on the centre of the last bucket, without it on that bucket's far edge,
    which uses the bucket fully. The bound in units of one code:

        preserve_zero  preserve_max   8 bits  4 bits  2 bits  1 bit
        yes            no (default)    127.5     7.5     1.5      -
        yes            yes             127       7       1        -
        no             no              128       8       2      1.0
        no             yes             127.5     7.5     1.5    0.5

    `narrow` leaves out the lowest code (-128), so that the range is symmetric.

    >>> IntFormat(bits=8).bound, IntFormat(bits=8, preserve_max=True).bound
    (127.5, 127.0)
    """

    qmin: int = dataclasses.field(init=False, repr=False, compare=False)
    """The lowest code."""
    qmax: int = dataclasses.field(init=False, repr=False, compare=False)
    """The highest code."""

    bits: int
    signed: bool = True
    preserve_zero: bool = True
    preserve_max: bool = False
    narrow: bool = False
    unit: float = 1.0
    edge: float | None = None
    name: str = ""

    def __post_init__(self):
        lowest = 1 if not (self.preserve_zero and self.signed) else 2
        if not lowest <= self.bits <= 16:
            raise ValueError(
                f"an integer format has {lowest} to 16 bits here, got {self.bits}"
                + ("; a one-bit format needs preserve_zero=False" if self.bits == 1 else "")
            )
        if not self.signed and (self.narrow or not self.preserve_zero):
            raise ValueError("an unsigned format has no narrow range and always holds zero")
        if not self.name:
            self._derive(name=f"{'' if self.signed else 'u'}int{self.bits}")
        # One-bit codes are kept in int2: every backend has it, int1 not.
        width = next(width for width in (2, 4, 8, 16) if self.bits <= width)
        qmin = (self.narrow - (1 << (self.bits - 1))) if self.signed else 0
        qmax = (1 << (self.bits - self.signed)) - 1
        offset = 0.0 if self.preserve_zero else 0.5
        far = qmax + (0.5 if self.preserve_zero else 1.0) if self.edge is None else self.edge
        self._derive(
            storage=jnp.dtype(getattr(jnp, f"{'' if self.signed else 'u'}int{width}")),
            qmin=qmin,
            qmax=qmax,
            bound=(far - 0.5 * self.preserve_max) * self.unit,
            largest=(qmax + offset) * self.unit,
            smallest=(qmin + offset) * self.unit,
            has_zero=self.preserve_zero,
            asymmetric=self.preserve_zero and self.unit == 1.0,
        )

    def encode(self, x: Float[Array, "*s"], noise: Float[Array, "*n"] | None = None) -> Shaped[Array, "*s"]:
        x = x * (1.0 / self.unit) if self.unit != 1.0 else x
        if noise is not None:
            codes = round_unit(x if self.preserve_zero else x - 0.5, noise)
        elif self.preserve_zero:
            codes = jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
        else:
            codes = jnp.floor(x)
        return jax.lax.clamp(jnp.float32(self.qmin), codes, jnp.float32(self.qmax)).astype(self.storage)

    def decode(self, codes: Shaped[Array, "*s"]) -> Float[Array, "*s"]:
        x = codes.astype(jnp.float32)
        x = x if self.preserve_zero else x + 0.5
        return x if self.unit == 1.0 else x * self.unit

    def to_bits(self, codes: Shaped[Array, "*s"]) -> UInt8[Array, "*s"]:
        return codes.astype(jnp.int8).astype(jnp.uint8) & jnp.uint8((1 << self.bits) - 1)

    def from_bits(self, bits: UInt8[Array, "*s"]) -> Shaped[Array, "*s"]:
        if not self.signed:
            return bits.astype(self.storage)
        spare = jnp.uint8(8 - self.bits)
        return ((bits << spare).astype(jnp.int8) >> spare.astype(jnp.int8)).astype(self.storage)

    def grid(self) -> np.ndarray:
        return (np.arange(self.qmin, self.qmax + 1) + (0.0 if self.preserve_zero else 0.5)) * self.unit
