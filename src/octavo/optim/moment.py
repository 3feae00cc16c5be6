"""A moment of an optimizer in few bits: blocks of values with a scale each.

Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2021), section 2: in each block of values x

    scale = max |x| / largest,    code = nearest(x / scale),    x ~ scale * value(code),

where `largest` is the largest value of the format.

Xi et al., COAT: Compressing Optimizer States and Activation for Memory-Efficient FP8 Training (2024), section 4: before
it is quantized, the dynamic range of a block is expanded to that of the format, R = largest / least value above 0,

    f(x) = sign(x) * |x / max|^k,    k = floor(8 * log2 R / log2(max |x| / min |x|)) / 8,  the minimum over x != 0.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from octavo._config import Config
from octavo._typing import Array, Float
from octavo.numerics import DynamicFormat, FloatFormat, Format, PositiveFormat, get_format
from octavo.qarray import QArray, Tiles

# Blocks do not cross the shards of an axis that is sharded over a divisor of this many devices.
SHARDS = 8
# Exponents of the range expansion are multiples of 1/8.
_EXPONENTS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpandedMoment:
    """A moment whose blocks have an expanded dynamic range.

    Args:
      codes: The codes of f(x), and `max / largest` as the scale of each block.
      exponent: The exponent k of each block in eighths, as uint8.
    """

    codes: QArray
    exponent: Any

    @property
    def nbytes(self) -> int:
        """The size in bytes of all arrays."""
        return self.codes.nbytes + math.prod(self.exponent.shape)

    def dequantize(self) -> Float[Array, "..."]:
        """The values, in the dtype in which they were given."""
        q = self.codes.unpack()
        tiles = Tiles(q.shape, q.tile_shape, q.scale.shape)
        y = tiles.split(q.qtype.decode(q.qvalue)) * (1 / q.qtype.largest)
        power = _EXPONENTS / tiles.split_scale(self.exponent).astype(jnp.float32)
        x = jnp.copysign(_power(jnp.abs(y), power), y) * tiles.split_scale(q.scale) * q.qtype.largest
        return tiles.merge(x).astype(q.dtype)


def is_moment(x: Any) -> bool:
    """Whether `x` is a quantized moment: the `is_leaf` of tree functions that take moments as leaves."""
    return isinstance(x, QArray | ExpandedMoment)


@dataclasses.dataclass(frozen=True, repr=False)
class MomentFormat(Config):
    """How the moments of an optimizer are stored.

    Args:
      signed: The format of moments that may be negative.
      unsigned: The format of second moments.
      block_size: The largest number of values in a block. Blocks divide the axes of an array, the last one first.
      expand: Whether the dynamic range of a block is expanded to the format's.

    >>> MOMENTS["dynamic8"].quantize(jnp.ones((64, 320))).tile_shape
    (4, 40)
    """

    signed: Format
    unsigned: Format
    block_size: int = 256
    expand: bool = False

    def quantize(self, x: Float[Array, "..."], *, unsigned: bool = False) -> QArray | ExpandedMoment:
        """Quantize a moment.

        Args:
          x: The values.
          unsigned: Whether there are no negative values.

        Returns:
          The moment, a pytree with a method `dequantize`.
        """
        fmt = self.unsigned if unsigned else self.signed
        tile = block_shape(x.shape, self.block_size)
        # Halves of a byte belong to one shard.
        packs = fmt.bits < 8 and x.ndim > 0 and (x.shape[-1] // math.gcd(x.shape[-1], SHARDS)) % 2 == 0
        return _quantize(x, fmt, tile, packs=packs, expand=self.expand)


# Codes are bytes: XLA's CPU backend would convert all of a float8 array to slice it.
_E4M3 = FloatFormat(exponent_bits=4, mantissa_bits=3, specials="fn", name="e4m3fn")
MOMENTS = {
    "dynamic8": MomentFormat(DynamicFormat(8), DynamicFormat(8, unsigned=True)),
    "linear8": MomentFormat(get_format("int8"), PositiveFormat(8)),
    "dynamic4": MomentFormat(DynamicFormat(4), PositiveFormat(4), block_size=128),
    "float8": MomentFormat(_E4M3, _E4M3, block_size=128, expand=True),
}
"""The formats of moments by name: 8-bit optimizers, 8-bit Muon, 4-bit optimizers and COAT."""


def block_shape(shape: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """The shape of a block: a divisor of every axis, at most `block_size` values.

    >>> block_shape((4, 2048, 512), 256), block_shape((4096, 4096), 256), block_shape((7, 251), 256)
    ((1, 4, 64), (1, 256), (1, 251))
    """
    sizes: list[int] = []
    for dim in reversed(shape):
        shard = dim // math.gcd(dim, SHARDS)
        most = min(shard, block_size // math.prod(sizes))
        sizes.append(next(size for size in range(max(most, 1), 0, -1) if shard % size == 0))
    return tuple(reversed(sizes))


def quantize_like(x: Float[Array, "..."], moment: QArray | ExpandedMoment) -> QArray | ExpandedMoment:
    """Quantize `x` with the format and the block shape of another moment, which may be abstract."""
    expand = isinstance(moment, ExpandedMoment)
    q = moment.codes if expand else moment
    return _quantize(x.astype(q.dtype), q.qtype, q.tile_shape, packs=q.packed is not None, expand=expand)


def _quantize(x: Array, fmt: Format, tile: tuple[int, ...], *, packs: bool, expand: bool) -> QArray | ExpandedMoment:
    tiles = Tiles(x.shape, tile, tuple(dim // size for dim, size in zip(x.shape, tile, strict=True)))
    split = tiles.split(x.astype(jnp.float32))
    largest = jnp.max(jnp.abs(split), axis=tiles.axes, keepdims=True)
    exponent = _exponent(split, largest, tiles.axes, fmt) if expand else None
    if fmt.signed and -fmt.smallest < fmt.largest:
        # The dynamic map has no -1: the scale takes the sign of the largest value, which is +1 so.
        top = jnp.max(split, axis=tiles.axes, keepdims=True)
        largest = jnp.where(top < largest, -largest, largest)
    # Without a barrier XLA computes `x` again for each use of it: 8 instead of 3 ns per value on a CPU.
    split, largest, exponent = jax.lax.optimization_barrier((split, largest, exponent))
    # Subnormal numbers are zero on CPUs, and have no reciprocal.
    tiny = jnp.abs(largest) < 1e-37
    y = split * jnp.where(tiny, 0.0, 1 / jnp.where(tiny, 1.0, largest))
    if exponent is not None:
        y = jnp.copysign(_power(jnp.abs(y), exponent / _EXPONENTS), split)
    # The largest value of a block is exact: an error of it would accumulate from step to step.
    codes = tiles.merge(fmt.encode(y * fmt.largest))
    q = QArray(codes, tiles.merge(largest * (1 / fmt.largest)), None, fmt, dtype=x.dtype)
    q = q.pack() if packs else q
    return q if exponent is None else ExpandedMoment(q, tiles.merge(exponent.astype(jnp.uint8)))


def _exponent(x: Array, largest: Array, axes: tuple[int, ...], fmt: Format) -> Array:
    """The exponent of the range expansion of each block, in eighths."""
    least = jnp.min(jnp.where(x == 0, jnp.inf, jnp.abs(x)), axis=axes, keepdims=True)
    span = jnp.log(jnp.maximum(largest, 1e-37)) - jnp.log(jnp.maximum(least, 1e-37))
    positive = fmt.grid()[fmt.grid() > 0]
    eighths = jnp.floor(_EXPONENTS * math.log(positive[-1] / positive[0]) / jnp.maximum(span, 0.1))
    return jnp.where(largest > 0, jnp.clip(eighths, 1, 255), _EXPONENTS).astype(jnp.float32)


def _power(x: Array, power: Array) -> Array:
    """`x**power` for 0 <= x <= 1 and power > 0."""
    return jnp.where(x > 0, jnp.exp(jnp.log(jnp.maximum(x, 1e-37)) * power), 0.0)
