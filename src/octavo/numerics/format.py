"""The interface of a number format."""

import abc
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._config import Config
from octavo._typing import Array, Float, Shaped, UInt8


class Format(Config, abc.ABC):
    """A number format: the representable values, their codes, and the rounding of float32 values to them.

    A format works on values that are already scaled: `encode` takes float32 values that are scaled to
    `[-bound, bound]`, rounds them (to nearest, ties to even, or stochastically by given noise), saturates at `smallest`
    and `largest`, and returns codes of dtype `storage`. `decode` returns the float32 values of codes, exactly.

    Subclass it and set every attribute that has no default, or use `IntFormat`, `FloatFormat`, `TableFormat` or
    `BlockFormat` of `octavo.numerics`, and make it known by `register_format`.

    >>> from octavo.numerics import TableFormat
    >>> fmt = TableFormat(name="thirds", values=(-1.0, -1 / 3, 1 / 3, 1.0))
    >>> isinstance(fmt, Format), fmt.round(jnp.asarray([0.3, -2.0])).tolist()
    (True, [0.3333333432674408, -1.0])
    """

    if TYPE_CHECKING:  # Fields in some formats.

        @property
        def name(self) -> str:
            """The name that the format is registered by."""

        @property
        def bits(self) -> int:
            """Bits of one packed code, scales not counted."""

        @property
        def signed(self) -> bool:
            """Whether negative values are representable; unsigned formats need a zero point."""

        @property
        def tile(self) -> int | None:
            """The number of values that share a scale, for block formats; else None."""

    else:
        signed, tile = True, None

    storage: np.dtype
    """The dtype of an array of unpacked codes."""
    bound: float
    """The magnitude that the end of the calibrated range is scaled to."""
    largest: float
    """The largest representable value."""
    smallest: float
    """The smallest (most negative) representable value."""
    has_nan: bool = False
    """Whether there is a code for NaN; without one, a non-finite input makes its scale NaN."""
    has_zero: bool = True
    """Whether zero is representable."""
    asymmetric: bool = False
    """Whether the format supports a zero point, as integers do."""
    overflow: str = "saturate"
    """What happens to values beyond `smallest` and `largest`: every format saturates."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.__eq__ = Format._equals  # pyrefly: ignore  # a dataclass keeps it, and adds the hash of its fields

    def _equals(self, other: Any) -> bool:
        """Equal to a format with the same fields, and to the name or the dtype of the format."""
        if self is other:
            return True
        if isinstance(other, Format):
            fields = [f.name for f in dataclasses.fields(self) if f.compare]  # pyrefly: ignore
            return type(self) is type(other) and all(getattr(self, f) == getattr(other, f) for f in fields)
        return self.name == type_name(other)

    def _derive(self, **values: Any) -> None:
        """Set attributes that follow from the fields of a frozen format."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @functools.cached_property
    def carrier(self) -> np.dtype:
        """The narrowest standard dtype that holds every value exactly, in which matmuls are emulated."""
        values = self.grid()
        for dtype in (jnp.int8, jnp.bfloat16, jnp.float16):
            with np.errstate(over="ignore", invalid="ignore"):
                cast = values.astype(dtype).astype(np.float64)
            if np.array_equal(cast, values):
                return jnp.dtype(dtype)
        return np.dtype(np.float32)

    @abc.abstractmethod
    def encode(self, x: Float[Array, "*s"], noise: Float[Array, "*n"] | None = None) -> Shaped[Array, "*s"]:
        """The codes nearest to `x`; with `noise` uniform in [0, 1), rounded stochastically and without bias."""

    @abc.abstractmethod
    def decode(self, codes: Shaped[Array, "*s"]) -> Float[Array, "*s"]:
        """The float32 values of codes."""

    @abc.abstractmethod
    def to_bits(self, codes: Shaped[Array, "*s"]) -> UInt8[Array, "*s"]:
        """Codes as unsigned integers below `2**bits`, for packing."""

    @abc.abstractmethod
    def from_bits(self, bits: UInt8[Array, "*s"]) -> Shaped[Array, "*s"]:
        """Codes from the unsigned integers that `to_bits` returns."""

    @abc.abstractmethod
    def grid(self) -> np.ndarray:
        """Every finite representable value, ascending, as float64."""

    def gradient(self, x: Float[Array, "*s"]) -> Shaped[Array, "*s"] | None:
        """The factor of the straight-through gradient at scaled values, or a mask; None for one everywhere."""
        return None

    def round(self, x: Float[Array, "*s"], noise: Float[Array, "*n"] | None = None) -> Float[Array, "*s"]:
        """The representable values that `x` rounds to."""
        return self.decode(self.encode(x, noise))


def type_name(other: Any) -> str | None:
    """The name of a dtype, or of a format that is given by name; None for anything else.

    >>> type_name("int8"), type_name(jnp.int8), type_name(8)
    ('int8', 'int8', None)
    """
    if isinstance(other, str):
        return other
    try:
        return jnp.dtype(other).name if isinstance(other, type | np.dtype) else None
    except TypeError:
        return None


def round_unit(x: Float[Array, "*s"], noise: Float[Array, "*n"] | None) -> Float[Array, "*s"]:
    """Integers nearest to `x`, ties to even; with noise u in [0, 1), up with the probability of the fraction.

    The fraction `x - floor(x)` is exact in float32, so the stochastic form has no bias beyond the resolution of u.
    """
    if noise is None:
        return jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    low = jnp.floor(x)
    return low + (noise < x - low).astype(x.dtype)
