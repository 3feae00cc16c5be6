"""What was asked for and with what: the plan, the configuration, the data and the versions, as tables."""

import dataclasses
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from octavo._text import format_bytes_si
from octavo.report.markup import Cell, details, missing, note, section, table
from octavo.report.words import TIMES, percent, size

_MOST_ROWS = 1500
_PLAN = (
    "product", "FLOPs", "op", "shapes", "forward", "dlhs", "drhs", "lowering", "bytes before", "after", "left because",
)  # fmt: skip
_PACKAGES = ("octavo", "jax", "jaxlib", "numpy", "ml_dtypes", "flax", "optax", "orbax-checkpoint")


def plan_section(plan: Mapping[str, Any] | None, heading: str = "Plan") -> str:
    """Every product with what became of it, the largest first."""
    if plan is None:
        return section(heading, missing("There is no plan.json: the run was in float, or ended before it was planned."))
    rows = sorted(plan["rows"], key=lambda row: -row["flops"])
    total = sum(row["flops"] for row in rows) or 1
    done = sum(row["reason"] is None for row in rows)
    caption = f"{done} of {len(rows)} products are quantized, {percent(plan['share'])} of forward FLOPs"
    if len(rows) > _MOST_ROWS:
        caption += f"; the {_MOST_ROWS} largest are listed, all of them are in plan.json"
    shown = rows[:_MOST_ROWS]
    traffic = plan.get("communication")  # of a run on several devices
    cells = [_plan_cells(row, total) + _sent_cells(row, traffic) for row in shown]
    dim = [row["reason"] is not None for row in shown]
    columns = _PLAN if traffic is None else (*_PLAN, "weights sent")
    parts = table(caption, columns, cells, sortable=True, dim=dim) if cells else missing("The plan has no products.")
    return section(heading, parts, *(note(text) for text in plan["notes"]), _sent_table(traffic))


def _sent_cells(row: Mapping[str, Any], traffic: Mapping[str, Any] | None) -> list[Cell]:
    if traffic is None:
        return []
    return [
        Cell("")
        if row["collective_bytes"] is None
        else Cell(format_bytes_si(row["collective_bytes"]), row["collective_bytes"])
    ]


def _sent_table(traffic: Mapping[str, Any] | None) -> str:
    """What a device sends in a step, by kind of collective and type."""
    if traffic is None or not traffic["total"]:
        return "" if traffic is None else note("A device sends nothing in a step.")
    total, weights, gradients = (traffic[name] for name in ("total", "weights", "gradients"))
    uses = {"weights": weights, "gradients": gradients, "the rest": total - weights - gradients}
    shares = ", ".join(f"{use} {format_bytes_si(sent)}" for use, sent in uses.items() if sent)
    found = [(kind, dtype, sent) for kind, types in traffic["by_kind"].items() for dtype, sent in types.items() if sent]
    rows = [
        [Cell(kind), Cell(dtype, code=True), Cell(format_bytes_si(sent), sent), Cell(percent(sent / total) or "", sent)]
        for kind, dtype, sent in sorted(found, key=lambda entry: -entry[2])
    ]
    loops = [note(f"Counted once, unknown trip count: {name}") for name in traffic["unknown_loops"]]
    caption = f"A device sends {format_bytes_si(total)} in a step: {shares}"
    return "".join([table(caption, ("collective", "type", "sent", "share"), rows, sortable=True), *loops])


def _plan_cells(row: Mapping[str, Any], total: int) -> list[Cell]:
    times = "" if row["times"] == 1 else f"{row['times']} {TIMES} "
    share = row["flops"] / total
    return [
        Cell(row["path"] or row["weight"] or "(top)", code=True),
        Cell(percent(share) or "", share),
        Cell(row["op"]),
        Cell(times + row["shapes"], code=True),
        Cell(row["fwd"], code=True),
        Cell(row["dlhs"], code=True),
        Cell(row["drhs"], code=True),
        Cell(row["lowering"]),
        Cell(size(row["bytes_before"]), row["bytes_before"]),
        Cell(size(row["bytes_after"]), row["bytes_after"]),
        Cell(row["reason"] or ""),
    ]


def config_section(config: Mapping[str, Any]) -> str:
    """The configuration: keys that differ from their defaults first, the others on request."""
    if not config:
        return section("Configuration", missing("There is no config.yml."))
    defaults = _defaults()
    changed = {k: v for k, v in config.items() if k not in defaults or _plain(v) != _plain(defaults[k])}
    rest = {k: v for k, v in config.items() if k not in changed}
    rows = [[Cell(k, code=True), Cell(_shown(v)), Cell(_shown(defaults.get(k, "")))] for k, v in changed.items()]
    others = [[Cell(k, code=True), Cell(_shown(v))] for k, v in rest.items()]
    return section(
        "Configuration",
        table("Keys that differ from their defaults", ("key", "value", "default"), rows)
        if rows
        else note("Every key has its default."),
        details(f"{len(rest)} keys have their defaults", table("Keys with their defaults", ("key", "value"), others))
        if others
        else "",
    )


def pairs_section(heading: str, caption: str, values: Mapping[str, Any]) -> str:
    """Names and values."""
    rows = [[Cell(str(name), code=True), Cell(_shown(value))] for name, value in values.items()]
    return section(heading, table(caption, ("name", "value"), rows)) if rows else ""


def versions() -> dict[str, str]:
    """The versions of what is installed here."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _defaults() -> dict[str, Any]:
    from octavo.train.config import Config

    return {f.name: f.default for f in dataclasses.fields(Config) if f.default is not dataclasses.MISSING}


def _plain(value: Any) -> Any:
    return [_plain(x) for x in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return str(value)
