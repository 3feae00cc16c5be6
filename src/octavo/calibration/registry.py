"""Calibrations by name, in Qwix's syntax: a name and its numbers, separated by commas."""

import inspect
from collections.abc import Callable

from octavo._names import unknown_name
from octavo.calibration.method import AbsMax, AbsMean, Calibration, Constant, Fixed, MinMax, Percentile, Rms, Weighted
from octavo.calibration.search import FourOverSix, Lsq, Mse, Snr

type CalibrationLike = Calibration | str

_makers: dict[str, Callable[..., Calibration]] = {}


def register_calibration(name: str, maker: Callable[..., Calibration], *, replace: bool = False) -> None:
    """Register a calibration, so that rules and commands can name it.

    Args:
      name: The name, without a comma; letter case does not matter.
      maker: A `Calibration` subclass or a function that returns a calibration. Numbers after the name are its
        arguments: "tight,0.8" is `maker(0.8)`.
      replace: Whether a calibration of the same name may be replaced; otherwise that is an error.

    >>> register_calibration("tight", lambda factor=0.9: AbsMax(factor), replace=True)
    >>> get_calibration("tight,0.8")
    AbsMax(factor=0.8)
    """
    name = name.lower()
    if "," in name:
        raise ValueError(f"a calibration's name has no comma, got {name!r}")
    if name in _makers and not replace:
        raise ValueError(f"a calibration named {name!r} exists; choose another name or pass replace=True")
    _makers[name] = maker


def calibrations() -> tuple[str, ...]:
    """The names of all registered calibrations."""
    return tuple(_makers)


def get_calibration(method: CalibrationLike) -> Calibration:
    """Look up a calibration by a string such as `"absmax"`, `"rms,7"` or `"fixed,-1,6"`.

    >>> get_calibration("fixed,-1,6")
    Fixed(low=-1.0, high=6.0)
    """
    if isinstance(method, Calibration):
        return method
    if not isinstance(method, str):
        raise TypeError(f"a calibration is a string or a Calibration, got {method!r}")
    name, *texts = (part.strip() for part in method.lower().split(","))
    if name not in _makers:
        raise ValueError(f"unknown calibration {method!r}: {unknown_name(name, calibrations())}")
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        raise ValueError(f"calibration {method!r}: what follows the name must be numbers, as in 'absmax,0.9'") from None
    signature = inspect.signature(_makers[name])
    try:
        signature.bind(*numbers)
    except TypeError:
        takes = ", ".join(p.name if p.default is p.empty else f"[{p.name}]" for p in signature.parameters.values())
        raise ValueError(f"calibration {method!r} has the wrong count of numbers; {name} takes {takes}") from None
    return _makers[name](*numbers)


def _mse(points: float = Mse.points, lowest: float = Mse.lowest) -> Mse:
    return Mse(int(points), lowest)


def _lsq(points: float = Lsq.points, lowest: float = Lsq.lowest) -> Lsq:
    return Lsq(int(points), lowest)


def _snr(*clips: float) -> Snr:
    return Snr(clips) if clips else Snr()


for _name, _maker in {
    "absmax": AbsMax,
    "minmax": MinMax,
    "rms": Rms,
    "fixed": Fixed,
    "absmean": AbsMean,
    "constant": Constant,
    "percentile": Percentile,
    "mse": _mse,
    "lsq": _lsq,
    "snr": _snr,
    "four_over_six": FourOverSix,
    "weighted": Weighted,
}.items():
    register_calibration(_name, _maker)
