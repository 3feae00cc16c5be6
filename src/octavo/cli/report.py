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
    from octavo import _remote
    from octavo.report import render, render_together

    try:
        runs = [_remote.pull(run) if _remote.is_remote(run) else run for run in args.runs]
        out = str(_remote.local(args.out)) if args.out else None
        path = render(runs[0], out) if len(runs) == 1 else render_together(runs, out or "report.html")
        written = args.out or (args.runs[0] if len(runs) == 1 else "")
        _remote.push(written)
        if _remote.is_remote(written):
            path = written if args.out else f"{written.rstrip('/')}/{path.name}"
    except (ValueError, OSError) as error:
        return fail("report", error)
    print(f"report: {path}")
    return 0
