"""Rounding to nearest, and stochastic rounding."""

import abc
import dataclasses

import jax
import jax.numpy as jnp

from octavo._config import Config
from octavo._shapes import Shape
from octavo._typing import Array, Float, PRNGKeyArray


class Rounding(Config, abc.ABC):
    """A rounding mode: it draws the noise that `Format.encode` takes, if any."""

    stochastic: bool = False

    @abc.abstractmethod
    def noise(self, key: PRNGKeyArray | None, shape: Shape) -> Float[Array, "..."] | None:
        """Uniform numbers in [0, 1) that broadcast to `shape`, or None to round to nearest."""


@dataclasses.dataclass(frozen=True, repr=False)
class Nearest(Rounding):
    """To nearest, ties to even."""

    def noise(self, key: PRNGKeyArray | None, shape: Shape) -> Float[Array, "..."] | None:
        return None


@dataclasses.dataclass(frozen=True, repr=False)
class Stochastic(Rounding):
    """Stochastic rounding: up with the probability of the fraction, so that the expected value is the value itself.

    Noise of `bits=24` has no bias beyond float32's own resolution; `bits=8` costs a quarter of the random bits and has
    a bias of at most 1/512 of a step. Along `shared_axes` one random number serves all values.

    >>> Stochastic(bits=8).noise(jax.random.key(0), (2, 3)).shape
    (2, 3)
    """

    bits: int = 24
    shared_axes: tuple[int, ...] = ()
    stochastic = True

    def __post_init__(self):
        if self.bits not in (8, 16, 24):
            raise ValueError(f"stochastic rounding takes 8, 16 or 24 bits of noise, got {self.bits}")
        object.__setattr__(self, "shared_axes", tuple(self.shared_axes))

    def noise(self, key: PRNGKeyArray | None, shape: Shape) -> Float[Array, "..."] | None:
        if key is None:
            raise ValueError("stochastic rounding needs a random key: pass key=jax.random.key(...)")
        shared = {axis % len(shape) for axis in self.shared_axes} if shape else set()
        shape = tuple(1 if axis in shared else size for axis, size in enumerate(shape))
        dtype = {8: jnp.uint8, 16: jnp.uint16, 24: jnp.uint32}[self.bits]
        word = jax.random.bits(key, shape, dtype)
        if self.bits == 24:
            return (word >> 8).astype(jnp.float32) * 2.0**-24
        # The middle of each of the 2**bits intervals: half the bias of its lower end.
        return (word.astype(jnp.float32) + 0.5) * 2.0**-self.bits


def get_rounding(rounding: Rounding | str | None) -> Rounding:
    """The rounding of a name: `"nearest"`, `"stochastic"` or `"stochastic,8"`."""
    if rounding is None:
        return Nearest()
    if isinstance(rounding, Rounding):
        return rounding
    name, comma, bits = rounding.strip().lower().partition(",")
    if name == "nearest" and not comma:
        return Nearest()
    if name == "stochastic" and (not comma or bits.strip().isdigit()):
        return Stochastic(bits=int(bits) if comma else 24)
    raise ValueError(f"unknown rounding {rounding!r}: use 'nearest', 'stochastic' or 'stochastic,8' (bits of noise)")
