"""Inspection of quantized functions: plan, verification, cost and telemetry."""

from octavo.inspect.cost import Cost, cost
from octavo.inspect.plan import Plan, plan
from octavo.inspect.telemetry import Stats, Telemetry, by_class, summarize, telemetry
from octavo.inspect.verify import Verification, verify

__all__ = [
    "Cost",
    "Plan",
    "Stats",
    "Telemetry",
    "Verification",
    "by_class",
    "cost",
    "plan",
    "summarize",
    "telemetry",
    "verify",
]
