"""The `octavo` command. A command's module holds its options and imports what it runs, so that `--help` is instant."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from octavo._names import unknown_name

__all__ = ["main", "make_parser"]

_KEY_VALUE = {
    "train": ("octavo.train.__main__", "train a language model in low precision"),
    "compare": ("octavo.cli.compare", "train in float and in recipes side by side, over seeds"),
}
"""Commands that take key=value arguments and print their own help: their modules and summaries."""
_COMMANDS = (
    "doctor",
    "plan",
    "verify",
    "compile",
    "quantize",
    "eval",
    "serve",
    "generate",
    "embed",
    "report",
    "completion",
)

_MODULES = {"eval": "evaluate"}
"""Commands whose module has another name."""

_EXAMPLES = """\
to begin:
  octavo train quantization=int8                       a small language model, trained in int8
  octavo compare quantization=int8,fp8_full seeds=2    the same in float and in two recipes, with a table
  octavo plan module:function --rules int8             what int8 would do to a function or model of yours
  octavo quantize model.gguf int4 small                a pretrained model in four bits
  octavo generate small --prompt "Once upon a time"    text from it
  octavo COMMAND --help                                the rest

Next: octavo doctor"""


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import version

        print(f"octavo {version('octavo')}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        status = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe; nothing is left to flush at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in _KEY_VALUE:
        return importlib.import_module(_KEY_VALUE[arguments[0]][0]).main(arguments[1:])
    parser = make_parser()
    known = (*_KEY_VALUE, *_COMMANDS)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in known:
        parser.error(f"there is no command {arguments[0]!r}; {unknown_name(arguments[0], known)}")
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    return args.run(args)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; those that take key=value arguments are in it by name only."""
    parser = argparse.ArgumentParser(
        prog="octavo",
        description="Quantized training and inference for JAX.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, (_, summary) in _KEY_VALUE.items():
        commands.add_parser(name, add_help=False, help=summary)
    for name in _COMMANDS:
        module = importlib.import_module(f"octavo.cli.{_MODULES.get(name, name)}")
        module.add_parser(commands).set_defaults(run=module.run)
    return parser
