"""What will a quantized function do, and what did it do? Its plan, its proof, its cost and its telemetry."""

from octavo.inspect.cost import Cost, cost
from octavo.inspect.plan import Plan, plan
from octavo.inspect.telemetry import Probe, Stats, by_class, probe, summarize
from octavo.inspect.verify import Verification, verify

__all__ = [
    "Cost",
    "Plan",
    "Probe",
    "Stats",
    "Verification",
    "by_class",
    "cost",
    "plan",
    "probe",
    "summarize",
    "verify",
]
