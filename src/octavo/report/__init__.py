"""What happened? One HTML page about a run, or about runs side by side, that needs nothing but a browser."""

from octavo.report.compare import compare_report
from octavo.report.page import write_report

__all__ = ["compare_report", "write_report"]
