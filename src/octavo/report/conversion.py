"""The page about a conversion: what each parameter became, what it takes, and what was lost."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.pretrained.convert import Summary
from octavo.pretrained.model import PretrainedModel, storage_name
from octavo.qarray import QArray
from octavo.qarray.histogram import WORST, histogram, sqnr_db
from octavo.report.heat import extent_of, heat_map, legend, place
from octavo.report.histograms import histograms_section
from octavo.report.markup import Cell, Tile, missing, note, page, section, table, tiles, write
from octavo.report.record import CONVERSION, read_record, write_record
from octavo.report.tables import pairs_section, versions
from octavo.report.words import DASH, TIMES, known, percent, ratio, seconds, size

_NEEDED = ("name", "before", "after", "values", "tensors")
_COLUMNS = ("parameter", "shape", "values", "before", "after", "bits", "bytes before", "bytes after", "SQNR")
_MOST_ROWS = 3000
_SHOWN = 0.001
"""The least share of the numbers that is told."""


def record_conversion(
    source: PretrainedModel,
    stored: Mapping[str, Any] | Callable[[str], Any],
    summary: Summary,
    path: str | os.PathLike[str],
    *,
    recipe: str,
    command: str,
) -> Path:
    """Write down a conversion as JSON: `stored` gives each parameter as it is now, by path. Returns where it is.

    Where the summary has no signal to noise ratio of a parameter, it is measured, which reads the parameter again.
    """
    get = stored if callable(stored) else stored.__getitem__
    tensors = [_tensor(source, name, get(name), summary.ratios.get(name)) for name in source.leaves]
    ranked = sorted((row for row in tensors if row["sqnr_db"] is not None), key=lambda row: row["sqnr_db"])
    drawn = []
    for row in [row for row in ranked if row["quantized"]][:WORST]:
        value, before = get(row["path"]), _float(source.leaves[row["path"]].load())
        drawn.append(histogram(row["path"], before, value, sqnr_db=row["sqnr_db"]))
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
        "histograms": drawn,
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
        "sqnr_db": db if db is not None and np.isfinite(db) else None,
    }


def _float(value: Any) -> np.ndarray:
    return np.asarray(value.dequantize("float32") if isinstance(value, QArray) else value, np.float32)


def read_conversion(path: Path) -> dict[str, Any]:
    """What `record_conversion` wrote, at a path or in a directory."""
    return read_record(path / CONVERSION if path.is_dir() else path, _NEEDED)


def conversion_report(record: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page about a conversion, and return where it is."""
    parts = [
        tiles(_tiles(record)),
        _sizes(record),
        _heat(record["tensors"]),
        histograms_section(record.get("histograms") or (), about="Weights with the lowest signal to noise."),
        _parameters(record["tensors"]),
        pairs_section("Conversion", "What was asked for", _asked(record)),
        pairs_section("Versions", "Installed where the model was converted", record.get("versions") or {}),
    ]
    foot = f"Written by octavo {versions()['octavo']}."
    return write(Path(path), page(f"{record['name']}, converted", _lead(record), parts, foot))


def _lead(record: Mapping[str, Any]) -> str:
    kinds = sorted(record["kinds"].items(), key=lambda item: -item[1])
    shown = [(kind, count) for kind, count in kinds if count >= _SHOWN * record["values"]]
    most = ", ".join(f"{percent(count / record['values'], 1)} of them as {kind}" for kind, count in shown)
    rest = ", ".join(kind for kind, count in kinds if count < _SHOWN * record["values"])
    also = f", the rest as {rest}" if rest else ""
    count = f"{record['values'] / 1e6:,.1f} million numbers"
    return f"{count}, converted by {record.get('recipe', 'rules')}: {most}{also}."


def _tiles(record: Mapping[str, Any]) -> list[Tile]:
    ratios = decibels(record["tensors"])
    middle = f"median {float(np.median(ratios)):.1f} dB" if ratios else ""
    return [
        Tile("Bits per weight", f"{8 * record['after'] / record['values']:.2f}", "scales and all else included"),
        Tile("Size", size(record["after"]), f"{size(record['before'])} before"),
        Tile("Of the size before", ratio(record["after"] / record["before"]), "as a share of the float model"),
        Tile("Lowest SQNR", f"{min(ratios):.1f} dB" if ratios else None, middle or "nothing was quantized"),
        Tile("Took", seconds(known(record.get("seconds"))), f"peak memory {size(known(record.get('peak_memory')))}"),
    ]


def decibels(tensors: Sequence[Mapping[str, Any]]) -> list[float]:
    """The signal to noise ratios that are known."""
    return [db for row in tensors if (db := known(row.get("sqnr_db"))) is not None]


def _sizes(record: Mapping[str, Any]) -> str:
    """Where the bytes are, before and after, by how parameters are stored."""
    found: dict[str, list[int]] = {}
    for row in record["tensors"]:
        entry = found.setdefault(row["kind"], [0, 0, 0, 0])
        for at, value in enumerate((1, _count(row), row["before"], row["after"])):
            entry[at] += value
    rows = [
        [
            Cell(kind, code=True),
            Cell(str(tensors), tensors),
            Cell(f"{values:,}", values),
            Cell(percent(values / record["values"]) or "", values / record["values"]),
            Cell(size(before), before),
            Cell(size(after), after),
            Cell(f"{8 * after / values:.2f}", after / values),
        ]
        for kind, (tensors, values, before, after) in sorted(found.items(), key=lambda item: -item[1][3])
    ]
    columns = ("stored as", "parameters", "values", "share", "before", "after", "bits per value")
    return section("Size", table("Bytes by how parameters are stored", columns, rows, sortable=True))


def _count(row: Mapping[str, Any]) -> int:
    return int(np.prod(row["shape"], dtype=np.int64))


def _heat(tensors: Sequence[Mapping[str, Any]]) -> str:
    cells = {place(row["path"]): db for row in tensors if (db := known(row.get("sqnr_db"))) is not None}
    heading = "Error by layer"
    if not cells:
        return section(heading, missing("No parameter was quantized, or none lost anything."))
    inside = {at: db for at, db in cells.items() if at[0]} or cells
    outside = ", ".join(f"{name} {db:.1f} dB" for at, db in cells.items() if at not in inside and (name := at[1]))
    span = extent_of([inside])
    words = "The ratio of a parameter's power to that of its error. What it does to the output, octavo eval measures."
    drawn = heat_map("Signal to noise of the parameters, dB", inside, span=span)
    return section(
        heading, note(words), legend(span), drawn, note(f"Outside of the layers: {outside}.") if outside else ""
    )


def _parameters(tensors: Sequence[Mapping[str, Any]]) -> str:
    rows, shown = [], tensors[:_MOST_ROWS]
    for row in shown:
        db, count = known(row.get("sqnr_db")), _count(row)
        rows.append(
            [
                Cell(row["path"], code=True),
                Cell(f" {TIMES} ".join(map(str, row["shape"]))),
                Cell(f"{count:,}", count),
                Cell(row["was"]),
                Cell(row["kind"]),
                Cell(f"{8 * row['after'] / max(1, count):.2f}", row["after"] / max(1, count)),
                Cell(size(row["before"]), row["before"]),
                Cell(size(row["after"]), row["after"]),
                Cell(DASH if db is None else f"{db:.1f} dB", float("inf") if db is None else db),
            ]
        )
    done = sum(bool(row["quantized"]) for row in tensors)
    caption = f"{done} of {len(tensors)} parameters are quantized"
    caption += f"; the first {_MOST_ROWS} are listed" if len(shown) < len(tensors) else ""
    dim = [not row["quantized"] for row in shown]
    return section("Plan", table(caption, _COLUMNS, rows, sortable=True, dim=dim))


def _asked(record: Mapping[str, Any]) -> dict[str, Any]:
    origin = {f"from {name}": value for name, value in (record.get("origin") or {}).items()}
    return {"command": record.get("command", DASH), "recipe": record.get("recipe", DASH), **origin}
