"""How a weight is quantized, for the configuration of a file."""

import dataclasses

from octavo.numerics import Format, get_format
from octavo.qarray import QArray


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The format of a weight [out, in], the rows and columns that share a scale, and whether it has zero points.

    A tile as long as the axis is -1, so that weights of different shapes may have the same scheme.

    >>> import jax.numpy as jnp, octavo
    >>> Scheme.of(octavo.quantize(jnp.ones((8, 64)), "int4", channelwise_axes=(0,), tiled_axes={1: 32}))
    Scheme(format='int4', tile=(1, 32), zero_point=False)
    """

    format: str
    tile: tuple[int, int]
    zero_point: bool

    @classmethod
    def of(cls, q: QArray) -> "Scheme":
        """The scheme of a quantized weight."""
        rows, columns = q.tile_shape[-2:]
        tile = (-1 if q.scale.shape[-2] == 1 else rows, -1 if q.scale.shape[-1] == 1 else columns)
        return cls(q.qtype.name, tile, q.zero_point is not None)

    @property
    def qtype(self) -> Format:
        return get_format(self.format)
