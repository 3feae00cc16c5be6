"""The `octavo` command. Each subcommand's module is imported only when it runs, so that `--help` is instant."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from octavo.cli.arguments import make_parser

__all__ = ["main"]

_WORDS = {"train": "train", "compare": "compare"}
"""Commands that take key=value words and print their own help, by the module that runs them."""
_COMMANDS = {
    "doctor": "doctor",
    "plan": "plan",
    "verify": "verify",
    "quantize": "quantize",
    "eval": "evaluate",
    "serve": "serve",
    "generate": "generate",
    "report": "report",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in _WORDS:
        return _module(_WORDS[words[0]]).run(words[1:])
    parser = make_parser()
    args = parser.parse_args(words)
    if args.command == "completion":
        return _module("completion").run(args, parser)
    if args.command in _COMMANDS:
        return _module(_COMMANDS[args.command]).run(args)
    parser.print_help()
    return 0


def _module(name: str) -> Any:
    return importlib.import_module(f"octavo.cli.{name}")
