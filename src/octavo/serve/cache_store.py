"""The precision of keys and values in a cache, and the storage of those of one layer: floats, or codes and scales."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from octavo import kernels
from octavo._config import Config, check_choices, check_least
from octavo._typing import Array, Bool, Float, Num, Shaped
from octavo.models.config import DTYPES
from octavo.numerics import Format, IntFormat, get_format, unpack_bits
from octavo.qarray import Quantizer

KEY_TIME, VALUE_TIME = 3, 2
"""The time axis: keys are `[slots, heads, dim, time]`, values `[slots, heads, time, dim]`.

So both matmuls of attention read memory contiguously. With transposed keys, XLA's CPU backend takes three times as
long for one query.
"""

BLOCK = 512
"""Positions per block of attention in long caches: shorter texts then cost less."""

# Up to this many rows are written one by one, in place; more by a scatter, which compiles faster.
_UNROLLED = 16

_INTEGERS = {"int8": 8, "int4": 4, "int2": 2}
_OTHERS = {"fp8": "float8_e4m3fn"}


def get_cache_format(name: str) -> Format:
    """The number format of a name in `KVConfig`.

    >>> get_cache_format("int8").bound, get_cache_format("fp8").name
    (127.0, 'float8_e4m3fn')
    """
    if name in _INTEGERS:
        # The maximum is represented exactly: with MaxText's 127.5 it saturates.
        return IntFormat(bits=_INTEGERS[name], preserve_max=True, narrow=True)
    return get_format(_OTHERS[name])


FORMATS = (*_INTEGERS, *_OTHERS)
"""The names of the formats of keys and values."""


_AXES = ("dkv", "heads_and_dkv", "kivi")
"""What shares a scale, by the names of `KVConfig.axis`."""


@dataclasses.dataclass(frozen=True, repr=False)
class KVConfig(Config):
    """The precision of keys and values in a cache.

    `axis` says what shares a scale: "dkv", the values of one head at one position; "heads_and_dkv", those of all heads
    at one position (MaxText's names); "kivi", keys by channel over `group` positions and values by position, with at
    least the last `window` positions in float (arXiv:2402.02750).

    >>> KVConfig.of("int8")
    KVConfig(keys='int8', values='int8')
    """

    keys: str | None = None
    """None for float, or "int8", "int4", "int2", "fp8"."""
    values: str | None = None
    axis: str = "dkv"
    group: int = 32
    """Positions whose keys share a scale in each channel, by "kivi"."""
    window: int = 128
    """The most recent positions that "kivi" keeps in float."""
    dtype: str = "float32"
    """The dtype of keys and values that are not quantized."""
    latent: bool = False
    """Whether models with latent attention store the latent of keys and values, once for all heads. Much smaller; each
    query is multiplied by the projection of keys instead, so that logits differ by rounding."""

    @classmethod
    def of(cls, name: str | None, **fields: Any) -> "KVConfig":
        """Keys and values in the same format."""
        return cls(keys=name, values=name, **fields)

    def __post_init__(self):
        quantized = {name: FORMATS for name in ("keys", "values") if getattr(self, name) is not None}
        check_choices(self, **quantized, axis=_AXES, dtype=DTYPES)
        check_least(self, 1, "group")
        check_least(self, 0, "window")
        if self.axis == "kivi" and self.keys is None and self.values is None:
            raise ValueError("axis='kivi' keeps old positions in low precision: give keys, values or both a format")
        if self.latent and (self.axis == "kivi" or self.keys != self.values):
            raise ValueError("latent=True stores one tensor for keys and values: give both one format, not axis='kivi'")
        if self.axis == "kivi" and "fp8" in (self.keys, self.values):
            raise ValueError("axis='kivi' stores a minimum and a maximum of integers: use int8, int4 or int2, not fp8")


FLOAT = KVConfig()
"""Keys and values in float32."""


@dataclasses.dataclass(frozen=True)
class StorageSpec:
    """How one tensor is stored; static."""

    time: int
    quantizer: Quantizer | None = None
    dtype: str = "float32"
    """The dtype of stored floats, or of the quantized values."""

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
    spec: StorageSpec = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, spec: StorageSpec, slots: int, heads: int, dim: int, length: int) -> "Store":
        """Zeros, for at least as many tokens."""
        length = length if length <= BLOCK else -(-length // BLOCK) * BLOCK
        shape = (slots, heads, dim, length) if spec.time == KEY_TIME else (slots, heads, length, dim)

        def parts() -> tuple[Array, Array | None, Array | None]:
            made = cls.encode(spec, jnp.zeros(shape, spec.dtype))
            return made.codes, made.scale, made.zero

        codes, scale, zero = jax.tree.map(lambda x: kernels.zeros(x.shape, x.dtype), jax.eval_shape(parts))
        return cls(codes, scale, zero, spec)

    @classmethod
    def encode(cls, spec: StorageSpec, x: Float[Array, "slots heads a b"]) -> "Store":
        """A tensor in its stored form."""
        if spec.quantizer is None:
            return cls(x.astype(spec.dtype), None, None, spec)
        q = spec.quantizer.quantize(x.astype(jnp.float32)).pack(spec.packed)
        zero = None if q.zero_point is None else q.zero_point.astype(jnp.int8)
        return cls(q.qvalue, q.scale, zero, spec)

    def encode_like(self, x: Float[Array, "batch length heads dim"]) -> "Store":
        """Keys or values of new tokens, stored as these are."""
        return self.encode(self.spec, x.transpose((0, 2, 3, 1) if self.spec.time == KEY_TIME else (0, 2, 1, 3)))

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.codes.shape[self.spec.time]

    @property
    def dim(self) -> int:
        """The number of channels."""
        bits = 8 if self.spec.quantizer is None else min(self.spec.quantizer.qtype.bits, 8)
        return self.codes.shape[self.spec.packed] * 8 // bits

    @property
    def tiles(self) -> int:
        """The number of tokens that share a scale."""
        return 1 if self.scale is None else self._tile(self.scale)

    def _tile(self, x: Array) -> int:
        """The number of tokens for each entry of one of the arrays along time."""
        return self.length // x.shape[self.spec.time]

    def write(self, new: "Store", rows: Shaped[Array, "batch"] | None, starts: Shaped[Array, "batch"]) -> "Store":
        """Write the tokens of row i at `starts[i]` in slot `rows[i]`, or in slot i."""

        def put(store: Array, new: Array) -> Array:
            return _write_rows(store, new, rows, starts // self._tile(store), self.spec.time)

        return jax.tree.map(put, self, new)

    def select_slots(self, rows: Shaped[Array, "batch"] | None) -> "Store":
        """The stores of some slots."""
        if rows is None or (rows.shape[0] == self.codes.shape[0] == 1):
            return self
        if rows.shape[0] == 1:
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, rows[0], 1), self)
        return jax.tree.map(lambda x: x[rows], self)

    def block(self, start: Shaped[Array, ""], size: int, slot: Shaped[Array, ""] | None = None) -> "Store":
        """Consecutive positions, the same in all slots, or of one."""

        def read(x: Array) -> Array:
            starts, sizes = [jnp.zeros((), start.dtype)] * x.ndim, list(x.shape)
            tile = self._tile(x)
            starts[self.spec.time], sizes[self.spec.time] = start // tile, size // tile
            if slot is not None:
                starts[0], sizes[0] = slot.astype(start.dtype), 1
            return jax.lax.dynamic_slice(x, starts, sizes)

        return jax.tree.map(read, self)

    def window(self, starts: Shaped[Array, "slots"], size: int) -> "Store":
        """`size` positions of each slot, from its own start."""

        def read(x: Array) -> Array:
            tile = self._tile(x)
            indices = (starts // tile)[:, None] + jnp.arange(size // tile, dtype=starts.dtype)[None]
            return jnp.take_along_axis(x, _align_to_time(indices, self.spec.time), axis=self.spec.time)

        return jax.tree.map(read, self)

    def where(self, new: "Store", mask: Bool[Array, "slots time"]) -> "Store":
        """The positions of `new` where the mask is true, which is constant over positions that share a scale."""

        def pick(a: Array, b: Array) -> Array:
            return jnp.where(_align_to_time(mask[:, :: self._tile(a)], self.spec.time), b, a)

        return jax.tree.map(pick, self, new)

    def decode_codes(self) -> Float[Array, "slots heads a b"]:
        """The codes as floats, without scale or zero point."""
        if self.spec.quantizer is None:
            return self.codes.astype(jnp.float32)
        fmt, codes, axis = self.spec.quantizer.qtype, self.codes, self.spec.packed
        if fmt.bits < 8:
            codes = fmt.from_bits(unpack_bits(codes, fmt.bits, codes.shape[axis] * 8 // fmt.bits, axis=axis))
        return fmt.decode(codes).astype(jnp.float32)

    def read(self) -> Float[Array, "slots heads a b"]:
        """The values in float32."""
        x = self.decode_codes()

        def by_value(part: Array) -> Array:
            part = part if self.tiles == 1 else jnp.repeat(part, self.tiles, axis=self.spec.time)
            return jnp.broadcast_to(part, x.shape)

        if self.zero is not None:
            x = x - by_value(self.zero.astype(jnp.float32))
        return x if self.scale is None else x * by_value(self.scale)

    def unscaled(self) -> tuple[Float[Array, "slots heads a b"], Float[Array, "slots _heads 1 time"] | None]:
        """Floats, and the scale along time that remains to be applied to their matmul; None if it is applied."""
        channels = self.spec.packed
        if self.scale is None or self.zero is not None or self.scale.shape[channels] > 1 or self.tiles > 1:
            return self.read(), None
        return self.decode_codes(), self.scale.reshape(*self.scale.shape[:2], 1, -1)


def _align_to_time(x: Array, time: int) -> Array:
    """`[slots, time]` with axes of size one, so that it broadcasts with a tensor."""
    return x.reshape(x.shape[0], 1, 1, -1) if time == KEY_TIME else x.reshape(x.shape[0], 1, -1, 1)


def _write_rows(store: Array, new: Array, rows: Any, starts: Array, time: int) -> Array:
    count = new.shape[0]
    if count <= _UNROLLED:
        for i in range(count):
            index = [jnp.zeros((), starts.dtype)] * 4
            index[0] = jnp.asarray(i if rows is None else rows[i], starts.dtype)
            index[time] = starts[i]
            store = jax.lax.dynamic_update_slice(store, new[i : i + 1], index)
        return store
    index = jnp.arange(count, dtype=starts.dtype) if rows is None else rows.astype(starts.dtype)
    steps = starts[:, None] + jnp.arange(new.shape[time], dtype=starts.dtype)[None]
    # Advanced indices separated by a slice come first in the result: time is before heads.
    if time == KEY_TIME:
        return store.at[index[:, None], :, :, steps].set(new.transpose(0, 3, 1, 2))
    return store.at[index[:, None], :, steps].set(new.transpose(0, 2, 1, 3))
