"""Values that are scaled and clipped as for a number format, but not rounded to it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array, Float, Shaped, UInt8
from octavo.numerics.format import Format
from octavo.numerics.integers import IntFormat


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class UnroundedFormat(Format):
    """The range of another format without its rounding: float32 codes, clipped at the edge of its last bucket.

    With it, the error of a quantized matmul is that of its scales and clipping alone.

    >>> UnroundedFormat(base=IntFormat(bits=8)).round(jnp.asarray([0.3, 200.0])).tolist()
    [0.30000001192092896, 127.5]
    """

    base: Format
    name: str = ""

    def __post_init__(self):
        base = self.base
        edge = base.largest + 0.5 * base.unit if isinstance(base, IntFormat) else base.largest
        storage = jnp.dtype(jnp.float32)
        self._derive(name=self.name or f"{base.name}_unrounded", bits=32, storage=storage, signed=base.signed)
        self._derive(bound=base.bound, largest=edge, smallest=-edge if base.signed else 0.0)

    @functools.cached_property
    def carrier(self) -> np.dtype:
        return np.dtype(np.float32)

    def encode(self, x: Float[Array, "*s"], noise: Float[Array, "*n"] | None = None) -> Shaped[Array, "*s"]:
        return jax.lax.clamp(jnp.float32(self.smallest), x, jnp.float32(self.largest))

    def decode(self, codes: Shaped[Array, "*s"]) -> Float[Array, "*s"]:
        return codes

    def to_bits(self, codes: Shaped[Array, "*s"]) -> UInt8[Array, "*s"]:
        raise TypeError(f"{self.name} has codes in float32, which are not packed")

    def from_bits(self, bits: UInt8[Array, "*s"]) -> Shaped[Array, "*s"]:
        raise TypeError(f"{self.name} has codes in float32, which are not packed")

    def grid(self) -> np.ndarray:
        raise TypeError(f"{self.name} has no table of values: it is every float32 up to {self.largest:g}")
