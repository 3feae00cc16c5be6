"""`octavo eval`: how good a model is on a text, and how far it is from its float original."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

__all__ = ["run"]


def run(args: Namespace) -> int:
    """Evaluate as the arguments say, and return the exit status."""
    from octavo.pretrained import open_model
    from octavo.serve import KVConfig
    from octavo.serve.evaluate import evaluate

    try:
        source = open_model(args.model)
        against = open_model(args.against) if args.against else None
        if source.tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer: it cannot read a text")
        text = Path(args.text).read_text(encoding="utf-8", errors="replace")
        ids = source.tokenizer.encode(text)
        if args.max_tokens:
            ids = ids[: args.max_tokens]
        kv = KVConfig(keys=args.kv, values=args.kv_values or args.kv, axis=args.kv_axis) if args.kv else None
        found = evaluate(
            source, ids, against=against, kv=kv, length=args.length, say=_progress if sys.stderr.isatty() else None
        )
        page = _report(args, source, against, found)
    except (ValueError, OSError) as error:
        print(f"octavo eval: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"model": source.name, **found.to_dict(), "report": str(page)}))
        return 0
    print(source.describe())
    if against is not None:
        print(f"against {against.describe()}")
    print(found)
    from octavo.pretrained.memory import peak_memory

    print(f"in {found.seconds:.1f} seconds; peak memory {peak_memory() / 2**20:.0f} MiB; report: {page}")
    return 0


def _report(args: Namespace, source: Any, against: Any, found: Any) -> Path:
    """Write the figures and the page about them to a directory of their own."""
    from octavo.pretrained.memory import peak_memory
    from octavo.report import evaluation_report
    from octavo.report.evaluation import read_evaluation
    from octavo.report.record import EVALUATION, write_record
    from octavo.report.tables import versions

    kv = "-".join(filter(None, (args.kv, args.kv_values))) if args.kv else ""
    name = "-".join(filter(None, ("eval", Path(args.model).resolve().name, Path(args.text).stem, kv)))
    directory = Path(args.out or Path("runs") / name)
    record = {
        "model": Path(args.model).resolve().name,
        "describes": source.describe(),
        "against": Path(args.against).resolve().name if against is not None else None,
        "text": Path(args.text).name,
        "options": {name: getattr(args, name) for name in ("length", "max_tokens", "kv", "kv_values")},
        "peak_memory": peak_memory(),
        "versions": versions(),
        **found.to_dict(),
    }
    write_record(directory / EVALUATION, record)
    return evaluation_report(read_evaluation(directory), directory / "report.html")


def _progress(text: str) -> None:
    print(f"\r{text}", end="", file=sys.stderr, flush=True)
