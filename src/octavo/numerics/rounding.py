"""Rounding to nearest, stochastic rounding, and the rounding of MS-EDEN."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import batching, mlir

from octavo import _sharding
from octavo._config import Config
from octavo._typing import Array, Float, PRNGKeyArray, Shape


class Rounding(Config, abc.ABC):
    """A rounding mode: it draws the noise that `Format.encode` takes, if any."""

    stochastic: bool = False
    """Whether it needs a random key."""

    nearest: bool = True
    """Whether codes are rounded to nearest, so that the ends of the range may be rounded to the last code.

    Not if it is stochastic, unless a class says otherwise.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "nearest" not in vars(cls):
            cls.nearest = not cls.stochastic

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

    def noise(self, key: PRNGKeyArray | None, shape: Shape) -> Float[Array, "..."]:
        if key is None:
            raise ValueError("stochastic rounding needs a random key: pass key=jax.random.key(...)")
        shared = {axis % len(shape) for axis in self.shared_axes} if shape else set()
        shape = tuple(1 if axis in shared else size for axis, size in enumerate(shape))
        if not has_words(key):
            return _noise(key, shape, self.bits)
        return noise_p.bind(jax.random.key_data(key), shape=shape, bits=self.bits)


def _noise(key: PRNGKeyArray, shape: Shape, bits: int) -> Float[Array, "..."]:
    word = jax.random.bits(key, shape, {8: jnp.uint8, 16: jnp.uint16, 24: jnp.uint32}[bits])
    if bits == 24:
        return (word >> 8).astype(jnp.float32) * 2.0**-24
    # The middle of each of the 2**bits intervals: half the bias of its lower end.
    return (word.astype(jnp.float32) + 0.5) * 2.0**-bits


def has_words(key: PRNGKeyArray | None) -> bool:
    """Whether a key is traced, and of a kind whose bits a kernel can draw."""
    axes = jax.sharding.get_abstract_mesh().axis_types
    if not isinstance(key, jax.core.Tracer) or key.shape or jax.sharding.AxisType.Explicit in axes:
        return False
    is_key = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    known = is_key and str(jax.random.key_impl(key)) == "threefry2x32" and jax.config.jax_threefry_partitionable
    return bool(known) and not _sharding.is_typed(key)


def _noise_of_words(words: Array, *, shape: Shape, bits: int) -> Array:
    return _noise(jax.random.wrap_key_data(words, impl="threefry2x32"), shape, bits)


def _batch(args: Any, dims: Any, **params: Any) -> tuple[Array, int]:
    return jax.vmap(lambda words: _noise_of_words(words, **params), in_axes=dims)(*args), 0


# The noise of a key is one equation, because XLA draws random bits on CPUs many times slower than a kernel.
noise_p = core.Primitive("octavo_noise")
noise_p.def_impl(_noise_of_words)
noise_p.def_abstract_eval(lambda words, *, shape, bits: jax.core.ShapedArray(shape, jnp.dtype(jnp.float32)))
mlir.register_lowering(noise_p, mlir.lower_fun(_noise_of_words, multiple_results=False))
batching.primitive_batchers[noise_p] = _batch


@dataclasses.dataclass(frozen=True, repr=False)
class Eden(Rounding):
    """MS-EDEN: codes to nearest, then scales that remove the bias, and these rounded stochastically.

    It is for block formats with two levels of scales, such as nvfp4, and for values that were rotated at random in
    blocks of `block` values: the scales of such a block are multiplied by the ratio that makes its inner product with
    the values exact. Its error is less than half that of stochastic rounding, whose noise is in every code.

    Panferov et al., Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient Estimation,
    arXiv:2601.22813.
    """

    block: int = 32
    stochastic = True
    nearest = True

    def __post_init__(self):
        if self.block < 2 or self.block & (self.block - 1):
            raise ValueError(f"MS-EDEN corrects blocks of a power of two of rotated values, got {self.block}")

    def noise(self, key: PRNGKeyArray | None, shape: Shape) -> Float[Array, "..."] | None:
        if key is None:
            raise ValueError(
                "MS-EDEN rounds scales stochastically and needs a random key: pass key=jax.random.key(...)"
            )
        return None


def get_rounding(rounding: Rounding | str | None) -> Rounding:
    """The rounding of a name: `"nearest"`, `"stochastic"`, `"stochastic,8"`, `"eden"` or `"eden,128"`."""
    if rounding is None:
        return Nearest()
    if isinstance(rounding, Rounding):
        return rounding
    if not isinstance(rounding, str):
        raise TypeError(f"a rounding is a string such as 'stochastic', or a Rounding; got {rounding!r}")
    name, comma, number = rounding.strip().lower().partition(",")
    if name == "nearest" and not comma:
        return Nearest()
    makers = {"stochastic": Stochastic, "eden": Eden}
    if name in makers and (not comma or number.strip().isdigit()):
        return makers[name](int(number)) if comma else makers[name]()
    raise ValueError(
        f"unknown rounding {rounding!r}: use 'nearest', 'stochastic', 'stochastic,8' (bits of noise) or 'eden'"
    )
