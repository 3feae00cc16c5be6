"""`octavo report`: the page of a run written again, or several runs on one page."""

import sys
from argparse import Namespace

__all__ = ["run"]

TOGETHER = "report.html"


def run(args: Namespace) -> int:
    """Write the page and return the exit status."""
    from octavo.report import render, render_together

    try:
        if len(args.runs) == 1:
            path = render(args.runs[0], args.out)
        else:
            path = render_together(args.runs, args.out or TOGETHER)
    except (ValueError, OSError) as error:
        print(f"octavo report: {error}", file=sys.stderr)
        return 2
    print(f"report: {path}")
    return 0
