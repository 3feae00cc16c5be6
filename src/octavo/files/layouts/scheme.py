"""How a weight is quantized, for the configuration of a file."""

import dataclasses

from octavo.numerics import Format, get_format
from octavo.qarray import QArray


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The format of a weight [out, in], the rows and columns that share a scale, and the dtype of the scales.

    A tile as long as the axis is -1, so that weights of different shapes may have the same scheme.

    >>> import jax.numpy as jnp, octavo
    >>> Scheme.of(octavo.quantize(jnp.ones((8, 64)), "int4", channelwise_axes=(0,), tiled_axes={1: 32}))
    Scheme(format='int4', tile=(1, 32), zero_point=False, scale_dtype='float32')
    """

    format: str
    tile: tuple[int, int]
    zero_point: bool
    scale_dtype: str

    @classmethod
    def of(cls, q: QArray) -> "Scheme":
        """The scheme of a quantized weight."""
        rows, columns = q.tile_shape[-2:]
        tile = (-1 if q.scale.shape[-2] == 1 else rows, -1 if q.scale.shape[-1] == 1 else columns)
        return cls(q.qtype.name, tile, q.zero_point is not None, str(q.scale.dtype))

    @property
    def qtype(self) -> Format:
        return get_format(self.format)

    def counts(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The number of scales of a weight of a shape, along its rows and columns."""
        rows, columns = shape[-2:]
        a, b = self.tile
        return 1 if a < 0 else -(-rows // a), 1 if b < 0 else -(-columns // b)
