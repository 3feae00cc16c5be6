"""The page about recipes side by side, each over the same steps and seeds."""

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.report.histograms import histograms_section
from octavo.report.markup import Cell, figure, missing, page, section, table, write
from octavo.report.scale import Point, smooth
from octavo.report.svg import Line, Panel, chart, whiskers
from octavo.report.tables import config_section, pairs_section, plan_section, versions
from octavo.report.telemetry import heat_section
from octavo.report.words import DASH, Number, known, percent, ratio, seconds, signed, size

FLOAT = "float"

type Groups = Mapping[str, Sequence[Mapping[str, Any]]]
"""Runs by name."""

_COLORS = 7
_NEEDED = ("steps", "runs", "table")
_COLUMNS = ("recipe", "loss", "gap", "95 % interval", "step time", "memory", "FLOPs")


def compare_report(comparison: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page about a comparison, the dictionary that `octavo.train.compare` gives, and return where it is.

    `runs` have a `name` ("float" or a recipe), a `seed`, `loss` and `eval_loss` as pairs of step and loss, and
    `step_seconds`; they may have a `plan`, lines of `telemetry`, and `histograms` of weights. Rows of `table` have a
    `name`, a `loss`, the `gap` to float as a share of float's loss with the interval `gap_low` to `gap_high`,
    `step_ratio`, `memory_ratio` and `share`. What is not known is NaN or None.
    """
    lacking = [name for name in _NEEDED if name not in comparison]
    if lacking:
        raise ValueError(
            f"the comparison has no {' and no '.join(map(repr, lacking))}: it needs {', '.join(map(repr, _NEEDED))}"
        )
    parts = [
        *comparison_parts(comparison),
        *_fits(_groups(comparison["runs"])),
        config_section(comparison.get("config") or {}),
        pairs_section("Versions", "Installed where the runs were made", comparison.get("versions") or {}),
    ]
    foot = f"Written by octavo {versions()['octavo']}."
    lead = _lead(comparison, _groups(comparison["runs"]))
    return write(Path(path), page("Recipes side by side", lead, parts, foot))


def comparison_parts(comparison: Mapping[str, Any]) -> list[str]:
    """The sections about what was found: the result, losses by step and by time, held out, speed."""
    base = str(comparison.get("base", FLOAT))
    groups = _groups(comparison["runs"], base)
    rows = comparison["table"]
    return [
        section("Result", _gap_chart(rows, base), _table(rows, base)),
        _curves("Loss by step", "training loss", groups, "loss", base),
        _by_time(groups, base),
        _curves("Held-out loss by step", "loss on held-out text", groups, "eval_loss", base, every=1),
        _speed(groups, base),
    ]


def _fits(groups: Groups) -> list[str]:
    """What each recipe quantizes, and how well its formats fit, as far as its runs tell."""
    parts = []
    for name, runs in groups.items():
        telemetry, histograms, plan = (
            next((run[part] for run in runs if run.get(part)), None) for part in ("telemetry", "histograms", "plan")
        )
        if telemetry is not None:
            parts.append(heat_section(telemetry, f"Error by layer, {name}"))
        if histograms is not None:
            about = "Weights with the lowest signal to noise at the end of the run."
            parts.append(histograms_section(histograms, about=about, heading=f"Worst tensors, {name}"))
        if plan is not None:
            parts.append(plan_section(plan, f"Plan, {name}"))
    return parts


def _lead(comparison: Mapping[str, Any], groups: Groups) -> str:
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


def _groups(runs: Sequence[Mapping[str, Any]], base: str = FLOAT) -> dict[str, list[Mapping[str, Any]]]:
    """Runs by name, the one that others are measured against first, these in the order in which they come."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["name"] != base):
        groups.setdefault(run["name"], []).append(run)
    return groups


def _colored(groups: Groups, base: str) -> list[tuple[str, int, Sequence[Mapping[str, Any]]]]:
    colors = itertools.cycle(range(1, _COLORS + 1))
    return [(name, 0 if name == base else next(colors), runs) for name, runs in groups.items()]


def _gap_chart(rows: Sequence[Mapping[str, Any]], base: str) -> str:
    found = []
    for row in rows:
        gap, low, high = (known(row.get(name)) for name in ("gap", "gap_low", "gap_high"))
        if row["name"] != base and gap is not None:
            low, high = (None if x is None else 100 * x for x in (low, high))
            found.append((str(row["name"]), 100 * gap, low, high))
    if not found:
        return missing(f"There is nothing to measure against {base}.")
    words = "; ".join(f"{name} {gap:+.2f} %" for name, gap, *_ in found)
    drawn = whiskers(f"Gap of the final loss to {base}", words, f"final loss against {base}, %", found)
    intervals = "; whiskers are 95 % intervals" if any(low is not None for _, _, low, _ in found) else ""
    return figure(
        drawn, f"Distance of the final loss from that of {base}: dots are means over seeds{intervals}. Lower is better."
    )


def _table(rows: Sequence[Mapping[str, Any]], base: str) -> str:
    cells = []
    for row in rows:
        gap, low, high = (known(row.get(name)) for name in ("gap", "gap_low", "gap_high"))
        if row["name"] == base:
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
    caption = f"Gap, time and memory of each against {base}; share of matmul FLOPs in low precision"
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


def _window(groups: Groups) -> int:
    return max(1, max((len(run.get("loss") or ()) for runs in groups.values() for run in runs), default=0) // 50)


def _lines(groups: Groups, name: str, window: int, base: str) -> list[Line]:
    lines = []
    for label, color, runs in _colored(groups, base):
        mean, band = _mean([_points(run, name, window) for run in runs])
        if any(y is not None for _, y in mean):
            lines.append(Line(label, mean, color, band=band))
    return lines


def _curves(heading: str, what: str, groups: Groups, name: str, base: str, *, every: int | None = None) -> str:
    """Losses, and below them their distances from float's."""
    window = every or _window(groups)
    lines = _lines(groups, name, window, base)
    if not lines:
        return section(heading, missing(f"The runs have no {what}."))
    panels = [Panel("Nats per token", lines, height=240, log=True)]
    floor = next((dict(line.points) for line in lines if line.name == base), {})
    gaps = []
    for line in lines:
        points = [(x, 100 * (y - z) / z if y is not None and (z := floor.get(x)) else None) for x, y in line.points]
        if line.name != base and any(y is not None for _, y in points):
            gaps.append(Line(line.name, points, line.color))
    if gaps:
        panels.append(Panel(f"Above {base}, %", gaps, height=150, zero=True))
    averaged = f"a mean of {window} steps" if window > 1 else "each step"
    bands = "; bands reach from the lowest to the highest seed" if any(line.band for line in lines) else ""
    caption = f"The {what}, {averaged}{bands}." + (
        f" Below, the distance from {base} at the same step." if gaps else ""
    )
    return section(heading, figure(chart(heading, _ends(lines), "step", panels), caption, lines))


def _by_time(groups: Groups, base: str) -> str:
    """Losses over the time that training took to reach them."""
    heading = "Loss by time"
    lines = []
    for line in _lines(groups, "loss", _window(groups), base):
        clocks = [list(itertools.accumulate(run.get("step_seconds") or ())) for run in groups[line.name]]
        least = min(map(len, clocks))
        at = {int(x): statistics.fmean(clock[int(x)] for clock in clocks) for x, _ in line.points if x < least}
        points = [(at[int(x)], y) for x, y in line.points if int(x) in at]
        band = [(at[int(x)], low, high) for x, low, high in line.band if int(x) in at]
        if any(y is not None for _, y in points):
            lines.append(Line(line.name, points, line.color, band=band))
    if not lines:
        return section(heading, missing("The runs have no times of their steps."))
    drawn = chart(heading, _ends(lines), "seconds of training", [Panel("Nats per token", lines, height=240, log=True)])
    return section(
        heading, figure(drawn, "The same losses over the sum of the times of all steps so far.", lines, x="s")
    )


def _speed(groups: Groups, base: str) -> str:
    """Times of steps over those of the base: of the step that was taken in turn where there is one, else its median."""
    heading, rows = "Speed and memory", []
    median = [statistics.median(run["step_seconds"]) for run in groups.get(base, ()) if run.get("step_seconds")]
    for name, runs in groups.items():
        found: list[float] = []
        for run in runs if name != base else ():
            times, others = run.get("step_seconds") or (), run.get("float_seconds") or ()
            if not others and median:
                others = [statistics.fmean(median)] * len(times)
            found += [a / b for a, b in list(zip(times, others, strict=False))[2:] if b]
        if found:
            found.sort()
            low, middle, high = (found[round(share * (len(found) - 1))] for share in (0.1, 0.5, 0.9))
            rows.append((name, middle, low, high))
    if not rows:
        return ""
    words = "; ".join(f"{name} {middle:.2f}" for name, middle, *_ in rows)
    drawn = whiskers("Step time", words, f"step time over that of {base}", rows, mark=1.0)
    cells = []
    for name, runs in groups.items():
        times, memory = ([run[key] for run in runs if run.get(key)] for key in ("step_seconds", "memory_bytes"))
        step = statistics.median(t for one in times for t in one[2:] or one) if times else None
        cells.append([Cell(name, code=True), Cell(seconds(step), step or 0.0), _bytes(memory)])
    told = table("Medians of steps, and temporary memory of a step", ("run", "step time", "memory"), cells)
    caption = "Medians of the ratio over steps, with the interval that holds 80 % of them. Below 1 is faster."
    return section(heading, figure(drawn, caption, data=told))


def _bytes(found: Sequence[Number]) -> Cell:
    most = max(found, default=None)
    return Cell(size(most), most or 0.0)


def _ends(lines: Sequence[Line]) -> str:
    last = [(line.name, next((y for _, y in reversed(line.points) if y is not None), None)) for line in lines]
    return "At the end: " + ", ".join(f"{name} {y:.4f}" for name, y in last if y is not None) + "."
