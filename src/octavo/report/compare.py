"""The page about recipes side by side, each over the same steps and seeds."""

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.report.markup import Cell, figure, missing, page, section, table, write
from octavo.report.scale import Point, smooth
from octavo.report.svg import Line, Panel, chart, whiskers
from octavo.report.tables import config_section, pairs_section, versions
from octavo.report.words import DASH, Number, known, percent, ratio, signed

FLOAT = "float"
_COLORS = 7
_NEEDED = ("steps", "runs", "table")
_COLUMNS = ("recipe", "loss", "gap", "95 % interval", "step time", "memory", "FLOPs")


def compare_report(comparison: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page about a comparison, the dictionary that `octavo.train.compare` gives, and return where it is.

    `runs` have a `name` ("float" or a recipe), a `seed`, `loss` and `eval_loss` as pairs of step and loss, and
    `step_seconds`. Rows of `table` have a `name`, a `loss`, the `gap` to float as a share of float's loss with the
    interval `gap_low` to `gap_high`, `step_ratio`, `memory_ratio` and `share`. What is not known is NaN or None.
    """
    lacking = [name for name in _NEEDED if name not in comparison]
    if lacking:
        raise ValueError(
            f"the comparison has no {' and no '.join(map(repr, lacking))}: it needs {', '.join(map(repr, _NEEDED))}"
        )
    groups = _groups(comparison["runs"])
    rows = comparison["table"]
    parts = [
        section("Result", _gap_chart(rows), _table(rows)),
        _curves("Loss by step", "training loss", groups, "loss"),
        _by_time(groups),
        _curves("Held-out loss by step", "loss on held-out text", groups, "eval_loss", every=1),
        config_section(comparison.get("config") or {}),
        pairs_section("Versions", "Installed where the runs were made", comparison.get("versions") or {}),
    ]
    foot = f"Written by octavo {versions()['octavo']}."
    return write(Path(path), page("Recipes side by side", _lead(comparison, groups), parts, foot))


def _lead(comparison: Mapping[str, Any], groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    recipes = [name for name in groups if name != FLOAT]
    seeds = {run.get("seed") for runs in groups.values() for run in runs}
    times = f"with each of {len(seeds)} seeds" if len(seeds) > 1 else "once"
    what = f"{len(recipes)} recipes" if len(recipes) != 1 else recipes[0]
    beside = " and float" if FLOAT in groups else ""
    first = f"{what}{beside} trained the same model on the same batches for {comparison['steps']} steps, {times}."
    gaps = {row["name"]: gap for row in comparison["table"] if (gap := known(row.get("gap"))) is not None}
    gaps.pop(FLOAT, None)
    if not gaps:
        return first
    best = min(gaps, key=lambda name: gaps[name])
    which = f"Of the recipes {best} has the lowest final loss" if len(gaps) > 1 else f"The final loss of {best} is"
    return f"{first} {which}{',' if len(gaps) > 1 else ''} {signed(gaps[best])} from float."


def _groups(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Runs by name, float first, the others in the order in which they come."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["name"] != FLOAT):
        groups.setdefault(run["name"], []).append(run)
    return groups


def _colored(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[str, int, Sequence[Mapping[str, Any]]]]:
    colors = itertools.cycle(range(1, _COLORS + 1))
    return [(name, 0 if name == FLOAT else next(colors), runs) for name, runs in groups.items()]


def _gap_chart(rows: Sequence[Mapping[str, Any]]) -> str:
    found = []
    for row in rows:
        gap, low, high = (known(row.get(name)) for name in ("gap", "gap_low", "gap_high"))
        if row["name"] != FLOAT and gap is not None:
            low, high = (None if x is None else 100 * x for x in (low, high))
            found.append((str(row["name"]), 100 * gap, low, high))
    if not found:
        return missing("There is no recipe to measure against float.")
    words = "; ".join(f"{name} {gap:+.2f} %" for name, gap, *_ in found)
    drawn = whiskers("Gap of the final loss to float", words, "final loss against float, %", found)
    intervals = "; whiskers are 95 % intervals" if any(low is not None for _, _, low, _ in found) else ""
    return figure(
        drawn, f"Distance of the final loss from float's: dots are means over seeds{intervals}. Lower is better."
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for row in rows:
        gap, low, high = (known(row.get(name)) for name in ("gap", "gap_low", "gap_high"))
        if row["name"] == FLOAT:
            gap = low = high = None
        inside = DASH if low is None or high is None else f"{(signed(low) or '')[:-2]} to {signed(high)}"
        loss, step, memory, share = (known(row.get(n)) for n in ("loss", "step_ratio", "memory_ratio", "share"))
        cells.append(
            [
                Cell(str(row["name"]), code=True),
                _number(loss, DASH if loss is None else f"{loss:.4f}"),
                _number(gap, signed(gap)),
                _number(low, inside),
                _number(step, ratio(step)),
                _number(memory, ratio(memory)),
                _number(share, percent(share)),
            ]
        )
    if not cells:
        return missing("The table of the comparison is empty.")
    caption = "Gap, time and memory of each recipe against float; share of matmul FLOPs in low precision"
    return table(caption, _COLUMNS, cells, sortable=True)


def _number(value: Number | None, text: str | None) -> Cell:
    # Infinity is aligned like a number, and sorts by its text.
    return Cell(text or DASH, float("inf") if value is None else value)


def _mean(runs: Sequence[Sequence[Point]]) -> tuple[list[Point], list[tuple[Number, Number, Number]]]:
    """The mean over runs at each step that all of them have, and the lowest and highest."""
    tables = [dict(points) for points in runs]
    steps = sorted(set.intersection(*(set(t) for t in tables))) if tables else []
    mean: list[Point] = []
    band: list[tuple[Number, Number, Number]] = []
    for step in steps:
        values = [y for t in tables if (y := t[step]) is not None]
        whole = len(values) == len(tables)
        mean.append((step, statistics.fmean(values) if whole else None))
        if whole and len(values) > 1:
            band.append((step, min(values), max(values)))
    return mean, band


def _points(run: Mapping[str, Any], name: str, window: int) -> list[Point]:
    return smooth([(step, known(y)) for step, y in run.get(name) or ()], window)


def _window(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> int:
    return max(1, max((len(run.get("loss") or ()) for runs in groups.values() for run in runs), default=0) // 50)


def _lines(groups: Mapping[str, Sequence[Mapping[str, Any]]], name: str, window: int) -> list[Line]:
    lines = []
    for label, color, runs in _colored(groups):
        mean, band = _mean([_points(run, name, window) for run in runs])
        if any(y is not None for _, y in mean):
            lines.append(Line(label, mean, color, band=band))
    return lines


def _curves(
    heading: str, what: str, groups: Mapping[str, Sequence[Mapping[str, Any]]], name: str, *, every: int | None = None
) -> str:
    """Losses, and below them their distances from float's."""
    window = every or _window(groups)
    lines = _lines(groups, name, window)
    if not lines:
        return section(heading, missing(f"The runs have no {what}."))
    panels = [Panel("Loss", lines, height=240, log=True)]
    base = next((dict(line.points) for line in lines if line.name == FLOAT), {})
    gaps = []
    for line in lines:
        points = [(x, 100 * (y - z) / z if y is not None and (z := base.get(x)) else None) for x, y in line.points]
        if line.name != FLOAT and any(y is not None for _, y in points):
            gaps.append(Line(line.name, points, line.color))
    if gaps:
        panels.append(Panel("Above float, %", gaps, height=150, zero=True))
    averaged = f"a mean of {window} steps" if window > 1 else "each step"
    bands = "; bands reach from the lowest to the highest seed" if any(line.band for line in lines) else ""
    caption = f"The {what}, {averaged}{bands}." + (" Below, the distance from float at the same step." if gaps else "")
    return section(heading, figure(chart(heading, _ends(lines), "step", panels), caption, lines))


def _by_time(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Losses over the time that training took to reach them."""
    heading = "Loss by time"
    lines = []
    for line in _lines(groups, "loss", _window(groups)):
        clocks = [list(itertools.accumulate(run.get("step_seconds") or ())) for run in groups[line.name]]
        least = min(map(len, clocks))
        at = {int(x): statistics.fmean(clock[int(x)] for clock in clocks) for x, _ in line.points if x < least}
        points = [(at[int(x)], y) for x, y in line.points if int(x) in at]
        band = [(at[int(x)], low, high) for x, low, high in line.band if int(x) in at]
        if any(y is not None for _, y in points):
            lines.append(Line(line.name, points, line.color, band=band))
    if not lines:
        return section(heading, missing("The runs have no times of their steps."))
    drawn = chart(heading, _ends(lines), "seconds of training", [Panel("Loss", lines, height=240, log=True)])
    return section(heading, figure(drawn, "The same losses over the sum of the times of all steps so far.", lines))


def _ends(lines: Sequence[Line]) -> str:
    last = [(line.name, next((y for _, y in reversed(line.points) if y is not None), None)) for line in lines]
    return "At the end: " + ", ".join(f"{name} {y:.4f}" for name, y in last if y is not None) + "."
