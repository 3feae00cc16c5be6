"""Keys or values of one layer, in memory: floats, or codes and scales, that are written and read along time."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array, Bool, Float, Num, Shaped
from octavo.numerics import Format, IntFormat, get_format
from octavo.qarray import QArray, Quantizer

KEY_TIME, VALUE_TIME = 3, 2
"""Which axis is time: keys are `[slots, heads, dim, time]`, values `[slots, heads, time, dim]`.

So both products of attention run along memory, for one query as for many. With keys the other way around, XLA's CPU
backend takes three times as long for one query.
"""

BLOCK = 512
"""Positions that are attended to at a time, where there may be more: shorter texts then cost less."""

# Rows are written one by one up to this many, which is in place; beyond, by a scatter, which compiles faster.
_UNROLLED = 16

_INTEGERS = {"int8": 8, "int4": 4, "int2": 2}
_OTHERS = {"fp8": "float8_e4m3fn"}


def format_of(name: str) -> Format:
    """The format of codes by the name that `KVConfig` has for it.

    >>> format_of("int8").bound, format_of("fp8").name
    (127.0, 'float8_e4m3fn')
    """
    if name in _INTEGERS:
        # Largest values keep their size: MaxText's 127.5 lets them saturate.
        return IntFormat(bits=_INTEGERS[name], preserve_max=True, narrow=True)
    return get_format(_OTHERS[name])


FORMATS = (*_INTEGERS, *_OTHERS)
"""The names of the formats in which a cache may keep keys and values."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one tensor is stored; all of it static."""

    time: int
    quantizer: Quantizer | None = None
    dtype: str = "float32"
    """Of the floats that are stored, or of those that codes stand for."""

    @property
    def packed(self) -> int:
        """The axis along which codes of less than eight bits are packed: not time, which is written to."""
        return 5 - self.time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Store:
    """A tensor along time: `codes * scale`, or `(codes - zero) * scale`, or plain floats without a scale."""

    codes: Num[Array, "slots heads a b"]
    scale: Float[Array, "slots _heads _a _b"] | None
    zero: Shaped[Array, "slots _heads _a _b"] | None
    recipe: Recipe = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, recipe: Recipe, slots: int, heads: int, dim: int, length: int) -> "Store":
        """Zeros, for at least as many tokens."""
        length = length if length <= BLOCK else -(-length // BLOCK) * BLOCK
        shape = (slots, heads, dim, length) if recipe.time == KEY_TIME else (slots, heads, length, dim)

        def zeros() -> "Store":
            return jax.tree.map(jnp.zeros_like, cls.encoded(recipe, jnp.zeros(shape, recipe.dtype)))

        return jax.jit(zeros)()

    @classmethod
    def encoded(cls, recipe: Recipe, x: Float[Array, "slots heads a b"]) -> "Store":
        """A tensor as it is stored."""
        if recipe.quantizer is None:
            return cls(x.astype(recipe.dtype), None, None, recipe)
        q = recipe.quantizer.quantize(x.astype(jnp.float32)).pack(recipe.packed)
        zero = None if q.zero_point is None else q.zero_point.astype(jnp.int8)
        return cls(q.qvalue, q.scale, zero, recipe)

    @property
    def tiles(self) -> int:
        """How many tokens share a scale."""
        return 1 if self.scale is None else self.codes.shape[self.recipe.time] // self.scale.shape[self.recipe.time]

    def write(self, new: "Store", rows: Shaped[Array, "batch"] | None, starts: Shaped[Array, "batch"]) -> "Store":
        """Tokens put at their places: those of row i at `starts[i]` in slot `rows[i]`, or in slot i."""

        def put(whole: Array, part: Array) -> Array:
            tile = self.codes.shape[self.recipe.time] // whole.shape[self.recipe.time]
            return _put(whole, part, rows, starts // tile, self.recipe.time)

        return jax.tree.map(put, self, new)

    def of_rows(self, rows: Shaped[Array, "batch"] | None) -> "Store":
        """Some of the slots."""
        if rows is None or (rows.shape[0] == self.codes.shape[0] == 1):
            return self
        if rows.shape[0] == 1:
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, rows[0], 1), self)
        return jax.tree.map(lambda x: x[rows], self)

    @property
    def length(self) -> int:
        """How many positions there are."""
        return self.codes.shape[self.recipe.time]

    def block(self, start: Shaped[Array, ""], size: int) -> "Store":
        """Some positions of all slots."""

        def cut(x: Array) -> Array:
            tile = self.length // x.shape[self.recipe.time]
            return jax.lax.dynamic_slice_in_dim(x, start // tile, size // tile, axis=self.recipe.time)

        return jax.tree.map(cut, self)

    def window(self, starts: Shaped[Array, "slots"], size: int) -> "Store":
        """As many positions of each slot, from a place of its own on."""

        def cut(x: Array) -> Array:
            tile = self.length // x.shape[self.recipe.time]
            places = (starts // tile)[:, None] + jnp.arange(size // tile, dtype=starts.dtype)[None]
            return jnp.take_along_axis(x, _along(places, self.recipe.time), axis=self.recipe.time)

        return jax.tree.map(cut, self)

    def replaced(self, new: "Store", where: Bool[Array, "slots time"]) -> "Store":
        """The positions of another where told; all that share a scale, or none of them."""

        def pick(a: Array, b: Array) -> Array:
            tile = self.length // a.shape[self.recipe.time]
            return jnp.where(_along(where[:, ::tile], self.recipe.time), b, a)

        return jax.tree.map(pick, self, new)

    def decoded(self) -> Float[Array, "slots heads a b"]:
        """The codes as floats, without scale or zero point."""
        if self.recipe.quantizer is None:
            return self.codes.astype(jnp.float32)
        fmt = self.recipe.quantizer.qtype
        if fmt.bits == 8:
            return fmt.decode(self.codes).astype(jnp.float32)
        size = self.codes.shape[self.recipe.packed] * 8 // fmt.bits
        one = jnp.ones((1,) * 4, jnp.float32)
        q = QArray(self.codes, one, qtype=fmt, packed=(self.recipe.packed - 4, size))
        return fmt.decode(q.unpack().qvalue).astype(jnp.float32)

    def read(self) -> Float[Array, "slots heads a b"]:
        """The values in float32."""
        x = self.decoded()
        spread: Callable[[Array], Array] = lambda part: _spread(part, self.tiles, self.recipe.time)  # noqa: E731
        if self.zero is not None:
            x = x - jnp.broadcast_to(spread(self.zero.astype(jnp.float32)), x.shape)
        return x if self.scale is None else x * jnp.broadcast_to(spread(self.scale), x.shape)

    def folded(self) -> tuple[Float[Array, "slots heads a b"], Float[Array, "slots _heads 1 time"] | None]:
        """Floats, and what their products are to be multiplied by along time: a scale, or None if it is in already."""
        channels = self.recipe.packed
        if self.scale is None or self.zero is not None or self.scale.shape[channels] > 1 or self.tiles > 1:
            return self.read(), None
        return self.decoded(), self.scale.reshape(*self.scale.shape[:2], 1, -1)


def _along(x: Array, time: int) -> Array:
    """`[slots, time]`, laid out beside a tensor."""
    return x.reshape(x.shape[0], 1, 1, -1) if time == KEY_TIME else x.reshape(x.shape[0], 1, -1, 1)


def _spread(part: Array, tile: int, axis: int) -> Array:
    return part if tile == 1 else jnp.repeat(part, tile, axis=axis)


def _put(whole: Array, part: Array, rows: Any, starts: Array, time: int) -> Array:
    count = part.shape[0]
    zero = jnp.zeros((), starts.dtype)

    def place(row: Any, start: Array) -> list[Array]:
        return [jnp.asarray(row, starts.dtype), zero, zero, start] if time == KEY_TIME else [row, zero, start, zero]

    if count <= _UNROLLED:
        for i in range(count):
            row = jnp.asarray(i, starts.dtype) if rows is None else rows[i].astype(starts.dtype)
            whole = jax.lax.dynamic_update_slice(whole, part[i : i + 1], place(row, starts[i]))
        return whole
    index = jnp.arange(count, dtype=starts.dtype) if rows is None else rows.astype(starts.dtype)
    steps = starts[:, None] + jnp.arange(part.shape[time], dtype=starts.dtype)[None]
    # An array beside a slice: the indexed axes come first, so time stands before heads in what is written.
    if time == KEY_TIME:
        return whole.at[index[:, None], :, :, steps].set(part.transpose(0, 3, 1, 2))
    return whole.at[index[:, None], :, steps].set(part.transpose(0, 2, 1, 3))
