"""`octavo verify`: the share of a function's or model's matmul FLOPs in low precision."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from octavo.cli.options import TARGET, add_grad, add_target

if TYPE_CHECKING:
    from octavo.cli.target import TargetCall


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser(
        "verify",
        usage="octavo verify TARGET [--rules RULES] [--inputs INPUT ...] [options]",
        help="the share of a function's or model's matmul FLOPs in low precision",
        description="Count the matmul FLOPs of a function or model by the types that are multiplied: as it is, or "
        "quantized by the rules. Only shapes are used; nothing is computed. " + TARGET,
        epilog="Example: octavo verify my_model:make --rules int8 --inputs 'f32[8,128]' --grad --at-least 0.95. Exit "
        "status 0: verified; 1: the share is below that of --at-least; 2: the target, inputs or rules are wrong.",
    )
    add_target(parser)
    add_grad(parser, "verify")
    parser.add_argument(
        "--platform",
        choices=("cpu", "cuda", "rocm", "tpu"),
        help="lower the program for this platform too, and report the types in it; no such device is needed",
    )
    parser.add_argument(
        "--accelerator",
        metavar="NAME",
        help="compile the program for v5e, v5p, v6e, tpu7x, h100 or b200, and report which quantized matmuls the "
        "device multiplies in low precision; its compiler is needed, the device is not",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--at-least",
        type=_share,
        metavar="SHARE",
        help="exit with status 1 if the low-precision share of the forward pass, or with --grad of either pass, is "
        "below this, 0 to 1; with --accelerator also if the share of the quantized matmuls is",
    )
    return parser


def _share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: a number from 0 to 1, such as 0.95")
    return share


def run(args: argparse.Namespace) -> int:
    """Print the verification and return the exit status."""
    from octavo.cli.target import run_on_target

    return run_on_target(_verify, args)


def _verify(call: "TargetCall", args: argparse.Namespace) -> int:
    import octavo
    from octavo.cli.target import usage_errors
    from octavo.cli.weights import split_weights, value_and_grad
    from octavo.hlo import describe_quantized

    with usage_errors():
        split = split_weights(call)
        fn = value_and_grad(split.fn) if args.grad else split.fn
        found = octavo.verify(fn, split.weights, split.rest, platform=args.platform)
        compiled = _compiled(args.accelerator, fn, split.weights, split.rest) if args.accelerator else ()
    if args.json:
        print(json.dumps(json.loads(found.to_json()) | {"compiled": [matmul.to_dict() for matmul in compiled]}))
    else:
        print(
            found,
            *([f"compiled for {args.accelerator}:", *describe_quantized(compiled)] if args.accelerator else []),
            sep="\n",
        )
    shares = {"forward": found.forward, "backward": found.backward} if args.grad else {"forward": found.forward}
    if args.accelerator:
        quantized = [matmul for matmul in compiled if matmul.is_quantized]
        shares[args.accelerator] = sum(matmul.is_low for matmul in quantized) / max(1, len(quantized))
    low = {name: share for name, share in shares.items() if args.at_least is not None and share < args.at_least}
    for name, share in low.items():
        print(
            f"{name}: {share:.2%} of {'quantized matmuls' if name == args.accelerator else 'matmul FLOPs'} in low "
            f"precision, below --at-least {args.at_least}",
            file=sys.stderr,
        )
    return int(bool(low))


def _compiled(name: str, fn: Any, *args: Any) -> tuple[Any, ...]:
    """The matmuls of the program that an accelerator's compiler makes of a function."""
    from octavo.cli.target import UsageError
    from octavo.hlo import compile_for, compiler_missing, get_accelerator, read_matmuls

    accelerator = get_accelerator(name)
    if (missing := compiler_missing(accelerator)) is not None:
        raise UsageError(missing)
    return read_matmuls(compile_for(accelerator, fn, *args).as_text())
