"""The interface of a calibration, and the calibrations that measure a tensor directly.

A calibration measures the range of a tensor, group by group, as a dict of `Bounds`: `{"absmax": a}` for a range that
is symmetric about zero, `{"min": lo, "max": hi}` for one that is not. It knows nothing of scales or codes. For formats
with two levels of scales there may also be a `"largest"`, from which the scale of the tensor is computed.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from octavo import _sharding
from octavo._config import Config
from octavo._typing import Array, Bool, Float

type Bounds = dict[str, Array]
type RoundTrip = Callable[[Bounds], Array]
"""Quantizes and dequantizes the measured tensor with given bounds, for calibrations that search."""


class Calibration(Config, abc.ABC):
    """A calibration measures the range of a tensor, for each group of values that share a scale.

    Subclass it as a frozen dataclass with a method `measure`, and make it known by `register_calibration`.

    Attributes:
      asymmetric: Whether `measure` returns a minimum and a maximum instead of an absmax.
      finite: Whether the bounds may be finite although the tensor is not; the caller then checks the tensor itself.

    >>> import octavo
    >>> octavo.Quantizer("int8", calibration="absmax,0.5").measure(jnp.asarray([1.0, -4.0]))["absmax"].tolist()
    [2.0]
    """

    asymmetric: bool = False
    finite: bool = False
    learned: ClassVar[bool] = False
    """Whether the range is that of a scale which is trained, and `measure` gives its initial value."""
    _positive: ClassVar[tuple[str, ...]] = ()
    """Fields that must be positive numbers."""

    @abc.abstractmethod
    def measure(
        self,
        x: Float[Array, "..."],
        *,
        axes: tuple[int, ...],
        mask: Bool[Array, "..."] | None = None,
        round_trip: RoundTrip | None = None,
    ) -> Bounds:
        """Measure the bounds of `x`.

        Args:
          x: The values, padded with zeros to whole tiles.
          axes: The axes to reduce over; they are kept with size one.
          mask: False where `x` is padding; None if nothing is.
          round_trip: Quantizes and dequantizes `x` with given bounds, for calibrations that search.

        Returns:
          `{"absmax": a}`, or `{"min": low, "max": high}` if the calibration is asymmetric.
        """

    @property
    def may_clip(self) -> bool:
        """Whether values may lie outside the measured range."""
        return self.finite

    def __post_init__(self):
        for name in self._positive:
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"{type(self).__name__}'s {name} is a positive number, got {value}")


@dataclasses.dataclass(frozen=True, repr=False)
class AbsMax(Calibration):
    """The largest magnitude, times `factor`: `absmax` or `absmax,k`.

    In formats with two levels of scales, such as nvfp4, `headroom` times the tensor's largest magnitude is mapped to
    the largest scale of a block, so that scales may become larger by this factor: `absmax,k,h`.
    """

    _positive = ("factor", "headroom")
    factor: float = 1.0
    headroom: float = 1.0

    @property
    def may_clip(self) -> bool:
        return self.factor < 1

    def measure(self, x, *, axes, mask=None, round_trip=None):
        # Primitives: jnp's functions take longer to trace, and this is traced for every operand of a program.
        absmax = jax.lax.expand_dims(jax.lax.reduce_max(jax.lax.abs(x), axes), axes)
        absmax = absmax if self.factor == 1 else absmax * self.factor
        bounds = {"absmax": absmax}
        return bounds if self.headroom == 1 else bounds | with_headroom(absmax, self.headroom)


def with_headroom(absmax: Float[Array, "..."], headroom: float) -> Bounds:
    """The bound for the scale of a whole tensor, if it differs from the largest of its groups' bounds."""
    if headroom == 1:
        return {}
    return {"largest": headroom * jnp.max(jnp.where(jnp.isfinite(absmax), absmax, 0), keepdims=True, initial=0)}


@dataclasses.dataclass(frozen=True, repr=False)
class MinMax(Calibration):
    """The smallest and the largest value, zero always among them, times `factor`: `minmax` or `minmax,k`."""

    _positive = ("factor",)
    factor: float = 1.0
    asymmetric = True

    @property
    def may_clip(self) -> bool:
        return self.factor < 1

    def measure(self, x, *, axes, mask=None, round_trip=None):
        low = jnp.minimum(jnp.min(x, axis=axes, keepdims=True), 0)
        high = jnp.maximum(jnp.max(x, axis=axes, keepdims=True), 0)
        return {"min": low, "max": high} if self.factor == 1 else {"min": low * self.factor, "max": high * self.factor}


@dataclasses.dataclass(frozen=True, repr=False)
class Rms(Calibration):
    """`factor` times the root of the mean square: `rms,k`."""

    _positive = ("factor",)
    factor: float
    may_clip = True  # pyrefly: ignore

    def measure(self, x, *, axes, mask=None, round_trip=None):
        unit = _unit(x, axes)
        mean = _mean(jnp.square(x / unit), axes, mask)
        return {"absmax": jnp.sqrt(mean) * unit * self.factor}


@dataclasses.dataclass(frozen=True, repr=False)
class AbsMean(Calibration):
    """`factor` times the power mean of the magnitudes that are not zero: `absmean[,k[,p]]`, AQT's AbsMeanCalibration.

    With `ternary` and p=1 it is BitNet b1.58's weight quantization, with `binary` BitNet's.
    """

    _positive = ("factor", "p")
    factor: float = 1.0
    p: float = 1.0
    may_clip = True  # pyrefly: ignore

    def measure(self, x, *, axes, mask=None, round_trip=None):
        unit = _unit(x, axes)
        total = jnp.sum(jnp.abs(x / unit) ** self.p, axis=axes, keepdims=True)
        count = jnp.sum(x != 0, axis=axes, keepdims=True).astype(x.dtype)
        mean = (total / jnp.maximum(count, 1)) ** (1 / self.p)
        return {"absmax": mean * unit * self.factor}


@dataclasses.dataclass(frozen=True, repr=False)
class Weighted(Calibration):
    """A weighted sum of the mean magnitude, a power mean and the maximum: `weighted,l1,lp,max[,constant[,p]]`.

    AQT's WeightedStatsCalibration; zeros are left out of both means. Over several steps it is averaged by a tracker:
    AQT's moving average is `Ema(decay=0.99)`, here corrected for its start.
    """

    l1: float = 0.0
    lp: float = 0.0
    absmax: float = 0.0
    constant: float = 0.0
    p: float = 2.0
    may_clip = True  # pyrefly: ignore

    def __post_init__(self):
        weights = (self.l1, self.lp, self.absmax, self.constant)
        if not (np.isfinite(weights).all() and min(weights) >= 0 < max(weights) and self.p > 0):
            raise ValueError(f"weights are not negative and not all zero, and p is above 0; got {weights}, p={self.p}")

    def measure(self, x, *, axes, mask=None, round_trip=None):
        parts = ((self.l1, AbsMean()), (self.lp, AbsMean(p=self.p)), (self.absmax, AbsMax()))
        used = [weight * method.measure(x, axes=axes)["absmax"] for weight, method in parts if weight]
        return (
            {"absmax": sum(used[1:], used[0]) + self.constant}
            if used
            else Constant(self.constant).measure(x, axes=axes)
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Fixed(Calibration):
    """A range that is given: `fixed,a` for [-a, a], or `fixed,lo,hi`. One range for the whole tensor."""

    low: float
    high: float | None = None
    finite = True

    def __post_init__(self):
        low, high = (-abs(self.low), abs(self.low)) if self.high is None else (self.low, self.high)
        if not (np.isfinite([low, high]).all() and low <= 0 <= high and low < high):
            raise ValueError(f"a fixed range holds zero and is not empty, as in 'fixed,-1,6'; got [{low}, {high}]")
        object.__setattr__(self, "low", float(low))
        object.__setattr__(self, "high", float(high))

    @property
    def asymmetric(self) -> bool:  # pyrefly: ignore
        return self.low != -self._high

    @property
    def _high(self) -> float:
        assert self.high is not None
        return self.high

    def measure(self, x, *, axes, mask=None, round_trip=None):
        shape = (1,) * x.ndim
        high = jnp.full(shape, self._high, x.dtype)
        return {"min": jnp.full(shape, self.low, x.dtype), "max": high} if self.asymmetric else {"absmax": high}


@dataclasses.dataclass(frozen=True, repr=False)
class Constant(Calibration):
    """AQT's ConstantCalibration: a bound `b` for every group, the tensor shifted by `bias`: `constant,b[,bias]`."""

    _positive = ("bound",)
    bound: float = 1.0
    bias: float = 0.0
    finite = True

    def __post_init__(self):
        super().__post_init__()
        if not abs(self.bias) <= self.bound:
            raise ValueError(
                f"the range [-bound, bound] - bias must hold zero; got bound {self.bound}, bias {self.bias}"
            )

    @property
    def asymmetric(self) -> bool:  # pyrefly: ignore
        return self.bias != 0

    def measure(self, x, *, axes, mask=None, round_trip=None):
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
        if not self.asymmetric:
            return {"absmax": jnp.full(shape, self.bound, x.dtype)}
        return {
            "min": jnp.full(shape, -self.bound - self.bias, x.dtype),
            "max": jnp.full(shape, self.bound - self.bias, x.dtype),
        }


@dataclasses.dataclass(frozen=True, repr=False)
class Percentile(Calibration):
    """The magnitude below which `percent` of the values lie, interpolated: `percentile,99.9`."""

    percent: float
    finite = True

    def __post_init__(self):
        if not 0 < self.percent <= 100:
            raise ValueError(f"a percentile is above 0 and at most 100, got {self.percent}")

    def measure(self, x, *, axes, mask=None, round_trip=None):
        magnitude = _sharding.replicate_axes(jnp.abs(x))
        if mask is None:
            return {"absmax": jnp.percentile(magnitude, self.percent, axis=axes, keepdims=True).astype(x.dtype)}
        magnitude = jnp.where(mask, magnitude, jnp.nan)
        return {"absmax": jnp.nanpercentile(magnitude, self.percent, axis=axes, keepdims=True).astype(x.dtype)}


def _unit(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    """A power of two near each group's magnitude, by which powers and sums cannot overflow or vanish.

    Dividing by it is exact, so a mean comes out with the same bits as without it, wherever that one is finite.
    """
    if x.dtype.itemsize < 4:
        return jnp.ones((1,) * x.ndim, x.dtype)
    absmax = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(absmax), absmax, 1))
    return jnp.ldexp(jnp.ones_like(absmax), jnp.clip(exponent, -120, 120))


def _mean(x: Float[Array, "..."], axes: tuple[int, ...], mask: Bool[Array, "..."] | None) -> Float[Array, "..."]:
    if mask is None:
        return jnp.mean(x, axis=axes, keepdims=True)
    count = jnp.sum(jnp.broadcast_to(mask, x.shape), axis=axes, keepdims=True).astype(x.dtype)
    return jnp.sum(x, axis=axes, keepdims=True) / count
