"""Reports: a self-contained HTML page about one run or several."""

import importlib
from typing import Any

from octavo.report.comparison import compare_report
from octavo.report.run_page import write_report

__all__ = ["compare_report", "record_conversion", "render", "render_together", "write_report"]

_LAZY = {"record_conversion": "conversion", "render": "kinds", "render_together": "kinds"}


def __getattr__(name: str) -> Any:
    """Import names that need flax and orbax on first use."""
    if name in _LAZY:
        return getattr(importlib.import_module(f"octavo.report.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'octavo.report' has no attribute {name!r}")
