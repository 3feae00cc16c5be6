"""`octavo plan`: what rules will do to each multiplication of a function or model."""

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path

import octavo
from octavo.cli.target import Asked, UsageError, answering, explaining
from octavo.transform import Plan

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
    if args.json:
        print(plan.to_json())
        return 0
    if args.html:
        _write(plan, args.html, asked.target.name)
    else:
        # What the notes say was a warning already.
        _show(Plan(plan.rows, plan.rules))
    print(f"Next: {_next(args)}")
    return 0


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
