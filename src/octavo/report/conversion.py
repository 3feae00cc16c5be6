"""The page about a conversion: the type, size and error of each parameter."""

import math
import operator
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.pretrained.convert import Summary
from octavo.pretrained.model import PretrainedModel, storage_name
from octavo.qarray import QArray
from octavo.qarray.histogram import WORST, histogram, sqnr_db
from octavo.report.charts import Dot, DotChart
from octavo.report.format import DASH, TIMES, finite
from octavo.report.layers import HeatMap, layer_and_op, span_of
from octavo.report.page import versions, write_page
from octavo.report.record import write_record

MOST_ROWS = 3000
_LEAST_SHARE = 0.001  # of the values: less is "the rest"


def record_conversion(
    source: PretrainedModel,
    stored: Mapping[str, Any] | Callable[[str], Any],
    summary: Summary,
    path: str | os.PathLike[str],
    *,
    recipe: str,
    command: str,
    costs: Mapping[str, float] | None = None,
) -> Path:
    """Write the record of a conversion as JSON.

    Args:
      source: The model that was converted.
      stored: Each parameter as it is stored, by path.
      summary: What `convert_model` returns. Signal-to-noise ratios that it lacks are measured, which reads the
        parameters again.
      path: Where to write the record.
      recipe: The recipe, as on the command line.
      command: The command line.
      costs: The predicted divergence by path, if formats were chosen under a budget.

    Returns:
      The path of the record.
    """
    get = stored if callable(stored) else stored.__getitem__
    tensors = [_tensor(source, name, get(name), summary.ratios.get(name)) for name in source.leaves]
    for row in tensors if costs else ():
        row["predicted_kl"] = finite(costs.get(row["path"]))  # pyrefly: ignore
    measured = (row for row in tensors if row["sqnr_db"] is not None and row["quantized"])
    worst = sorted(measured, key=operator.itemgetter("sqnr_db"))[:WORST]
    histograms = [
        histogram(row["path"], _float(source.leaves[row["path"]].load()), get(row["path"]), sqnr_db=row["sqnr_db"])
        for row in worst
    ]
    record = {
        "name": source.name,
        "origin": {k: v for k, v in source.origin.items() if isinstance(v, str | int | float | bool)},
        "recipe": recipe,
        "command": command,
        "before": summary.before,
        "after": summary.after,
        "values": summary.values,
        "kinds": dict(summary.kinds),
        "seconds": summary.seconds,
        "peak_memory": summary.peak,
        "tensors": tensors,
        "histograms": histograms,
        "versions": versions(),
    }
    write_record(Path(path), record)
    return Path(path)


def _tensor(source: PretrainedModel, path: str, value: Any, db: float | None) -> dict[str, Any]:
    leaf = source.leaves[path]
    if db is None and isinstance(value, QArray):
        db = sqnr_db(_float(leaf.load()), _float(value))
    return {
        "path": path,
        "shape": list(leaf.shape),
        "was": leaf.stored or leaf.dtype,
        "kind": storage_name(value),
        "quantized": isinstance(value, QArray),
        "before": leaf.nbytes,
        "after": int(value.nbytes),
        "sqnr_db": finite(db),
    }


def _float(value: Any) -> np.ndarray:
    return np.asarray(value.dequantize("float32") if isinstance(value, QArray) else value, np.float32)


def conversion_report(record: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page about a conversion from its record, and return the path of the page."""
    kinds = sorted(record["kinds"].items(), key=lambda item: -item[1])
    shares = {kind: count / record["values"] for kind, count in kinds}
    found = ((layer_and_op(row["path"]), finite(row.get("sqnr_db"))) for row in record["tensors"])
    cells = {at: db for at, db in found if db is not None}
    inside = {at: db for at, db in cells.items() if at[0]} or cells
    title = "Signal to noise of the parameters, dB"
    return write_page(
        path,
        "conversion.html",
        title=f"{record['name']}, converted",
        record=record,
        shares={kind: share for kind, share in shares.items() if share >= _LEAST_SHARE},
        rest=[kind for kind, share in shares.items() if share < _LEAST_SHARE],
        ratios=list(cells.values()),
        median=_median(_ratios(record)),
        bits=_bits(record),
        sizes=_sizes(record),
        map=HeatMap(title, inside, span_of([inside])) if cells else None,
        budget=_budget(record),
        outside={at[1]: db for at, db in cells.items() if at not in inside},
        parameters=[_parameter(row) for row in record["tensors"][:MOST_ROWS]],
        dim=[not row["quantized"] for row in record["tensors"]],
    )


def _budget(record: Mapping[str, Any]) -> list[HeatMap]:
    """The bits and the sensitivity of each weight by layer, if formats were chosen under a budget."""
    bits, costs = {}, {}
    for row in record["tensors"]:
        if cost := row.get("predicted_kl"):
            at = layer_and_op(row["path"])
            bits[at] = 8 * row["after"] / math.prod(row["shape"])
            costs[at] = -10 * math.log10(cost)
    if not bits:
        return []
    ends = min(bits.values()), max(bits.values()) + 1
    return [
        HeatMap("Bits per weight, scales included", bits, ends),
        HeatMap("Predicted KL divergence of the weight as it is stored, dB below one nat", costs, span_of([costs])),
    ]


def _ratios(record: Mapping[str, Any]) -> list[float]:
    return [db for row in record["tensors"] if (db := finite(row.get("sqnr_db"))) is not None]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _bits(record: Mapping[str, Any]) -> float:
    return 8 * record["after"] / record["values"]


def _sizes(record: Mapping[str, Any]) -> list[list[Any]]:
    """The bytes before and after, by the type that parameters are stored in."""
    sums: dict[str, list[int]] = {}
    for row in record["tensors"]:
        added = (1, math.prod(row["shape"]), row["before"], row["after"])
        sums[row["kind"]] = [a + b for a, b in zip(sums.get(row["kind"], [0] * 4), added, strict=True)]
    return [
        [kind, tensors, values, values / record["values"], before, after, 8 * after / values]
        for kind, (tensors, values, before, after) in sorted(sums.items(), key=lambda item: -item[1][3])
    ]


def _parameter(row: Mapping[str, Any]) -> list[Any]:
    count, shape = math.prod(row["shape"]), f" {TIMES} ".join(map(str, row["shape"]))
    types = [row["was"], row["kind"], 8 * row["after"] / max(1, count), row["before"], row["after"]]
    return [row["path"], shape, count, *types, finite(row.get("sqnr_db"))]


def conversions_together(found: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The sizes of several conversions, and the range of the signal to noise of their parameters."""
    rows, dots = [], []
    for name, record in found:
        ratios, sizes = _ratios(record), [_bits(record), record["before"], record["after"]]
        median, low, high = (_median(ratios), min(ratios, default=None), max(ratios, default=None))
        rows.append([name, record["name"], record.get("recipe", DASH), *sizes, median, low])
        if median is not None:
            dots.append(Dot(f"{name}, {_bits(record):.2f} bits", median, low, high))
    chart = DotChart("Signal to noise of the parameters", "signal to noise, dB", dots, fmt="{:.1f} dB", mark=None)
    return {"chart": chart if dots else None, "rows": rows}
