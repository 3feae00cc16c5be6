"""`octavo plan`: what rules will do to each multiplication of a function or model."""

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

import jax

import octavo
from octavo.cli.target import Asked, UsageError, answering, explaining
from octavo.hlo import Communication, partitioned_hlo, read_communication
from octavo.inspect import Plan
from octavo.qarray import is_qarray
from octavo.transform.arguments import argument_names, leaf_paths, weight_names

_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ font-family: sans-serif }} th, td {{ padding: 0.2em 0.6em; text-align: left }}</style>
{body}
"""


def run(args: argparse.Namespace) -> int:
    """Print the plan and return the exit status."""
    return answering(_plan, args, needs_rules="octavo plan --rules list prints the recipes")


def _plan(asked: Asked, args: argparse.Namespace) -> int:
    on_unmatched = "warn" if args.allow_unmatched else "error"
    with explaining():
        plan = octavo.plan(
            asked.target.value, asked.rules, *asked.inputs, on_unmatched=on_unmatched, weights=asked.weights
        )
        if args.sent:
            plan = plan.with_communication(_communication(asked))
    if args.json:
        print(plan.to_json())
        return 0
    if args.html:
        _write(plan, args.html, asked.target.name)
    else:
        # What the notes say was a warning already.
        _show(Plan(plan.rows, plan.rules, communication=plan.communication))
    print(f"Next: {_next(args)}")
    return 0


def _communication(asked: Asked) -> Communication:
    """What a device sends in the target in low precision, compiled for the devices on which its inputs lie."""
    fn, inputs, name = asked.target.value, asked.inputs, asked.target.name
    if asked.target.framework is not None:
        raise UsageError(f"--sent is for functions: the shapes of the model {name} do not tell where its weights lie")
    flat = jax.tree_util.tree_leaves_with_path(inputs, is_leaf=is_qarray)
    names = weight_names(
        leaf_paths(fn, inputs, {}), [leaf for _, leaf in flat], asked.weights, argument_names(fn, len(inputs))
    )
    places = {"inputs" + jax.tree_util.keystr(path): leaf for path, leaf in flat}
    weights = {place: name for place, name in zip(places, names, strict=True) if name is not None}
    lie = {place: getattr(leaf, "sharding", None) for place, leaf in places.items()}
    if not any(where is not None and where.num_devices > 1 for where in lie.values()):
        raise UsageError(
            f"--sent: no input of {name} lies on several devices: give --inputs as module:callable that returns "
            "arrays, or jax.ShapeDtypeStructs with sharding=, that do"
        )
    cut = {weights[p]: where for p, where in lie.items() if p in weights and isinstance(where, jax.NamedSharding)}
    low = octavo.quantized(fn, asked.rules, weights=asked.weights, on_unmatched="ignore", shardings=cut)
    state = jax.eval_shape(low.init, *inputs) if low.provider.stateful else {}

    def run(state: Any, inputs: Any) -> Any:
        return low.stateful(state, key=jax.random.key(0))(*inputs)

    text = partitioned_hlo(jax.jit(run).lower(state, inputs))
    return read_communication(
        text, weights=lambda argument: argument in weights or argument.rpartition(".")[0] in weights
    )


def _write(plan: Plan, path: str, title: str) -> None:
    try:
        Path(path).write_text(_PAGE.format(title=title, body=plan._repr_html_()), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html: {path}: {error.strerror}") from None
    print(f"{path} written")


def _show(plan: Plan) -> None:
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
