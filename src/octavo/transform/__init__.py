"""Quantizing a function by rewriting its jaxpr."""

from octavo.transform.api import Quantized, quantized
from octavo.transform.provider import PtqProvider, QtProvider, QuantizationProvider, get_current_rule
from octavo.transform.schedule import Scheduled, scheduled
from octavo.transform.site import Site

__all__ = [
    "PtqProvider",
    "QtProvider",
    "QuantizationProvider",
    "Quantized",
    "Scheduled",
    "Site",
    "get_current_rule",
    "quantized",
    "scheduled",
]
