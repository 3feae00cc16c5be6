"""`octavo quantize`: convert a model to low precision and write it, parameter by parameter."""

import functools
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

__all__ = ["run"]


def run(args: Namespace) -> int:
    """Convert as the arguments say, and return the exit status."""
    from octavo.pretrained import Request, export_model, open_model

    out = Path(args.out)
    command = shlex.join(["octavo", "quantize", Path(args.model).name, args.recipe, out.name, *_options(args)])
    request = Request(
        args.recipe,
        head=args.head,
        scale_dtype=args.scales,
        command=command,
        replace=args.force,
        log=None if args.quiet else functools.partial(print, flush=True),
    )
    try:
        source = open_model(args.model)
        print(source.describe(), flush=True)
        done = export_model(args.format, source, out, request)
        page = _report(source, done, out, request)
    except (ValueError, OSError) as error:
        print(f"octavo quantize: {error}", file=sys.stderr)
        return 2
    print(done.summary)
    print(f"written to {out}; report: {page}")
    print(f"next: octavo generate {out} --prompt '...'   octavo eval {out} --against {args.model} --text FILE")
    return 0


def _report(source: Any, done: Any, out: Path, request: Any) -> Path:
    """Write the report page: into the directory that was written, or beside the file."""
    from octavo.report import conversion_report, record_conversion
    from octavo.report.conversion import read_conversion

    place = out / "conversion.json" if out.is_dir() else out.with_name(f"{out.name}.conversion.json")
    texts = {"recipe": request.recipe, "command": request.command}
    record = read_conversion(record_conversion(source, done.params, done.summary, place, **texts))
    return conversion_report(record, place.with_name(place.name.replace("conversion.json", "report.html")))


def _options(args: Namespace) -> list[str]:
    given = [("--head", args.head, ""), ("--format", args.format, "octavo"), ("--scales", args.scales, "")]
    return [word for name, value, default in given if value != default for word in (name, value)]
