"""Several runs of a kind beside each other."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.report.compare import FLOAT, comparison_parts
from octavo.report.conversion import decibels
from octavo.report.evaluation import interval_of, perplexities
from octavo.report.markup import Cell, figure, note, section, table
from octavo.report.page import tail
from octavo.report.run import EVAL_LOSS, LOSS, STEP_SECONDS, Run
from octavo.report.svg import whiskers
from octavo.report.words import DASH, Number, known, percent, seconds, signed, size


def trainings(runs: Sequence[tuple[str, Run]]) -> list[str]:
    """Training runs: their losses against the float one, or against the first where none or several are in float."""
    recipes = [run.precision for _, run in runs]
    distinct = len(set(recipes)) == len(recipes)
    named = {(run.precision if distinct else name): run for name, run in runs}
    floats = [name for name, run in named.items() if run.precision == FLOAT]
    base = floats[0] if len(floats) == 1 else next(iter(named))
    comparison = {
        "base": base,
        "steps": max(len(run.series(LOSS)) for run in named.values()),
        "runs": [_run(name, run) for name, run in named.items()],
        "table": [_row(name, run, named[base]) for name, run in named.items()],
    }
    differing = _differing(dict(zip(named, (run.config for run in named.values()), strict=True)))
    return [*comparison_parts(comparison), _training_table(named), differing]


def _run(name: str, run: Run) -> dict[str, Any]:
    return {
        "name": name,
        "loss": run.series(LOSS),
        "eval_loss": run.series(EVAL_LOSS),
        "step_seconds": [y for _, y in run.series(STEP_SECONDS) if y is not None],
        "memory_bytes": run.memory,
    }


def _row(name: str, run: Run, base: Run) -> dict[str, Any]:
    """As a row of a comparison: the held-out loss if both have one, else the mean over the last steps."""
    loss, other = _final(run, base), _final(base, run)
    return {
        "name": name,
        "loss": loss,
        "gap": (loss - other) / other if loss is not None and other else None,
        "step_ratio": _quotient(run.step_seconds, base.step_seconds),
        "memory_ratio": _quotient(run.memory, base.memory),
        "share": 0.0 if run.precision == FLOAT else run.share(),
    }


def _final(run: Run, other: Run) -> Number | None:
    both = all(one.series(EVAL_LOSS) for one in (run, other))
    return run.series(EVAL_LOSS)[-1][1] if both else tail(run.series(LOSS))[0]


def _quotient(a: Number | None, b: Number | None) -> Number | None:
    return a / b if a is not None and b else None


def _training_table(runs: Mapping[str, Run]) -> str:
    """What the chart of gaps does not say: speeds, memory and signal to noise at the end."""
    rows = []
    for name, run in runs.items():
        last = run.telemetry[-1] if run.telemetry else {}
        ratios = [known((last.get(kind) or {}).get("sqnr_db")) for kind in ("weight", "activation", "gradient")]
        done = len(run.series(LOSS))
        rows.append(
            [
                Cell(name, code=True),
                Cell(str(done), done),
                Cell(seconds(run.step_seconds), run.step_seconds or 0.0),
                Cell(size(run.memory), run.memory or 0.0),
                *(Cell(DASH if db is None else f"{db:.1f} dB", math.inf if db is None else db) for db in ratios),
            ]
        )
    columns = ("run", "steps", "step time", "memory", "SQNR of weights", "of activations", "of gradients")
    caption = "Medians of steps, memory of a step, and signal to quantization noise at the end"
    return section("Runs", table(caption, columns, rows, sortable=True))


def _differing(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """The keys on which the runs do not agree."""
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    free = {"run_name", "base_output_directory"}
    rows = []
    for key in keys:
        values = [str(config.get(key, DASH)) for config in configs.values()]
        if key not in free and len(set(values)) > 1:
            rows.append([Cell(key, code=True), *(Cell(value or "''") for value in values)])
    if not rows:
        return section("Configuration", note("The runs have the same configuration."))
    return section("Configuration", table("Keys on which the runs differ", ("key", *configs), rows))


def comparisons(found: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Comparisons: the rows of all of them in one table."""
    rows = []
    for name, comparison in found:
        for row in comparison["table"]:
            gap, step, memory = (known(row.get(key)) for key in ("gap", "step_ratio", "memory_ratio"))
            rows.append(
                [
                    Cell(name, code=True),
                    Cell(str(row["name"]), code=True),
                    Cell(str(comparison["steps"]), comparison["steps"]),
                    _number(known(row.get("loss")), ".4f"),
                    Cell(signed(gap) or DASH, math.inf if gap is None else gap),
                    _number(step, ".2f"),
                    _number(memory, ".2f"),
                ]
            )
    columns = ("comparison", "recipe", "steps", "loss", "gap to float", "step time", "memory")
    return [section("Comparisons", table("Times and memory against float", columns, rows, sortable=True))]


def conversions(found: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Conversions: their sizes, and the range of the signal to noise of their parameters."""
    rows, drawn = [], []
    for name, record in found:
        ratios = decibels(record["tensors"])
        bits = 8 * record["after"] / record["values"]
        if ratios:
            drawn.append((f"{name}, {bits:.2f} bits", statistics.median(ratios), min(ratios), max(ratios)))
        rows.append(
            [
                Cell(name, code=True),
                Cell(str(record["name"])),
                Cell(str(record.get("recipe", DASH)), code=True),
                Cell(f"{bits:.3f}", bits),
                Cell(size(record["before"]), record["before"]),
                Cell(size(record["after"]), record["after"]),
                _number(statistics.median(ratios) if ratios else None, ".1f"),
                _number(min(ratios, default=None), ".1f"),
            ]
        )
    columns = ("conversion", "model", "recipe", "bits per weight", "before", "after", "median SQNR, dB", "lowest")
    told = table("Sizes, and signal to noise of the parameters", columns, rows, sortable=True)
    if not drawn:
        return [section("Conversions", told)]
    words = "; ".join(f"{name}: {middle:.1f} dB" for name, middle, *_ in drawn)
    svg = whiskers("Signal to noise of the parameters", words, "signal to noise, dB", drawn, mark=None)
    caption = "Signal to noise of the parameters: the median, from the lowest to the highest. Higher is better."
    return [section("Conversions", figure(svg, caption), told)]


def evaluations(found: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Evaluations: their perplexities, and how far each is from its reference."""
    rows = []
    for name, record in found:
        ratio, kl, top = (record.get(key) for key in ("log_ratio", "kl", "same_top"))
        change = math.expm1(ratio["mean"]) if ratio else None
        rows.append(
            [
                Cell(name, code=True),
                Cell(str(record["model"])),
                Cell(f"{record['tokens']:,}", record["tokens"]),
                Cell(interval_of(record["perplexity"]), record["perplexity"]["mean"]),
                Cell(signed(change) or DASH, math.inf if change is None else change),
                _number(kl["mean"] if kl else None, ".5f"),
                Cell(percent(top["mean"], 2) if top else DASH, top["mean"] if top else math.inf),  # pyrefly: ignore
            ]
        )
    columns = ("evaluation", "model", "tokens", "perplexity", "change", "KL divergence", "same top token")
    drawn = perplexities([(name, record["perplexity"]) for name, record in found])
    told = table("Each against the model that it was measured by", columns, rows, sortable=True)
    return [drawn, section("Distances", told)]


def _number(value: Number | None, how: str) -> Cell:
    return Cell(DASH if value is None else f"{value:{how}}", math.inf if value is None else value)
