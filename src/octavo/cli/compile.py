"""`octavo compile`: the cost of a function or model on an accelerator that is not here, by its own compiler."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from octavo.cli.options import TARGET, add_grad, add_target

if TYPE_CHECKING:
    from octavo.cli.target import TargetCall
    from octavo.hlo import Accelerator, ProgramCost

FLOAT = "float"


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser(
        "compile",
        usage="octavo compile TARGET --accelerator NAME [--rules RULES] [--inputs INPUT ...] [options]",
        help="the cost of a function or model on a TPU or GPU, by its own compiler",
        description="Compile a function or model for one device of an accelerator and report what its compiler "
        "estimates: cycles (TPUs), bytes, temporary memory, collectives, the types that are multiplied and the most "
        "expensive instructions; with rules, next to the same program in float. The device is not needed, its compiler "
        "is: pip install 'octavo[tpu]' or 'octavo[cuda]'. " + TARGET,
        epilog="Example: octavo compile my_model:make --accelerator v6e --rules int8 --inputs 'bf16[8,2048,4096]' "
        "--grad. Exit status 0: compiled; 2: the target, inputs, rules or accelerator are wrong, or the compiler is "
        "not installed.",
    )
    add_target(parser)
    parser.add_argument(
        "--accelerator", metavar="NAME", required=True, help="v5e, v5p, v6e, tpu7x (as in v6e:4x4), h100 or b200"
    )
    add_grad(parser, "compile")
    parser.add_argument(
        "--most", type=int, default=10, metavar="N", help="how many instructions to show, 10 by default"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the costs and return the exit status."""
    from octavo.cli.target import run_on_target

    return run_on_target(_compile, args)


def _compile(call: "TargetCall", args: argparse.Namespace) -> int:
    import dataclasses

    from octavo.cli.target import UsageError, usage_errors
    from octavo.cli.weights import split_weights, value_and_grad
    from octavo.hlo import compile_for, compiler_missing, get_accelerator, read_cost

    with usage_errors():
        accelerator = get_accelerator(args.accelerator)
    if (missing := compiler_missing(accelerator)) is not None:
        raise UsageError(missing)
    calls = {FLOAT: dataclasses.replace(call, rules=None)} | ({} if call.rules is None else {args.rules: call})
    costs = {}
    for name, each in calls.items():
        with usage_errors():
            split = split_weights(each)
            fn = value_and_grad(split.fn) if args.grad else split.fn
            costs[name] = read_cost(compile_for(accelerator, fn, split.weights, split.rest))
    if args.json:
        print(json.dumps({name: cost.to_dict(accelerator) for name, cost in costs.items()}, indent=1))
    else:
        print("\n".join(_report(accelerator, costs, args.most)))
    return 0


def _report(accelerator: "Accelerator", costs: dict[str, "ProgramCost"], most: int) -> list[str]:
    from octavo._text import format_bytes_si, format_table
    from octavo.hlo import count_types, describe_quantized

    name, cost = list(costs.items())[-1]
    rows: list[tuple[str, ...]] = [("", "cycles", "time", "accessed", "temporary", "sent")]
    for label, each in costs.items():
        time = f"{1e3 * accelerator.seconds(each.cycles):.3f} ms" if each.cycles else "unknown"
        accessed = format_bytes_si(each.bytes_accessed) if each.bytes_accessed else "unknown"
        sizes = format_bytes_si(each.temp_bytes), format_bytes_si(each.communication.total())
        rows.append((label, f"{each.cycles:,}" if each.cycles else "unknown", time, accessed, *sizes))
    lines = [f"{accelerator}", *format_table(rows)]
    if len(costs) > 1 and cost.cycles:
        lines.append(f"{name} takes {cost.cycles / costs[FLOAT].cycles:.2f} of the cycles of float")
    if cost.unknown:
        lines.append(f"{len(cost.unknown)} instructions of {name} have no estimate and are not counted")
    kinds = [("matmuls", "count"), *((kind, str(count)) for kind, count in count_types(cost.matmuls).items())]
    lines += ["", *format_table(kinds), *(describe_quantized(cost.matmuls) if len(costs) > 1 else [])]
    return lines + (["", *format_table(cost.table(most))] if cost.ops else [])
