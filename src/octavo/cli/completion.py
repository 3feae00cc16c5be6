"""`octavo completion`: a script that completes commands, options and the keys of training in a shell."""

import argparse
import sys
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands, options and keys in a shell",
        description="Print a completion script for a shell, made by shtab (pip install 'octavo[completion]'). "
        "shtab does not support fish.",
        epilog="Examples: octavo completion bash >> ~/.bash_completion; octavo completion zsh > a directory of "
        "$fpath/_octavo; octavo completion tcsh > /etc/profile.d/octavo.csh",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the script for a shell and return the exit status."""
    try:
        import shtab
    except ModuleNotFoundError:
        print("octavo completion: the package shtab is missing: pip install 'octavo[completion]'", file=sys.stderr)
        return 1
    from octavo.cli import make_parser

    parser = make_parser()
    commands: Any = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for command in (command for command in commands.choices.values() if not command.add_help):
        command.add_argument("keys", nargs="*", choices=_keys())
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _keys() -> list[str]:
    """The keys of training, and the recipes for `quantization`."""
    from octavo.rules import recipes
    from octavo.train.config import keys

    return [*(f"{name}=" for name in keys()), *(f"quantization={name}" for name in recipes(aliases=True))]
