"""The configuration of a key and value cache."""

import dataclasses
from typing import Any

from octavo._config import Config, check_choices, check_least
from octavo.models.config import DTYPES
from octavo.serve.cache_store import FORMATS

AXES = ("dkv", "heads_and_dkv", "kivi")
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

    @classmethod
    def of(cls, name: str | None, **fields: Any) -> "KVConfig":
        """Keys and values in the same format."""
        return cls(keys=name, values=name, **fields)

    def __post_init__(self):
        quantized = {name: FORMATS for name in ("keys", "values") if getattr(self, name) is not None}
        check_choices(self, **quantized, axis=AXES, dtype=DTYPES)
        check_least(self, 1, "group")
        check_least(self, 0, "window")
        if self.axis == "kivi" and self.keys is None and self.values is None:
            raise ValueError("axis='kivi' keeps old positions in low precision: give keys, values or both a format")
        if self.axis == "kivi" and "fp8" in (self.keys, self.values):
            raise ValueError("axis='kivi' stores a minimum and a maximum of integers: use int8, int4 or int2, not fp8")


FLOAT = KVConfig()
"""Keys and values in float32."""
