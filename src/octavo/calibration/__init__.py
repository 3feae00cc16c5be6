"""What range does a tensor span? Pure measurements, and trackers with explicit state."""

from octavo.calibration.method import (
    AbsMax,
    AbsMean,
    Bounds,
    Calibration,
    Constant,
    Fixed,
    MinMax,
    Percentile,
    Rms,
    RoundTrip,
    Weighted,
)
from octavo.calibration.registry import CalibrationLike, calibrations, get_calibration, register_calibration
from octavo.calibration.search import FourOverSix, Lsq, Mse, Snr
from octavo.calibration.tracker import AmaxHistory, Ema, RunningMean, State, Tracker, widest

__all__ = [
    "AbsMax",
    "AbsMean",
    "AmaxHistory",
    "Bounds",
    "Calibration",
    "CalibrationLike",
    "Constant",
    "Ema",
    "Fixed",
    "FourOverSix",
    "Lsq",
    "MinMax",
    "Mse",
    "Percentile",
    "Rms",
    "RoundTrip",
    "RunningMean",
    "Snr",
    "State",
    "Tracker",
    "Weighted",
    "calibrations",
    "get_calibration",
    "register_calibration",
    "widest",
]
