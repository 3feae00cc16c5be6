"""`octavo quantize`: a model in low precision, written to disk parameter by parameter."""

import shlex
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

__all__ = ["run"]


def run(args: Namespace) -> int:
    """Convert as the arguments say, and return the exit status."""
    from octavo.pretrained import open_model
    from octavo.pretrained.convert import convert_model
    from octavo.pretrained.export import exporters, write_export
    from octavo.pretrained.to_gguf import write_as_gguf
    from octavo.pretrained.weights import weight_rules

    out, say = Path(args.out), None if args.quiet else _say
    try:
        if args.format not in (*exporters(), "gguf"):
            raise ValueError(f"--format {args.format}: one of {', '.join(exporters())}, gguf")
        if out.exists() and (not out.is_dir() or any(out.iterdir())) and not args.force:
            raise FileExistsError(f"{out} is there already: choose another place, or pass --force to replace it")
        source = open_model(args.model)
        print(source.describe(), flush=True)
        command = shlex.join(["octavo", "quantize", Path(args.model).name, args.recipe, out.name, *_options(args)])
        if args.format == "gguf":
            summary = write_as_gguf(source, args.recipe, out, head=args.head, say=say)
            # As it was written: blocks of GGUF are made on the way to the file.
            written = open_model(str(out))
            stored = lambda path: written.leaves[path].load()  # noqa: E731
        else:
            # Embeddings and logits in low precision are only known to Octavo itself.
            head = args.head or ("" if args.format == "octavo" else "float")
            rules = weight_rules(args.recipe, source.config, head=head, trained=source.rules)
            params, summary = convert_model(source, rules, scale_dtype=_scales(args), say=say)
            if args.force and out.exists():
                shutil.rmtree(out) if out.is_dir() else out.unlink()
            write_export(args.format, source, params, out, rules=rules, summary=summary, command=command)
            stored = params
        page = _report(source, stored, summary, out, args.recipe, command)
    except (ValueError, OSError) as error:
        print(f"octavo quantize: {error}", file=sys.stderr)
        return 2
    print(summary)
    print(f"written to {out}; report: {page}")
    print(f"next: octavo generate {out} --prompt '...'   octavo eval {out} --against {args.model} --text FILE")
    return 0


def _report(source: Any, stored: Any, summary: Any, out: Path, recipe: str, command: str) -> Path:
    """The page about the conversion: in the directory that was written, or beside the file."""
    from octavo.report import conversion_report, record_conversion
    from octavo.report.conversion import read_conversion

    place = out / "conversion.json" if out.is_dir() else out.with_name(f"{out.name}.conversion.json")
    record = read_conversion(record_conversion(source, stored, summary, place, recipe=recipe, command=command))
    return conversion_report(record, place.with_name(place.name.replace("conversion.json", "report.html")))


def _scales(args: Namespace) -> str | None:
    """The dtype of scales: what was trained stays as it was, and most others read float16.

    Codes are those of the scale as it is stored, so that a rounded one costs no precision but a little range.
    """
    if args.scales or args.recipe == "trained" or args.recipe.startswith("recipe:"):
        return args.scales or None
    return {"octavo": "bfloat16", "safetensors": None}.get(args.format, "float16")


def _options(args: Namespace) -> list[str]:
    given = [("--head", args.head, ""), ("--format", args.format, "octavo"), ("--scales", args.scales, "")]
    return [word for name, value, default in given if value != default for word in (name, value)]


def _say(text: str) -> None:
    print(text, flush=True)
