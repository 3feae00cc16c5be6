"""`octavo report`: the page of a run written again, or several runs on one page."""

import argparse
from typing import Any

from octavo.cli.options import fail


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser(
        "report",
        help="write the page about a run again, or about several runs side by side",
        description="Write one HTML page that needs nothing but a browser. RUN is the directory of a training run, of "
        "a comparison, of a converted model or of an evaluation. Several runs of a kind are compared: training runs "
        "with the one in float, or with the first.",
        epilog="Examples: octavo report runs/mine; octavo report runs/float runs/int8 runs/fp8 --out three.html. Exit "
        "status 2: a RUN is none.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's directory, or its JSON file")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="where to write the page (default: where the run's own is; of several runs, report.html here)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the page and return the exit status."""
    from octavo.report import render, render_together

    try:
        if len(args.runs) == 1:
            path = render(args.runs[0], args.out)
        else:
            path = render_together(args.runs, args.out or "report.html")
    except (ValueError, OSError) as error:
        return fail("report", error)
    print(f"report: {path}")
    return 0
