"""Block formats: a small element, a tile that shares a scale, and a scale that is itself low-precision.

The MX formats follow the OCP Microscaling Formats (MX) Specification v1.0: 32 elements share a power of two (e8m0);
mxfp8_16 has 16 of them, which the specification does not.
NVFP4 has 16 e2m1 elements share an e4m3 scale, and all blocks of a tensor also share one float32 scale.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array, Float, Shaped, UInt8
from octavo.numerics.floats import FloatFormat, round_to_grid
from octavo.numerics.format import Format
from octavo.numerics.integers import IntFormat
from octavo.numerics.tables import NF4_VALUES, TableFormat

E8M0 = jnp.dtype(jnp.float8_e8m0fnu)
_ROUNDINGS = ("up", "floor", "nearest")


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class BlockFormat(Format):
    """An element format whose every `tile` values share a scale of dtype `scale_dtype`.

    `scale_rounding` says how the ideal scale becomes a stored one: "up" never saturates an element, "nearest" may by
    half a step, and "floor" is the OCP specification's: the power of two below the largest magnitude, less the
    element's largest exponent, which saturates the top of the last binade. With `outer` a float32 scale for the whole
    tensor brings the block scales into the range of `scale_dtype`. With `zero_dtype` blocks may have zero points, which
    are floats of this dtype: fractions of a code.
    """

    largest_scale: float = dataclasses.field(init=False, repr=False, compare=False)
    """The largest finite value of the scale's dtype."""

    name: str
    element: Format
    tile: int = 32
    scale_dtype: str = "float8_e8m0fnu"
    scale_rounding: str = "up"
    outer: bool = False
    zero_dtype: str | None = None

    def __post_init__(self):
        if isinstance(self.element, BlockFormat):
            raise ValueError(f"the element of {self.name!r} is a block format itself")
        if self.tile < 2:
            raise ValueError(f"the tile of {self.name!r} has at least 2 values, got {self.tile}")
        if self.scale_rounding not in _ROUNDINGS:
            raise ValueError(f"scale_rounding is one of {_ROUNDINGS}, got {self.scale_rounding!r}")
        if self.scale_rounding == "floor" and jnp.dtype(self.scale_dtype) != E8M0:
            raise ValueError('scale_rounding="floor" is the OCP rule for float8_e8m0fnu scales only')
        if self.zero_dtype is not None and not self.element.asymmetric:
            raise ValueError(f"the element of {self.name!r} has no zero point: {self.element!r}")
        same = ("bits", "storage", "bound", "largest", "smallest", "has_nan", "has_zero")
        largest_scale = float(jnp.finfo(self.scale_dtype).max)
        asymmetric = self.zero_dtype is not None
        self._derive(
            largest_scale=largest_scale, asymmetric=asymmetric, **{name: getattr(self.element, name) for name in same}
        )

    @functools.cached_property
    def carrier(self) -> np.dtype:
        return self.element.carrier

    def encode(self, x: Float[Array, "*s"], noise: Float[Array, "*n"] | None = None) -> Shaped[Array, "*s"]:
        return self.element.encode(x, noise)

    def decode(self, codes: Shaped[Array, "*s"]) -> Float[Array, "*s"]:
        return self.element.decode(codes)

    def to_bits(self, codes: Shaped[Array, "*s"]) -> UInt8[Array, "*s"]:
        return self.element.to_bits(codes)

    def from_bits(self, bits: UInt8[Array, "*s"]) -> Shaped[Array, "*s"]:
        return self.element.from_bits(bits)

    def grid(self) -> np.ndarray:
        return self.element.grid()


def power_of_two_scale(absmax: Float[Array, "*s"], fmt: Format, *, floor: bool = False) -> Float[Array, "*s"]:
    """The smallest power of two that brings `absmax` within the bound; with `floor`, OCP's power of two.

    Found by comparing bits, not by a logarithm, so it is exact. Stays within float32's normal numbers, because most
    backends flush the others to zero; e8m0's 2**-127 is the one value thereby never used.
    """
    word = jax.lax.bitcast_convert_type(absmax, jnp.uint32)
    exponent = (word >> 23).astype(jnp.int32) - 127
    if floor:
        exponent -= int(np.floor(np.log2(fmt.largest)))
    else:
        mantissa, bound_exponent = np.frexp(np.float32(fmt.bound))
        bound_fraction = np.float32(2 * mantissa).view(np.uint32) & np.uint32(0x7FFFFF)
        above = (word & jnp.uint32(0x7FFFFF)) > jnp.uint32(bound_fraction)
        exponent += above.astype(jnp.int32) - (int(bound_exponent) - 1)
    exponent = jnp.clip(exponent, -126, 127)
    scale = jax.lax.bitcast_convert_type((exponent + 127).astype(jnp.uint32) << 23, jnp.float32)
    return jnp.where(jnp.isfinite(absmax), scale, jnp.nan)


def round_scale(scale: Float[Array, "*s"], dtype: np.dtype, *, up: bool) -> Float[Array, "*s"]:
    """A float32 scale rounded to a float dtype's values, saturating, NaN if not finite; `up` rounds away from zero."""
    info = jnp.finfo(dtype)
    if up:
        scale = round_to_grid(scale, mantissa_bits=int(info.nmant), min_exponent=int(info.minexp), up=True)
    rounded = jnp.minimum(scale, float(info.max)).astype(dtype).astype(jnp.float32)
    return jnp.where(jnp.isfinite(scale), rounded, jnp.nan)


def block_formats() -> list[BlockFormat]:
    """The block formats that come with Octavo."""

    def e(exponent: int, mantissa: int, specials: str = "none", dtype: str | None = None) -> FloatFormat:
        return FloatFormat(exponent_bits=exponent, mantissa_bits=mantissa, specials=specials, dtype=dtype)

    e2m1 = e(2, 1, dtype="float4_e2m1fn")
    # OCP's int8 element is a fixed-point number with six fractional bits.
    int8 = IntFormat(bits=8, narrow=True, preserve_max=True, unit=2.0**-6)
    # Double quantization: 8/32 more bits per value, with zero points 16/32. Of the floats of eight bits, e3m4
    # has the most precise scales, to 3 %, over a range of 62. It ends at 15.5, below the zero points of five bits.
    double = {"scale_dtype": "float8_e3m4", "scale_rounding": "nearest", "outer": True}
    return [
        BlockFormat(name="mxfp8", element=e(4, 3, "fn", "float8_e4m3fn")),
        BlockFormat(name="mxfp8_16", element=e(4, 3, "fn", "float8_e4m3fn"), tile=16),
        BlockFormat(name="mxfp8_e5m2", element=e(5, 2, "ieee", "float8_e5m2")),
        BlockFormat(name="mxfp6", element=e(2, 3)),
        BlockFormat(name="mxfp6_e3m2", element=e(3, 2)),
        BlockFormat(name="mxfp4", element=e2m1),
        BlockFormat(name="mxint8", element=int8),
        BlockFormat(
            name="nvfp4", element=e2m1, tile=16, scale_dtype="float8_e4m3fn", scale_rounding="nearest", outer=True
        ),
        *(
            BlockFormat(name=f"int{bits}_double", element=IntFormat(bits=bits), zero_dtype=zero, **double)
            for bits, zero in ((4, "float8_e3m4"), (3, "float8_e3m4"), (5, "float8_e4m3fn"), (6, "float8_e4m3fn"))
        ),
        BlockFormat(name="nf4_double", element=TableFormat(name="nf4", values=NF4_VALUES), tile=64, **double),
    ]
