"""`octavo eval`: how good a model is on a text, and how far it is from its float original."""

import json
import sys
from argparse import Namespace
from pathlib import Path

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
    except (ValueError, OSError) as error:
        print(f"octavo eval: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"model": source.name, **found.to_dict()}))
        return 0
    print(source.describe())
    if against is not None:
        print(f"against {against.describe()}")
    print(found)
    from octavo.pretrained.convert import peak_memory

    print(f"in {found.seconds:.1f} seconds; peak memory {peak_memory() / 2**20:.0f} MiB")
    return 0


def _progress(text: str) -> None:
    print(f"\r{text}", end="", file=sys.stderr, flush=True)
