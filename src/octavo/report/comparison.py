"""The page about recipes side by side, each trained for the same steps and seeds."""

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.report.axis import Point, last, smooth
from octavo.report.charts import Dot, DotChart, Line, LineChart, Panel
from octavo.report.format import DASH, Number, finite
from octavo.report.layers import error_maps
from octavo.report.page import write_page
from octavo.report.run import EVAL_LOSS, FLOAT, LOSS, STEP_SECONDS, Run, divide, tail
from octavo.report.tables import config_rows, plan_rows

type Groups = Mapping[str, Sequence[Mapping[str, Any]]]
"""Runs by name."""

_COLORS = 7
_NEEDED = ("steps", "runs", "table")


def compare_report(comparison: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page about a comparison.

    Args:
      comparison: What `octavo.train.compare` returns. `runs` have a `name` ("float" or a recipe), a `seed`, `loss` and
        `eval_loss` as pairs of step and loss, and `step_seconds`; they may have a `plan`, `telemetry` and `histograms`
        of weights. Rows of `table` have a `name`, a `loss`, the relative `gap` to the loss in float with the interval
        `gap_low` to `gap_high`, `step_ratio`, `memory_ratio` and `share`. Unknown numbers are NaN or None.
      path: Where to write the page.

    Returns:
      The path of the page.
    """
    lacking = [name for name in _NEEDED if name not in comparison]
    if lacking:
        raise ValueError(
            f"the comparison has no {' and no '.join(map(repr, lacking))}: it needs {', '.join(map(repr, _NEEDED))}"
        )
    groups = _groups(comparison["runs"], FLOAT)
    gaps = {row["name"]: gap for row in comparison["table"] if (gap := finite(row.get("gap"))) is not None}
    gaps.pop(FLOAT, None)
    return write_page(
        path,
        "comparison.html",
        title="Recipes side by side",
        comparison=comparison,
        recipes=[name for name in groups if name != FLOAT],
        has_float=FLOAT in groups,
        seeds=len({run.get("seed") for runs in groups.values() for run in runs}),
        gaps=gaps,
        unmeasured={row["name"]: ends for row in comparison["table"] if (ends := _interval_around_zero(row))},
        findings=findings(comparison),
        fits={name: _fit(runs) for name, runs in groups.items()},
        config=config_rows(comparison.get("config") or {}),
    )


def _interval_around_zero(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """The interval of a gap if it contains 0, so that no difference is measured."""
    low, high = finite(row.get("gap_low")), finite(row.get("gap_high"))
    return (low, high) if low is not None and high is not None and low <= 0 <= high else None


def findings(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """The result, losses by step and by time, held-out losses, and speed."""
    base = str(comparison.get("base", FLOAT))
    groups = _groups(comparison["runs"], base)
    window = max(1, max((len(run.get("loss") or ()) for runs in groups.values() for run in runs), default=0) // 50)
    lines = _lines(groups, "loss", window, base)
    return {
        "base": base,
        "window": window,
        "gaps": _gap_chart(comparison["table"], base),
        "table": [_row(row, base) for row in comparison["table"]],
        "loss": _loss_chart("Loss by step", lines, base),
        "loss_by_time": _chart_by_time(groups, lines),
        "eval_loss": _loss_chart("Held-out loss by step", _lines(groups, "eval_loss", 1, base), base),
        "speed": _speed_chart(groups, base),
        "medians": [_medians(name, runs) for name, runs in groups.items()],
    }


def _fit(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a recipe quantizes, and with which error, as far as its runs recorded it."""
    telemetry, histograms, plan = (
        next((run[name] for run in runs if run.get(name)), None) for name in ("telemetry", "histograms", "plan")
    )
    return {"errors": error_maps(telemetry or ()), "worst": histograms or (), "plan": plan_rows(plan)}


def _groups(runs: Sequence[Mapping[str, Any]], base: str) -> dict[str, list[Mapping[str, Any]]]:
    """Runs by name, the baseline first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["name"] != base):
        groups.setdefault(run["name"], []).append(run)
    return groups


def _gap_chart(rows: Sequence[Mapping[str, Any]], base: str) -> DotChart | None:
    dots = []
    for row in rows:
        gap, *ends = (finite(row.get(name)) for name in ("gap", "gap_low", "gap_high"))
        if row["name"] != base and gap is not None:
            dots.append(Dot(str(row["name"]), 100 * gap, *(None if x is None else 100 * x for x in ends)))
    title, label = f"Gap of the final loss to {base}", f"final loss against {base}, %"
    return DotChart(title, label, dots, fmt="{:+.2f} %") if dots else None


def _row(row: Mapping[str, Any], base: str) -> list[Any]:
    loss, *rest = (finite(row.get(n)) for n in ("loss", "step_ratio", "memory_ratio", "share"))
    gap, low, high = (finite(row.get(n)) if row["name"] != base else None for n in ("gap", "gap_low", "gap_high"))
    return [row["name"], loss, gap, None if low is None or high is None else (low, high), *rest]


def _lines(groups: Groups, name: str, window: int, base: str) -> list[Line]:
    """The mean of each group at the steps that all its runs have, with a band from the lowest to the highest."""
    lines, colors = [], itertools.cycle(range(1, _COLORS + 1))
    for label, runs in groups.items():
        color = 0 if label == base else next(colors)
        series = [dict(smooth([(x, finite(y)) for x, y in run.get(name) or ()], window)) for run in runs]
        mean: list[Point] = []
        band: list[tuple[Number, Number, Number]] = []
        for step in sorted(set.intersection(*map(set, series))):
            values = [y for one in series if (y := one[step]) is not None]
            complete = len(values) == len(series)
            mean.append((step, statistics.fmean(values) if complete else None))
            if complete and len(values) > 1:
                band.append((step, min(values), max(values)))
        if last(mean) is not None:
            lines.append(Line(label, mean, color, band=band))
    return lines


def _loss_chart(title: str, lines: Sequence[Line], base: str) -> LineChart | None:
    """Losses, and below them their differences from the baseline's."""
    panels = [Panel("Nats per token", lines, height=240, log=True)]
    reference = next((dict(line.points) for line in lines if line.name == base), {})
    gaps = []
    for line in lines:
        points = [(x, 100 * (y - z) / z if y is not None and (z := reference.get(x)) else None) for x, y in line.points]
        if line.name != base and last(points) is not None:
            gaps.append(Line(line.name, points, line.color))
    if gaps:
        panels.append(Panel(f"Above {base}, %", gaps, height=150, zero=True))
    return LineChart(title, "step", panels) if lines else None


def _chart_by_time(groups: Groups, losses: Sequence[Line]) -> LineChart | None:
    lines = []
    for line in losses:
        clocks = [list(itertools.accumulate(run.get("step_seconds") or ())) for run in groups[line.name]]
        at = {i: statistics.fmean(times) for i, times in enumerate(zip(*clocks, strict=False))}
        points = [(at[int(x)], y) for x, y in line.points if int(x) in at]
        band = [(at[int(x)], low, high) for x, low, high in line.band if int(x) in at]
        if last(points) is not None:
            lines.append(Line(line.name, points, line.color, band=band))
    panel = Panel("Nats per token", lines, height=240, log=True)
    return LineChart("Loss by time", "seconds of training", [panel]) if lines else None


def _speed_chart(groups: Groups, base: str) -> DotChart | None:
    """Step times relative to the baseline's: to the step that was interleaved with it, or else to the median."""
    dots = []
    medians = [statistics.median(run["step_seconds"]) for run in groups.get(base, ()) if run.get("step_seconds")]
    for name, runs in groups.items():
        ratios: list[float] = []
        for run in runs if name != base else ():
            times, others = run.get("step_seconds") or (), run.get("float_seconds") or ()
            if not others and medians:
                others = [statistics.fmean(medians)] * len(times)
            ratios += [a / b for a, b in list(zip(times, others, strict=False))[2:] if b]
        if ratios:
            ratios.sort()
            dots.append(Dot(name, *(ratios[round(share * (len(ratios) - 1))] for share in (0.5, 0.1, 0.9))))
    return DotChart("Step time", f"step time over that of {base}", dots, mark=1.0) if dots else None


def _medians(name: str, runs: Sequence[Mapping[str, Any]]) -> list[Any]:
    times = [t for run in runs if (found := run.get("step_seconds")) for t in found[2:] or found]
    memory = max((run["memory_bytes"] for run in runs if run.get("memory_bytes")), default=None)
    return [name, statistics.median(times) if times else None, memory]


def runs_together(runs: Sequence[tuple[str, Run]]) -> dict[str, Any]:
    """Training runs against the float one, or against the first where none or several are in float."""
    distinct = len({run.precision for _, run in runs}) == len(runs)
    named = {(run.precision if distinct else name): run for name, run in runs}
    floats = [name for name, run in named.items() if run.precision == FLOAT]
    base = floats[0] if len(floats) == 1 else next(iter(named))
    comparison = {
        "base": base,
        "runs": [_as_run(name, run) for name, run in named.items()],
        "table": [_as_row(name, run, named[base]) for name, run in named.items()],
    }
    return {"findings": findings(comparison), "runs": named, "differences": _differences(named)}


def _as_run(name: str, run: Run) -> dict[str, Any]:
    times = [y for _, y in run.series(STEP_SECONDS) if y is not None]
    losses = {"loss": run.series(LOSS), "eval_loss": run.series(EVAL_LOSS)}
    return {"name": name, **losses, "step_seconds": times, "memory_bytes": run.memory}


def _as_row(name: str, run: Run, base: Run) -> dict[str, Any]:
    """As a row of a comparison: the held-out loss if both have one, else the mean over the last steps."""
    held_out = all(one.series(EVAL_LOSS) for one in (run, base))
    loss, other = (one.series(EVAL_LOSS)[-1][1] if held_out else tail(one.series(LOSS))[0] for one in (run, base))
    return {
        "name": name,
        "loss": loss,
        "gap": (loss - other) / other if loss is not None and other else None,
        "step_ratio": divide(run.step_seconds, base.step_seconds),
        "memory_ratio": divide(run.memory, base.memory),
        "share": 0.0 if run.precision == FLOAT else run.share(),
    }


def _differences(runs: Mapping[str, Run]) -> list[list[str]]:
    """The keys of the configurations that differ."""
    rows = []
    for key in dict.fromkeys(key for run in runs.values() for key in run.config):
        values = [str(run.config.get(key, DASH)) for run in runs.values()]
        if key not in ("run_name", "base_output_directory") and len(set(values)) > 1:
            rows.append([key, *(value or "''" for value in values)])
    return rows


def comparisons_together(found: Sequence[tuple[str, Mapping[str, Any]]]) -> list[list[Any]]:
    """The rows of several comparisons."""
    names = ("loss", "gap", "step_ratio", "memory_ratio")
    return [
        [name, row["name"], comparison["steps"], *(finite(row.get(key)) for key in names)]
        for name, comparison in found
        for row in comparison["table"]
    ]
