"""How is a whole function quantized? By rewriting the program it traces to, and by proof of what became of it."""

from octavo.transform.cost import Cost, cost
from octavo.transform.plan import Plan, plan
from octavo.transform.probe import Probe, Stats, by_class, probe, summarize
from octavo.transform.provider import PtqProvider, QtProvider, QuantizationProvider, get_current_rule
from octavo.transform.quantized import Quantized, quantized
from octavo.transform.scheduled import Scheduled, scheduled
from octavo.transform.site import Site
from octavo.transform.verify import Verification, verify

__all__ = [
    "Cost",
    "Plan",
    "Probe",
    "PtqProvider",
    "QtProvider",
    "QuantizationProvider",
    "Quantized",
    "Scheduled",
    "Site",
    "Stats",
    "Verification",
    "by_class",
    "cost",
    "get_current_rule",
    "plan",
    "probe",
    "quantized",
    "scheduled",
    "summarize",
    "verify",
]
