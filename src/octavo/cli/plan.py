"""`octavo plan`: what rules will do to each matmul of a function or model."""

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.options import TARGET, add_target

if TYPE_CHECKING:
    from octavo.cli.target import TargetCall
    from octavo.hlo import Communication
    from octavo.inspect import Plan

_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ font-family: sans-serif }} th, td {{ padding: 0.2em 0.6em; text-align: left }}</style>
{body}
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser(
        "plan",
        usage="octavo plan TARGET --rules RULES [--inputs INPUT ...] [options]",
        help="what rules will do to each matmul of a function or model",
        description="Print each matmul of a function or model with the rule that matches it, the number types of its "
        "forward and backward passes, its scales, and the bytes that it saves. Only shapes are used. " + TARGET,
        epilog="Example: octavo plan my_model:make --rules int8 --inputs 'f32[8,128]'. Exit status 0: planned; 2: the "
        "target, inputs or rules are wrong, or a rule matches nothing.",
    )
    add_target(parser)
    parser.add_argument("--allow-unmatched", action="store_true", help="warn of a rule that matches nothing")
    parser.add_argument(
        "--collectives",
        action="store_true",
        help="compile the quantized function for the devices that its inputs are sharded over, and print the "
        "collective bytes of a device; octavo train prints the same for its step",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the plan as JSON")
    form.add_argument("--html", metavar="FILE", help="write the plan to an HTML file")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the plan and return the exit status."""
    from octavo.cli.target import run_on_target

    return run_on_target(_plan, args, needs_rules="octavo plan --rules list prints the recipes")


def _plan(call: "TargetCall", args: argparse.Namespace) -> int:
    import octavo
    from octavo.cli.target import usage_errors
    from octavo.inspect import Plan

    on_unmatched = "warn" if args.allow_unmatched else "error"
    with usage_errors():
        plan = octavo.plan(call.target.value, call.rules, *call.inputs, on_unmatched=on_unmatched, weights=call.weights)
        if args.collectives:
            plan = plan.with_communication(_communication(call))
    if args.json:
        print(plan.to_json())
        return 0
    if args.html:
        _write(plan, args.html, call.target.name)
    else:
        # The notes were already printed as warnings.
        _show(Plan(plan.rows, plan.rules, communication=plan.communication))
    print(f"Next: {_next(args)}")
    return 0


def _communication(call: "TargetCall") -> "Communication":
    """The collectives of the quantized target, compiled for the devices that its inputs are sharded over."""
    import jax

    import octavo
    from octavo.cli.target import UsageError
    from octavo.hlo import partitioned_hlo, read_communication
    from octavo.qarray import is_qarray
    from octavo.transform.api import weight_names

    fn, inputs, name = call.target.value, call.inputs, call.target.name
    if call.target.framework is not None:
        raise UsageError(
            f"--collectives is for functions: the shapes of the model {name} have no shardings of its weights"
        )
    flat = jax.tree_util.tree_leaves_with_path(inputs, is_leaf=is_qarray)
    leaves = [leaf for _, leaf in flat]
    names = weight_names(fn, inputs, {}, call.weights)
    keys = ["inputs" + jax.tree_util.keystr(path) for path, _ in flat]
    weights = {key: name for key, name in zip(keys, names, strict=True) if name is not None}
    shardings = {key: getattr(leaf, "sharding", None) for key, leaf in zip(keys, leaves, strict=True)}
    if not any(sharding is not None and sharding.num_devices > 1 for sharding in shardings.values()):
        raise UsageError(
            f"--collectives: no input of {name} is sharded over several devices: give --inputs as module:callable that "
            "returns arrays, or jax.ShapeDtypeStructs with sharding=, that are"
        )
    named = {weights[k]: s for k, s in shardings.items() if k in weights and isinstance(s, jax.NamedSharding)}
    low = octavo.quantized(fn, call.rules, weights=call.weights, on_unmatched="ignore", shardings=named)
    state = jax.eval_shape(low.init, *inputs) if low.provider.stateful else {}

    def step(state: Any, inputs: Any) -> Any:
        return low.stateful(state, key=jax.random.key(0))(*inputs)

    text = partitioned_hlo(jax.jit(step).lower(state, inputs))
    return read_communication(
        text, weights=lambda argument: argument in weights or argument.rpartition(".")[0] in weights
    )


def _write(plan: "Plan", path: str, title: str) -> None:
    from octavo.cli.target import UsageError

    try:
        Path(path).write_text(_PAGE.format(title=title, body=plan._repr_html_()), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html: {path}: {error.strerror}") from None
    print(f"{path} written")


def _show(plan: "Plan") -> None:
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console

        Console(highlight=False, emoji=False).print(plan, soft_wrap=True)
    else:
        print(plan)


def _next(args: argparse.Namespace) -> str:
    words = ["octavo", "verify", args.target, "--rules", args.rules]
    words += ["--inputs", *args.inputs] if args.inputs else []
    words += ["--weights", args.weights] if args.weights else []
    return shlex.join(words)
