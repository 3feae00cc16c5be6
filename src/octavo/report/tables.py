"""The rows of tables: the plan, the collectives of a step, the configuration."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.report.format import TIMES
from octavo.report.page import plain

MOST_ROWS = 1500


def plan_rows(plan: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The matmuls of a plan in the form of `Plan.to_json`, the largest first, and its collectives by bytes."""
    if plan is None:
        return None
    rows, communication = sorted(plan["rows"], key=lambda row: -row["flops"]), plan.get("communication")
    total = sum(row["flops"] for row in rows) or 1
    return {
        "rows": [_plan_row(row, total, communication is not None) for row in rows[:MOST_ROWS]],
        "dim": [row["reason"] is not None for row in rows[:MOST_ROWS]],
        "count": len(rows),
        "quantized": sum(row["reason"] is None for row in rows),
        "share": plan["share"],
        "notes": plan["notes"],
        "residuals": [_residual_row(saved) for saved in plan.get("residuals", ())],
        "communication": communication,
        "collectives": _collectives(communication) if communication else [],
    }


def _plan_row(row: Mapping[str, Any], total: int, is_sharded: bool) -> list[Any]:
    times = "" if row["times"] == 1 else f"{row['times']} {TIMES} "
    first = [row["path"] or row["weight"] or "(top)", row["flops"] / total, row["op"], times + row["shapes"]]
    types = [row[name] for name in ("fwd", "dlhs", "drhs", "lowering", "bytes_before", "bytes_after")]
    return [*first, *types, row["reason"] or "", *([row["collective_bytes"]] if is_sharded else [])]


def _residual_row(saved: Mapping[str, Any]) -> list[Any]:
    values = ", ".join(saved["values"])
    times = "" if saved["times"] == 1 else f"{saved['times']} {TIMES} "
    return [saved["path"] or "(top)", times + values, saved["bytes_before"], saved["bytes_after"]]


def _collectives(communication: Mapping[str, Any]) -> list[list[Any]]:
    by_kind = communication["by_kind"].items()
    rows = [[kind, dtype, size] for kind, types in by_kind for dtype, size in types.items() if size]
    return [[*row, row[2] / communication["total"]] for row in sorted(rows, key=lambda row: -row[2])]


def config_rows(config: Mapping[str, Any]) -> dict[str, list[list[str]]] | None:
    """The keys of a training configuration that differ from their defaults, and the others."""
    if not config:
        return None
    from octavo.train.config import Config

    known = {f.name: f.default for f in dataclasses.fields(Config) if f.default is not dataclasses.MISSING}
    changed = {k: v for k, v in config.items() if k not in known or (v != known[k] and plain(v) != plain(known[k]))}
    return {
        "changed": [[k, plain(v), plain(known.get(k, ""))] for k, v in changed.items()],
        "defaults": [[k, plain(v)] for k, v in config.items() if k not in changed],
    }
