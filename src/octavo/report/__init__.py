"""What happened? One HTML page about a run, or about runs side by side, that needs nothing but a browser."""

from octavo.report.compare import compare_report
from octavo.report.page import write_report

__all__ = [
    "compare_report",
    "conversion_report",
    "evaluation_report",
    "record_conversion",
    "render",
    "render_together",
    "write_report",
]

_LAZY = {
    "conversion_report": "conversion",
    "evaluation_report": "evaluation",
    "record_conversion": "conversion",
    "render": "kinds",
    "render_together": "kinds",
}


def __getattr__(name: str):
    """What needs flax and orbax is imported when it is asked for."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"octavo.report.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'octavo.report' has no attribute {name!r}")
