"""The page about one run, alone or against another."""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from octavo.report.histograms import histograms_section
from octavo.report.markup import Cell, Tile, figure, missing, note, page, section, table, tiles, write
from octavo.report.run import EVAL_LOSS, LOSS, STEP_SECONDS, TFLOPS, TOKENS, Run, float_twin, read_run
from octavo.report.scale import Point, smooth
from octavo.report.svg import Line, Panel, chart
from octavo.report.tables import config_section, pairs_section, plan_section, versions
from octavo.report.telemetry import heat_section, telemetry_section
from octavo.report.weights import worst_weights
from octavo.report.words import DASH, Number, percent, ratio, seconds, signed, size


def write_report(
    run_directory: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the page about a run to `path`, by default `report.html` in its directory, and return where it is.

    `against` is the directory of the run to measure this one by, as a rule the same in float; by default a float run
    beside this one whose configuration is otherwise the same, if there is one. What the run did not write down is said
    to be missing. The page is one file that loads nothing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as runs:
    ...     run = Path(runs, "demo")
    ...     run.mkdir()
    ...     _ = (run / "metrics.jsonl").write_text('{"step": 0, "learning/loss": 4.0}')
    ...     write_report(run).name
    'report.html'
    """
    run = read_run(run_directory)
    base = float_twin(run) if against is None else read_run(against)
    worst, about = worst_weights(run)
    parts = [
        *(note(f"{problem}.") for problem in (*run.problems, *(base.problems if base else ()))),
        tiles(_tiles(run, base)),
        _loss(run, base),
        _speed(run, base),
        telemetry_section(run.telemetry),
        heat_section(run.telemetry),
        histograms_section(worst, about=about),
        plan_section(run.plan),
        config_section(run.config),
        pairs_section("Data", "What it was trained on", run.data),
        pairs_section("Versions", "Installed where this page was written", versions()),
    ]
    foot = f"Written by octavo {versions()['octavo']} from the files of {run.directory.resolve().name}."
    return write(Path(path) if path else run.directory / "report.html", page(run.name, _lead(run, base), parts, foot))


def _lead(run: Run, base: Run | None) -> str:
    """What was run, in two sentences."""
    config, done = run.config, len(run.series(LOSS))
    layers, width = config.get("base_num_decoder_layers"), config.get("base_emb_dim")
    model = f"A decoder of {layers} layers, {width} wide," if layers and width else "A model"
    of = f" of {config['steps']}" if config.get("steps") not in (None, done) else ""
    data = run.data.get("name") or config.get("dataset_type")
    how = "in float" if run.precision == "float" else f"quantized by {run.precision}"
    first = f"{model} trained for {done}{of} steps{f' on {data}' if data else ''}, {how}."
    if base is not None:
        other = "in float" if base.precision == "float" else f"quantized by {base.precision}"
        return f"{first} It is measured against {base.name}, {other}."
    share = run.share()
    if share is not None:
        return f"{first} Low precision does {percent(share)} of the FLOPs of its matrix products."
    return f"{first} No other run was given to measure it by."


def _tiles(run: Run, base: Run | None) -> list[Tile]:
    alone = "no run to compare with" if base is None else "not recorded by both"
    loss, window = tail(run.series(LOSS))
    final = None if loss is None else f"{loss:.4f}"
    evals = [y for _, y in run.series(EVAL_LOSS) if y is not None]
    about = _window(window) + (f"; held out {evals[-1]:.4f}" if evals else "")
    gap, over = tail(_gaps(run, base) if base else [])
    step = _quotient(run.step_seconds, base.step_seconds if base else None)
    memory = _quotient(run.memory, base.memory if base else None)
    found = [
        Tile("Final loss", final, about if final else "no loss was recorded"),
        Tile(
            "Gap to float" if base is None or base.precision == "float" else "Gap",
            signed(gap),
            _window(over) if gap is not None else alone,
        ),
        Tile(
            "Step time",
            ratio(step) or (seconds(run.step_seconds) if run.step_seconds else None),
            f"{seconds(run.step_seconds)} against {seconds(base.step_seconds)}" if base and step else "median",
        ),
        _memory_tile(run, base, memory),
        _share_tile(run),
    ]
    return found


def _memory_tile(run: Run, base: Run | None, memory: Number | None) -> Tile:
    if base and memory:
        return Tile("Memory", ratio(memory), f"{size(run.memory)} against {size(base.memory)}")
    if run.memory:
        return Tile("Memory", size(run.memory), "of a step")
    rows = (run.plan or {}).get("rows", [])
    before, after = (sum(row[f"bytes_{when}"] for row in rows) for when in ("before", "after"))
    if before:
        return Tile("Operands", ratio(after / before), f"{size(after)} for {size(before)}, as planned")
    return Tile("Memory", None, "not recorded")


def _share_tile(run: Run) -> Tile:
    both, forward, backward = run.share(), run.share(False), run.share(True)
    if both is not None:
        passes = [f"{percent(x)} {name}" for x, name in ((forward, "forward"), (backward, "backward")) if x is not None]
        return Tile("FLOPs quantized", percent(both), ", ".join(passes))
    if run.plan is not None:
        return Tile("FLOPs quantized", percent(run.plan["share"]), "of the forward pass, as planned")
    return Tile("FLOPs quantized", percent(0.0) if run.precision == "float" else None, "no plan was recorded")


def _window(steps: int) -> str:
    return "of the last step" if steps == 1 else f"mean of the last {steps} steps"


def _quotient(a: Number | None, b: Number | None) -> Number | None:
    return a / b if a is not None and b else None


def tail(points: Sequence[Point]) -> tuple[Number | None, int]:
    """The mean over the last tenth of the steps, and how many these are; None if one of them is not finite.

    >>> tail([(0, 4.0), (1, 2.0)]), tail([])
    ((2.0, 1), (None, 0))
    """
    last = [y for _, y in points[-max(1, len(points) // 10) :]]
    finite = [y for y in last if y is not None]
    return (statistics.fmean(finite) if last and len(finite) == len(last) else None), len(last)


def _gaps(run: Run, base: Run) -> list[Point]:
    """By how much the loss lies above the other's, as a share of it, where both have one."""
    other = dict(base.series(LOSS))
    both = [(step, y, other[step]) for step, y in run.series(LOSS) if step in other]
    return [(step, None if y is None or not z else (y - z) / z) for step, y, z in both]


def _names(run: Run, base: Run | None) -> tuple[str, str]:
    """What lines are called: the recipes if they tell the runs apart, else the runs' own names."""
    if base is None:
        return "", ""
    return (run.precision, base.precision) if run.precision != base.precision else (run.name, base.name)


def _loss(run: Run, base: Run | None) -> str:
    points = run.series(LOSS)
    if not points:
        return section("Loss", missing("No loss was recorded."))
    name, other = _names(run, base)
    window = max(1, len(points) // 50)
    evals = run.series(EVAL_LOSS)
    lines = [Line(name or ("training" if evals else ""), smooth(points, window), 1, raw=points)]
    panels = []
    caption = f"Training loss{f', mean of {window} steps over single steps' if window > 1 else ''}."
    if base is not None and base.series(LOSS):
        lines.insert(0, Line(other, smooth(base.series(LOSS), window), 0, raw=base.series(LOSS)))
        gaps = [(step, None if y is None else 100 * y) for step, y in _gaps(run, base)]
        difference = Line("", smooth(gaps, window), 1, raw=gaps)
        panels = [Panel(f"{name} above {other}, %", [difference], height=110, zero=True)] if gaps else []
        caption += f" Below, its distance from {other} at the same step." if gaps else ""
    if evals:
        lines.append(Line("held out", evals, 2))
    bad = [step for step, y in points if y is None]
    if bad:
        caption += f" It was not finite at {len(bad)} step{'s' * (len(bad) > 1)}, first at step {bad[0]}."
    text = f"{len(points)} steps; the mean over the last tenth is {_word(tail(points)[0])}."
    loss = Panel("Nats per token", lines, height=240, log=True)
    return section("Loss", figure(chart("Loss by step", text, "step", [loss, *panels]), caption, lines))


def _speed(run: Run, base: Run | None) -> str:
    heading = "Speed and memory"
    points = run.series(STEP_SECONDS)
    if not points or run.step_seconds is None:
        return section(heading, missing("No step times were recorded."), _memory(run, base))
    name, other = _names(run, base)
    lines = [Line(name, points, 1)]
    if base is not None and base.series(STEP_SECONDS):
        lines.insert(0, Line(other, base.series(STEP_SECONDS), 0))
    # Steps that compile or wait would flatten all others.
    values = sorted(y for line in lines for _, y in line.points if y is not None)
    top = 1.6 * values[int(0.9 * (len(values) - 1))]
    above = [y for y in values if y > top]
    caption = f"The median is {seconds(run.step_seconds)}."
    if above:
        caption += f" What took longer than {seconds(top)} is drawn at the edge; the longest took {seconds(above[-1])}."
    if len(lines) > 1:
        caption += (
            " The runs were not made side by side, as octavo compare makes them, so their times may differ by chance."
        )
    panel = Panel("Seconds per step", lines, height=130, zero=True, top=top)
    drawn = figure(chart("Step time", caption, "step", [panel]), caption, lines)
    return section(heading, drawn, _memory(run, base))


def _memory(run: Run, base: Run | None) -> str:
    """What the charts do not say about the runs, one row each."""
    runs = [run] if base is None else [run, base]
    rows = []
    for one in runs:
        tokens, flops = (one.median(name) for name in (TOKENS, TFLOPS))
        rows.append(
            [
                Cell(one.name, code=True),
                Cell(one.precision),
                Cell(seconds(one.step_seconds), one.step_seconds or 0.0),
                Cell(DASH if tokens is None else f"{tokens:,.0f}", tokens or 0.0),
                Cell(DASH if flops is None else f"{1000 * flops:.3g}", flops or 0.0),
                Cell(size(one.memory), one.memory or 0.0),
            ]
        )
    columns = ("run", "precision", "step time", "tokens/s", "GFLOP/s", "memory of a step")
    known = any(cell.text != DASH for row in rows for cell in row[2:])
    return table("Medians over steps; tokens and FLOPs of each device", columns, rows) if known else ""


def _word(value: Number | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
