"""The page about an evaluation: the perplexity of a model on a text, and its distance to another model."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.report.charts import Dot, DotChart, Line, LineChart, Panel
from octavo.report.format import finite
from octavo.report.page import write_page

_95_PERCENT = 1.96  # standard errors to each side


def evaluation_report(record: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page about an evaluation.

    Args:
      record: What `octavo.serve.evaluate.Evaluation.to_dict` returns, with the names of the `model`, of the one that
        it was measured `against`, if any, and of the `text`, `options` and `versions`.
      path: Where to write the page.

    Returns:
      The path of the page.
    """
    models = [(str(record["model"]), record["perplexity"])]
    if record.get("reference_perplexity"):
        models.append((str(record.get("against") or "the other"), record["reference_perplexity"]))
    layers = [(str(name), db) for name, value in record.get("layers") or () if (db := finite(value)) is not None]
    log_ratio = _pair(record.get("log_ratio"))
    return write_page(
        path,
        "evaluation.html",
        title=f"{record['model']}, evaluated",
        record=record,
        perplexity=_pair(record["perplexity"]),
        log_ratio=log_ratio,
        change=_change(log_ratio),
        is_within_error=log_ratio is not None and abs(log_ratio[0]) < _95_PERCENT * (log_ratio[1] or 0.0),
        kl=_pair(record.get("kl")),
        same_top=_pair(record.get("same_top")),
        rms=finite(record.get("rms_change")),
        perplexities=perplexities(models),
        layers=layers,
        layer_chart=_layer_chart([db for name, db in layers if name != "logits"]),
        worst=min(layers, key=lambda entry: entry[1], default=None),
        logits=dict(layers).get("logits"),
    )


def _pair(measured: Mapping[str, Any] | None) -> tuple[float, float | None] | None:
    """A mean and its standard error."""
    mean = finite(measured["mean"]) if measured else None
    return None if mean is None or not measured else (mean, finite(measured["error"]))


def _change(log_ratio: tuple[float, float | None] | None) -> float | None:
    return None if log_ratio is None else math.expm1(log_ratio[0])


def perplexities(models: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any] | None:
    """Perplexities with their intervals, one below the other, and the same as rows."""
    rows, dots = [], []
    for name, measured in models:
        if (pair := _pair(measured)) is not None:
            mean, error = pair
            ends = () if error is None else (mean - _95_PERCENT * error, mean + _95_PERCENT * error)
            dots.append(Dot(name, mean, *ends))
            rows.append([name, mean, error])
    return {"chart": DotChart("Perplexity", "perplexity", dots, mark=None), "rows": rows} if rows else None


def _layer_chart(layers: Sequence[float]) -> LineChart | None:
    panel = Panel("Signal to noise, dB", [Line("", list(enumerate(layers)), 1)], height=170)
    return LineChart("Signal to noise by layer", "layer", [panel]) if layers else None


def evaluations_together(found: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Several perplexities, and the distance of each to its reference."""
    rows = []
    for name, record in found:
        kl, top = (finite((record.get(key) or {}).get("mean")) for key in ("kl", "same_top"))
        change = _change(_pair(record.get("log_ratio")))
        rows.append([name, record["model"], record["tokens"], _pair(record["perplexity"]), change, kl, top])
    return {"perplexities": perplexities([(name, record["perplexity"]) for name, record in found]), "rows": rows}
