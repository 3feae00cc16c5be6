"""What a number format is: the one small interface that the rest of Octavo speaks."""

import abc
import difflib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from octavo._config import Config
from octavo._typing import Array, Float, Shaped, UInt8


class Format(Config, abc.ABC):
    """A set of representable numbers, how they are stored, and how a float32 gets to them.

    A format works on values that are already scaled: `encode` takes float32 values whose interesting range is
    `[-bound, bound]`, rounds them (to nearest, ties to even, or up or down by given noise), saturates at `smallest`
    and `largest`, and returns codes of dtype `storage`. `decode` gives the float32 values back, exactly.
    """

    if TYPE_CHECKING:  # Fields in some formats, properties in others.

        @property
        def name(self) -> str:
            """What the format is known by."""

        @property
        def bits(self) -> int:
            """Bits of one packed code, scales not counted."""

    @property
    @abc.abstractmethod
    def storage(self) -> np.dtype:
        """The dtype of an array of unpacked codes."""

    @property
    @abc.abstractmethod
    def bound(self) -> float:
        """The magnitude that the end of the calibrated range is scaled to."""

    @property
    @abc.abstractmethod
    def largest(self) -> float:
        """The largest representable value."""

    @property
    def smallest(self) -> float:
        """The smallest (most negative) representable value."""
        return -self.largest

    @property
    def overflow(self) -> str:
        """What happens beyond `smallest` and `largest`: every format of Octavo saturates."""
        return "saturate"

    @property
    def has_nan(self) -> bool:
        """Whether a code exists for NaN; where there is none, a non-finite input shows in its scale."""
        return False

    @property
    def has_zero(self) -> bool:
        """Whether zero is representable."""
        return True

    @property
    def asymmetric(self) -> bool:
        """Whether a zero point makes sense, as it does for integers."""
        return False

    @property
    def signed(self) -> bool:
        """Whether negative values are representable; unsigned formats need a zero point."""
        return True

    @property
    def tile(self) -> int | None:
        """Values that share a scale, where the format itself says so (block formats)."""
        return None

    @functools.cached_property
    def carrier(self) -> np.dtype:
        """The cheapest ordinary dtype that holds every value exactly: the dtype of exact emulation."""
        values = self.grid()
        for dtype in (jnp.int8, jnp.bfloat16, jnp.float16):
            with np.errstate(over="ignore", invalid="ignore"):
                there = values.astype(dtype).astype(np.float64)
            if np.array_equal(there, values):
                return jnp.dtype(dtype)
        return np.dtype(np.float32)

    @abc.abstractmethod
    def encode(self, x: Float[Array, "*s"], noise: Float[Array, "*n"] | None = None) -> Shaped[Array, "*s"]:
        """The codes nearest to `x`; with `noise` uniform in [0, 1), rounded stochastically and without bias."""

    @abc.abstractmethod
    def decode(self, codes: Shaped[Array, "*s"]) -> Float[Array, "*s"]:
        """The float32 values that codes stand for."""

    @abc.abstractmethod
    def to_bits(self, codes: Shaped[Array, "*s"]) -> UInt8[Array, "*s"]:
        """Codes as unsigned integers below `2**bits`, for packing."""

    @abc.abstractmethod
    def from_bits(self, bits: UInt8[Array, "*s"]) -> Shaped[Array, "*s"]:
        """Codes from the unsigned integers that `to_bits` gives."""

    @abc.abstractmethod
    def grid(self) -> np.ndarray:
        """Every finite representable value, ascending, as float64."""

    def round(self, x: Float[Array, "*s"], noise: Float[Array, "*n"] | None = None) -> Float[Array, "*s"]:
        """The representable values that `x` rounds to."""
        return self.decode(self.encode(x, noise))


def round_unit(x: Float[Array, "*s"], noise: Float[Array, "*n"] | None) -> Float[Array, "*s"]:
    """Integers nearest to `x`, ties to even; with noise u in [0, 1), up with the probability of the fraction.

    The fraction `x - floor(x)` is exact in float32, so the stochastic form has no bias beyond the resolution of u.
    """
    if noise is None:
        return jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    low = jnp.floor(x)
    return low + (noise < x - low).astype(x.dtype)


def nearest_names(name: str, known: Sequence[str]) -> str:
    """A phrase that lists what a misspelt name may have meant."""
    near = difflib.get_close_matches(name.lower(), list(known), n=4, cutoff=0.4)
    hint = f"did you mean {', '.join(map(repr, near))}? " if near else ""
    return f"{hint}Known: {', '.join(sorted(known))}"
