"""The scheme of a quantized weight, and validated access to a `quantization_config`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.files.errors import FileError
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


def choice(config: Mapping[str, Any], key: str, values: Mapping[Any, Any], default: Any = None) -> Any:
    """Look up a value that must be one of several."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | str) or value not in values:
        known = ", ".join(map(repr, values))
        raise FileError(f"quantization_config has {key} {value!r}; Octavo reads {known}")
    return values[value]


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A number of values, at least one, or -1 for all."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not (value == -1 or 1 <= value < 2**31):
        raise FileError(f"quantization_config has {key} {value!r}; it is a positive number of values, or -1 for all")
    return value


def strings(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of strings, empty if missing."""
    value = config.get(key)
    value = [] if value is None else value
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise FileError(f"quantization_config has {key} {value!r}; it is a list of names")
    return tuple(value)


def module_of(weight: str) -> str:
    """The module that has a weight."""
    return weight.removesuffix(".weight")


def one_scheme(method: str, schemes: Mapping[str, Scheme | None]) -> tuple[Scheme, list[str]]:
    """The common scheme of all quantized weights, and the modules in float."""
    plain = [module_of(name) for name, scheme in schemes.items() if scheme is None]
    found = {scheme: name for name, scheme in schemes.items() if scheme is not None}
    if not found:
        raise FileError(f"{method}: none of {len(schemes)} weights is quantized; write a float model without a layout")
    if len(found) > 1:
        (one, a), (other, b) = list(found.items())[:2]
        both = f"{a!r} is {one} and {b!r} {other}"
        raise FileError(f"{method} has one scheme for all weights but {both}; write compressed-tensors")
    return next(iter(found)), plain
