"""Rotary frequencies, and how they are scaled for contexts longer than those of pretraining.

Su et al., RoFormer, arXiv:2104.09864; Peng et al., YaRN, arXiv:2309.00071; Ding et al., LongRoPE, arXiv:2402.13753.
"""

import dataclasses
import math

import numpy as np

from octavo._config import Config, check_choices

KINDS = ("linear", "llama3", "dynamic", "yarn", "longrope", "proportional")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RopeScaling(Config):
    """Scaling of rotary frequencies; f is a frequency, and f * length / 2 pi its rotations in the original length.

    - linear: f / factor.
    - llama3: f with more than `high` rotations, f / factor with fewer than `low`, interpolated in between.
    - dynamic: f of a larger base, by how much longer the text is than the original length.
    - yarn: f with more than `high` rotations, f / factor with fewer than `low`; in between by the number of the pair.
    - longrope: f divided by a table: `short`, or `long` for texts longer than the original length.

    - proportional: f / factor for the first `part` of the pairs, 0 for the others, which are not rotated.

    The length of a text is that of the call, or `max_length` of a cache, so results do not depend on how a text is
    split into calls.

    >>> RopeScaling(kind="linear", factor=4.0).multipliers(10_000.0, 4, 16).tolist()
    [0.25, 0.25]
    """

    kind: str
    factor: float = 1.0
    length: int = 0
    """The original length."""
    low: float = 1.0
    high: float = 4.0
    magnitude: float = 1.0
    """Multiplies the cosines and sines."""
    truncate: bool = True
    """Whether yarn rounds the pairs between which it interpolates to integers."""
    part: float = 1.0
    """Of proportional."""
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    """Of longrope; empty for none, so that all texts use `short`."""

    def __post_init__(self):
        check_choices(self, kind=KINDS)
        for name in ("factor", "low", "high", "magnitude", "part"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} of rope_scaling is positive, got {getattr(self, name)}")
        if self.kind in ("llama3", "yarn") and not self.low < self.high:
            raise ValueError(
                f"rope_scaling has its low frequency factor below the high one, got {self.low} and {self.high}"
            )
        if self.kind in ("llama3", "dynamic", "yarn") and self.length < 1:
            raise ValueError(f"rope_scaling {self.kind} needs the original length, got {self.length}")
        if (self.kind == "longrope") != bool(self.short) or not all(0 < x < math.inf for x in self.short + self.long):
            raise ValueError("rope_scaling has a table of positive numbers, short, if and only if it is longrope")
        if self.long and (self.length < 1 or len(self.long) != len(self.short)):
            raise ValueError("the tables short and long of rope_scaling have one length, and need the original length")

    def multipliers(self, theta: float, dim: int, length: int) -> np.ndarray:
        """What the frequencies `theta**(-2 i / dim)` are multiplied by, for a text of `length` tokens."""
        half = dim // 2
        numbers = np.arange(half)
        match self.kind:
            case "linear":
                return np.full(half, 1 / self.factor, np.float32)
            case "proportional":
                return np.where(numbers < int(self.part * dim / 2), 1 / self.factor, 0.0).astype(np.float32)
            case "dynamic":
                grown = self.factor * max(length, self.length) / self.length - (self.factor - 1)
                return (grown ** (-2 * numbers / (dim - 2))).astype(np.float32)
            case "longrope":
                table = self.long if self.long and length > self.length else self.short
                if len(table) != half:
                    raise ValueError(f"a table of rope_scaling has {len(table)} numbers, but {half} pairs are rotated")
                return (1 / np.asarray(table)).astype(np.float32)
            case "llama3":
                rotations = theta ** (-numbers / half) * (self.length / (2 * math.pi))
                kept = np.clip((rotations - self.low) / (self.high - self.low), 0, 1)
            case _:
                first, last = (self._pair(rotations, theta, dim) for rotations in (self.high, self.low))
                if self.truncate:
                    first, last = math.floor(first), math.ceil(last)
                first, last = max(first, 0), min(last, dim - 1)
                kept = 1 - np.clip((numbers - first) / max(last - first, 1e-3), 0, 1)
        return (kept + (1 - kept) / self.factor).astype(np.float32)

    def _pair(self, rotations: float, theta: float, dim: int) -> float:
        """The number of the pair that has so many rotations in the original length."""
        return dim * math.log(self.length / (rotations * 2 * math.pi)) / (2 * math.log(theta))
