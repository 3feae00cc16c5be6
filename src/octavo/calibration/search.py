"""Calibrations that try several clips and keep the one with the least error."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from octavo.calibration.method import Calibration, with_headroom


class _ClipSearch(Calibration):
    """The fraction of the largest magnitude that loses least when the group is quantized with it."""

    finite = True
    headroom: ClassVar[float] = 1.0
    """The factor by which scales may exceed those of the largest magnitudes, in formats with two levels of scales."""

    @property
    def clip_candidates(self) -> tuple[float, ...]:
        raise NotImplementedError

    def measure(self, x, *, axes, mask=None, round_trip=None):
        if round_trip is None:
            raise ValueError(f"{type(self).__name__} searches by quantizing: measure through a Quantizer")
        absmax = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
        # Errors are taken relative to the group's magnitude, so that no square overflows or vanishes.
        unit = jnp.where((absmax > 0) & jnp.isfinite(absmax), absmax, 1)
        shared = with_headroom(absmax, self.headroom)

        def error(clip):
            off = (round_trip({"absmax": absmax * clip, **shared}) - x) / unit
            return jnp.sum(jnp.square(off), axis=axes, keepdims=True)

        def step(best, clip):
            least, chosen = best
            now = error(clip)
            return (jnp.minimum(least, now), jnp.where(now < least, clip, chosen)), None

        first, *others = (np.float32(c) for c in self.clip_candidates)
        start = (error(first.astype(x.dtype)), jnp.full_like(absmax, first))
        (_, chosen), _ = jax.lax.scan(step, start, jnp.asarray(others, x.dtype))
        return {"absmax": absmax * chosen, **shared}


@dataclasses.dataclass(frozen=True, repr=False)
class Mse(_ClipSearch):
    """The clip with the least squared error among `points` from `lowest` to 1: `mse[,points[,lowest]]`."""

    points: int = 41
    lowest: float = 0.2

    def __post_init__(self):
        if self.points < 2 or not 0 < self.lowest < 1:
            raise ValueError(
                f"an MSE search has at least 2 points and a lowest clip in (0, 1); got {self.points}, {self.lowest}"
            )

    @property
    def clip_candidates(self) -> tuple[float, ...]:
        return tuple(float(c) for c in np.linspace(1, self.lowest, self.points))


@dataclasses.dataclass(frozen=True, repr=False)
class Lsq(Mse):
    """A scale that is trained with the weights, from that of `mse` on: `lsq[,points[,lowest]]`, for weights in rules.

    Esser et al., Learned Step Size Quantization, arXiv:1902.08153.
    """

    learned = True  # pyrefly: ignore


@dataclasses.dataclass(frozen=True, repr=False)
class Snr(_ClipSearch):
    """The clip among `clips` with the highest signal-to-noise ratio, AQT's SnrBasedAutoCalibration: `snr[,c1,c2,…]`.

    No clip (1.0) is always among the candidates.
    """

    clips: tuple[float, ...] = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)

    def __post_init__(self):
        object.__setattr__(self, "clips", tuple(float(c) for c in self.clips))
        if not self.clips or not all(np.isfinite(c) and c > 0 for c in self.clips):
            raise ValueError(f"an SNR search takes one or more positive clips, got {self.clips}")

    @property
    def clip_candidates(self) -> tuple[float, ...]:
        return (1.0, *self.clips)


@dataclasses.dataclass(frozen=True, repr=False)
class FourOverSix(_ClipSearch):
    """For nvfp4: the largest magnitude of a block at e2m1's 6 or at its 4, by the squared error: `four_over_six`.

    e2m1 has nothing between 4 and 6, so values near 5/6 of the largest lose most. With the largest at 4, they are
    rounded in steps of 1/4 of it. Scales are at most 256 instead of 448, so that 1.5 times a scale is still one.

    Cook et al., Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling, arXiv:2512.02010.
    """

    headroom = 448 / 256
    may_clip = False  # pyrefly: ignore
    clip_candidates = (1.0, 1.5)  # pyrefly: ignore
