"""The `octavo` command. Each subcommand's module is imported only when it runs, so that `--help` is instant."""

import argparse
from collections.abc import Sequence

__all__ = ["main"]


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import version

        print(f"octavo {version('octavo')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo",
        description="Quantized training and inference for JAX.",
        epilog="Next: octavo doctor",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    doctor = commands.add_parser(
        "doctor",
        help="what this machine has, which number types it multiplies fast, and what is missing",
        description="Print versions, CPU and devices; try a matrix product in each number type on the default backend "
        "and time it against float32; list what is missing with the command that mends it. Takes a few seconds.",
        epilog="Exit status 1 when something Octavo cannot run without is missing. Next: make train",
    )
    doctor.add_argument("--json", action="store_true", help="print the same as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command == "doctor":
        from octavo.cli import doctor

        return doctor.run(as_json=args.json)
    parser.print_help()
    return 0
