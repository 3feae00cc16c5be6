"""The page about one training run, alone or against another."""

import os
from pathlib import Path

from octavo.report.axis import Point, smooth
from octavo.report.charts import Line, LineChart, Panel
from octavo.report.layers import error_maps, telemetry_charts, worst_sites
from octavo.report.page import versions, write_page
from octavo.report.run import EVAL_LOSS, LOSS, STEP_SECONDS, Run, float_twin, read_run, tail
from octavo.report.tables import config_rows, plan_rows
from octavo.report.weights import worst_weights


def write_report(
    run_directory: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the page about a training run, one self-contained file.

    Args:
      run_directory: The directory of the run. The page says which of its files are missing.
      against: The directory of the run to compare with, as a rule the same in float; by default a float run next to
        this one whose configuration is otherwise the same, if there is one.
      path: Where to write the page, by default `report.html` in the directory.

    Returns:
      The path of the page.

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
    losses = run.series(LOSS)
    gap, gap_steps = tail(_gaps(run, base) if base else [])
    return write_page(
        path or run.directory / "report.html",
        "run.html",
        title=run.name,
        run=run,
        base=base,
        final=tail(losses),
        held_out=[y for _, y in run.series(EVAL_LOSS) if y is not None],
        gap=gap,
        gap_steps=gap_steps,
        not_finite=[step for step, y in losses if y is None],
        window=_window(run),
        loss=_loss_chart(run, base) if losses else None,
        speed=_speed_chart(run, base) if run.step_seconds is not None else None,
        fits=telemetry_charts(run.telemetry),
        worst_sites=worst_sites(run.telemetry[-1]) if run.telemetry else [],
        errors=error_maps(run.telemetry),
        worst=worst,
        about_worst=about,
        plan=plan_rows(run.plan),
        config=config_rows(run.config),
        versions=versions(),
    )


def _window(run: Run) -> int:
    """The number of steps that losses are averaged over."""
    return max(1, run.steps // 50)


def _gaps(run: Run, base: Run) -> list[Point]:
    """The difference of the losses, relative to the other's, at the steps that both have."""
    other = dict(base.series(LOSS))
    both = [(step, y, other[step]) for step, y in run.series(LOSS) if step in other]
    return [(step, None if y is None or not z else (y - z) / z) for step, y, z in both]


def _names(run: Run, base: Run | None) -> tuple[str, str]:
    """The names of the lines: the recipes if they differ, else those of the runs."""
    if base is None:
        return "", ""
    return (run.precision, base.precision) if run.precision != base.precision else (run.name, base.name)


def _loss_chart(run: Run, base: Run | None) -> LineChart:
    points, evals, window = run.series(LOSS), run.series(EVAL_LOSS), _window(run)
    name, other = _names(run, base)
    lines, panels = [Line(name or ("training" if evals else ""), smooth(points, window), 1, raw=points)], []
    if base is not None and base.series(LOSS):
        lines.insert(0, Line(other, smooth(base.series(LOSS), window), 0, raw=base.series(LOSS)))
        if gaps := [(step, None if y is None else 100 * y) for step, y in _gaps(run, base)]:
            gap = Line("", smooth(gaps, window), 1, raw=gaps)
            panels = [Panel(f"{name} above {other}, %", [gap], height=110, zero=True)]
    if evals:
        lines.append(Line("held out", evals, 2))
    return LineChart("Loss by step", "step", [Panel("Nats per token", lines, height=240, log=True), *panels])


def _speed_chart(run: Run, base: Run | None) -> LineChart:
    name, other = _names(run, base)
    lines = [Line(name, run.series(STEP_SECONDS), 1)]
    if base is not None and base.series(STEP_SECONDS):
        lines.insert(0, Line(other, base.series(STEP_SECONDS), 0))
    # Clipped: outliers, such as steps that compile, would flatten the rest of the chart.
    values = sorted(y for line in lines for _, y in line.points if y is not None)
    top = 1.6 * values[int(0.9 * (len(values) - 1))]
    return LineChart("Step time", "step", [Panel("Seconds per step", lines, height=130, zero=True, top=top)])
