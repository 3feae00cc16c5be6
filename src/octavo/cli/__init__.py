"""The `octavo` command. Each subcommand's module is imported only when it runs, so that `--help` is instant."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main"]

_TARGET = """TARGET is module:function, or module:attribute for a Flax Linen, Flax NNX or Equinox model, or for a class
or function that makes one without arguments. Modules are looked for in the current directory too."""

_INPUTS = """shapes, one for each argument, such as 'f32[8,128]' 'i32[8,16]'; or module:callable, which returns the
tuple of arguments as arrays or jax.ShapeDtypeStructs (nested parameters need this form); by default example_inputs in
the target's module, such a callable or the tuple itself"""


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
    _add_doctor(commands)
    _add_plan(commands)
    _add_verify(commands)
    # These two take key=value words and print their own help, so `main` passes their words on.
    commands.add_parser("train", add_help=False, help="train a language model in a number format")
    commands.add_parser("compare", add_help=False, help="train in float and in recipes side by side, over seeds")
    return parser


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what this machine has, which number types it multiplies fast, and what is missing",
        description="Print versions, CPU and devices; try a matrix product in each number type on the default backend "
        "and time it against float32; list what is missing with the command that mends it. Takes a few seconds.",
        epilog="Exit status 1 when something Octavo cannot run without is missing. Next: make train",
    )
    doctor.add_argument("--json", action="store_true", help="print the same as JSON")


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        usage="octavo plan TARGET --rules RULES [--inputs INPUT ...] [options]",
        help="what rules will do to each multiplication of a function or model",
        description="Print each multiplication of a function or model with the rule that matches it, the number types "
        "of its three products, its scales, and the bytes that it saves. Only shapes are used; nothing is computed. "
        + _TARGET,
        epilog="Example: octavo plan my_model:make --rules int8 --inputs 'f32[8,128]'. Exit status 0: planned; 2: the "
        "target, inputs or rules are wrong, or a rule matches nothing.",
    )
    _add_what(plan)
    plan.add_argument("--allow-unmatched", action="store_true", help="warn of a rule that matches nothing, and go on")
    form = plan.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the plan as JSON")
    form.add_argument("--html", metavar="FILE", help="write the plan to an HTML file")


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        usage="octavo verify TARGET [--rules RULES] [--inputs INPUT ...] [options]",
        help="which share of a function's or model's matmul FLOPs is really low precision",
        description="Count the matmul FLOPs of a function or model by the types that are multiplied: as it is, or "
        "quantized by the rules. Only shapes are used; nothing is computed. " + _TARGET,
        epilog="Example: octavo verify my_model:make --rules int8 --inputs 'f32[8,128]' --grad --at-least 0.95. Exit "
        "status 0: verified; 1: the share is below that of --at-least; 2: the target, inputs or rules are wrong.",
    )
    _add_what(verify)
    verify.add_argument(
        "--grad",
        action="store_true",
        help="verify the backward pass too: the gradient of the mean of the squares of all float outputs with respect "
        "to the weights",
    )
    verify.add_argument(
        "--platform",
        choices=("cpu", "cuda", "rocm", "tpu"),
        help="lower the program for this platform too, and report the types in it; no such device is needed",
    )
    verify.add_argument("--json", action="store_true", help="print the result as JSON")
    verify.add_argument(
        "--at-least",
        type=_share,
        metavar="SHARE",
        help="exit with status 1 if the low-precision share of the forward pass, or with --grad of either pass, is "
        "below this, 0 to 1",
    )


def _add_what(command: argparse.ArgumentParser) -> None:
    """What both commands look at: the target, its rules and its inputs."""
    # `--rules list` needs no target, so its absence is an error of the command and not of the parser.
    command.add_argument("target", metavar="TARGET", nargs="?", help="module:function or module:attribute")
    command.add_argument(
        "--rules",
        metavar="RULES",
        help=f"a recipe's name or a .json or .yml file; `octavo {command.prog.split()[-1]} --rules list` prints the "
        "recipes",
    )
    command.add_argument("--inputs", metavar="INPUT", nargs="+", help=_INPUTS)
    command.add_argument(
        "--weights",
        metavar="NAME",
        help="the argument of a function that holds the weights, by its name or number; by default one called params, "
        "variables, model or the like, and for gradients otherwise the first",
    )


def _share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: a number from 0 to 1, such as 0.95")
    return share


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["train"]:
        from octavo.cli import train

        return train.run(words[1:])
    if words[:1] == ["compare"]:
        from octavo.cli import compare

        return compare.run(words[1:])
    parser = _parser()
    args = parser.parse_args(words)
    if args.command == "doctor":
        from octavo.cli import doctor

        return doctor.run(as_json=args.json)
    if args.command == "plan":
        from octavo.cli import plan

        return plan.run(args)
    if args.command == "verify":
        from octavo.cli import verify

        return verify.run(args)
    parser.print_help()
    return 0
