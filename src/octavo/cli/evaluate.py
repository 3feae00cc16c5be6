"""`octavo eval`: perplexity on a text, and divergence from a reference model."""

import argparse
import json
from pathlib import Path
from typing import Any

from octavo.cli.options import MODEL, add_adapter, add_kv_cache, fail, kv_config, open_source, progress_line


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser(
        "eval",
        help="perplexity of a model on a text, and its divergence from another",
        description="Measure a model on a text: perplexity with its standard error; against another model of the same "
        "vocabulary also the KL divergence, the RMS change of probabilities, how often both choose the same token, and "
        "the signal to noise ratio of every layer. " + MODEL,
        epilog="Example: octavo eval small --against model.gguf --text book.txt --max-tokens 20000",
    )
    parser.add_argument("model", metavar="MODEL", help="the model to evaluate")
    parser.add_argument("--text", metavar="FILE", required=True, help="a text file")
    parser.add_argument("--against", metavar="FLOAT", help="the reference model, such as the float original")
    parser.add_argument("--max-tokens", type=int, metavar="N", default=0, help="only the first N tokens of the text")
    parser.add_argument("--length", type=int, metavar="N", default=256, help="tokens in a window (default 256)")
    add_adapter(parser)
    add_kv_cache(parser)
    parser.add_argument(
        "--out", metavar="DIR", help="the directory of the report and its JSON (default: runs/eval-MODEL-TEXT)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Evaluate, and return the exit status."""
    from octavo.pretrained import open_model
    from octavo.serve.evaluate import evaluate

    try:
        source = open_source(args)
        against = open_model(args.against) if args.against else None
        if source.tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer: it cannot read a text")
        text = Path(args.text).read_text(encoding="utf-8", errors="replace")
        ids = source.tokenizer.encode(text)
        if args.max_tokens:
            ids = ids[: args.max_tokens]
        kv = kv_config(args)
        found = evaluate(source, ids, against=against, kv=kv, length=args.length, progress=progress_line())
        page = _report(args, source, against, found)
    except (ValueError, OSError) as error:
        return fail("eval", error)
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


def _report(args: argparse.Namespace, source: Any, against: Any, found: Any) -> Path:
    """Write the record and its page to a directory, and return the page."""
    from octavo.pretrained.memory import peak_memory
    from octavo.report import render
    from octavo.report.page import versions
    from octavo.report.record import EVALUATION, write_record

    kv = "-".join(filter(None, (args.kv, args.kv_values, args.kv_latent and "latent")))
    name = "-".join(filter(None, ("eval", Path(args.model).resolve().name, Path(args.text).stem, kv)))
    directory = Path(args.out or Path("runs") / name)
    record = {
        "model": Path(args.model).resolve().name,
        "describes": source.describe(),
        "against": Path(args.against).resolve().name if against is not None else None,
        "text": Path(args.text).name,
        "options": {name: getattr(args, name) for name in ("length", "max_tokens", "kv", "kv_values", "kv_latent")},
        "peak_memory": peak_memory(),
        "versions": versions(),
        **found.to_dict(),
    }
    write_record(directory / EVALUATION, record)
    return render(directory)
