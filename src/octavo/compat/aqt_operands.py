"""AQT's bits as formats, its shards as tiles, and configs from the bits of each matmul."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from octavo._config import Config
from octavo._typing import DTypeLike
from octavo.numerics import Format, IntFormat, UnroundedFormat, get_format
from octavo.ops.config import DotConfig, Matmul, Operand

SKIP: Literal["skip"] = "skip"
"""AQT's value for an argument that leaves a setting unchanged."""

type Bits = int | str | None
"""None for float, 1 to 8 for an integer, "e4m3" or "e5m2" for a float8."""


@dataclasses.dataclass(frozen=True, repr=False)
class LocalAqt(Config):
    """Scales for each of n shards of a gradient's first contracted axis, along which the batch is sharded.

    >>> from octavo.compat.aqt import config_v4
    >>> config_v4(drhs_bits=8, drhs_local_aqt=LocalAqt(contraction_axis_shard_count=4)).drhs.lhs.tile
    0.25
    """

    contraction_axis_shard_count: int

    def __post_init__(self):
        if self.contraction_axis_shard_count < 1:
            raise ValueError(f"a contraction has at least one shard, got {self.contraction_axis_shard_count}")


def int_symmetric(bits: int, preserve_zero: bool = True, preserve_max_val: bool = False, round: bool = True) -> Format:
    """AQT's IntSymmetric: integers about zero, in one of four conventions.

    With `preserve_zero` zero is representable; without it the values are half-integers. With `preserve_max_val` the end
    of the range is the centre of the last bucket, without it that bucket's far edge. Without `round` values are scaled
    and clipped only, which shows the error of scales by themselves.

    >>> [int_symmetric(8, zero, top).bound for zero in (True, False) for top in (False, True)]
    [127.5, 127.0, 128.0, 127.5]
    """
    # Half-integer buckets are already symmetric.
    fmt = IntFormat(bits=bits, preserve_zero=preserve_zero, preserve_max=preserve_max_val, narrow=preserve_zero)
    return fmt if round else UnroundedFormat(base=fmt)


def make(
    *,
    fwd: tuple[Bits, Bits] = (None, None),
    bwd: tuple[Bits, Bits] = (None, None),
    reuse: tuple[bool, bool] = (False, False),
    local: tuple[LocalAqt | None, LocalAqt | None] = (None, None),
    accumulators: tuple[DTypeLike | None, DTypeLike | None, DTypeLike | None] = (None, None, None),
    **operand: Any,
) -> DotConfig:
    """A config from the bits of the forward's two sides and of dlhs and drhs, everything rounded to nearest."""
    left, right = (_operand(bits, **operand) for bits in fwd)
    gradients = []
    # The residual of dlhs is the forward's rhs, that of drhs its lhs.
    for bits, again, shards, saved, accumulator in zip(bwd, reuse, local, (right, left), accumulators[1:], strict=True):
        tiles = {} if shards is None else {"tile": 1 / shards.contraction_axis_shard_count, "tile_axis": 0}
        one = _operand(bits, **tiles, **operand)
        low = "reuse" if one is None else "requantize"
        residual = low if again and saved is not None else "original"
        gradients.append(Matmul(one, one, residual=residual, accumulator=operand_accumulator(accumulator, one, one)))
    forward = Matmul(left, right, accumulator=operand_accumulator(accumulators[0], left, right))
    # By default AQT does not mask gradients of clipped values.
    return DotConfig(forward, *gradients, clip_gradient=False)


def _operand(bits: Bits, **fields: Any) -> Operand | None:
    return None if bits is None else Operand(operand_format(bits), **fields)


def operand_format(bits: int | str) -> Format:
    """The format of these bits."""
    if bits in ("e4m3", "e5m2"):
        return get_format(bits)
    if isinstance(bits, int) and not isinstance(bits, bool) and 1 <= bits <= 8:
        return int_symmetric(bits, preserve_zero=bits > 1)
    raise ValueError(f"bits are None, 1 to 8, 'e4m3' or 'e5m2'; got {bits!r}")


def operand_accumulator(dtype: DTypeLike | None, lhs: Operand | None, rhs: Operand | None) -> str | None:
    """The accumulator of a Matmul: None for int32, the default for integers."""
    if dtype is None or (isinstance(dtype, str) and dtype == SKIP):
        return None
    name = jnp.dtype(dtype).name
    integers = all(o is not None and isinstance(o.qtype, IntFormat) for o in (lhs, rhs))
    if name == "int32" and not integers:
        raise ValueError("an int32 accumulator needs integers on both sides: pass None for the accumulator of floats")
    if name.startswith("int") and name != "int32":
        raise ValueError(f"integers are summed in int32, got {name}: pass None or int32")
    return None if name == "int32" else name
