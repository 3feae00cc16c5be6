"""The page about an evaluation: how good a model is on a text, and how far it is from another."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.report.markup import Cell, Tile, figure, missing, page, section, table, tiles, write
from octavo.report.record import EVALUATION, read_record
from octavo.report.svg import Line, Panel, chart, whiskers
from octavo.report.tables import pairs_section, versions
from octavo.report.words import DASH, known, percent, seconds, signed, size

_NEEDED = ("model", "tokens", "perplexity", "loss")
_WIDE = 1.96
"""Standard errors to each side of a 95 % interval."""


def read_evaluation(path: Path) -> dict[str, Any]:
    """What `octavo eval` wrote, at a path or in a directory."""
    return read_record(path / EVALUATION if path.is_dir() else path, _NEEDED)


def evaluation_report(record: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page about an evaluation, and return where it is.

    The record is what `octavo.serve.evaluate.Evaluation.to_dict` gives, with the names of the `model`, of the one that
    it was measured `against`, if any, and of the `text`, `options` and `versions`.
    """
    parts = [
        tiles(_tiles(record)),
        _perplexities(record),
        _distance(record),
        _layers(record),
        pairs_section("Settings", "What was measured, and on what", _settings(record)),
        pairs_section("Versions", "Installed where it was measured", record.get("versions") or {}),
    ]
    foot = f"Written by octavo {versions()['octavo']}."
    return write(Path(path), page(f"{record['model']}, evaluated", _lead(record), parts, foot))


def _lead(record: Mapping[str, Any]) -> str:
    on = f"{record['tokens']:,} tokens of {record.get('text') or 'a text'}"
    value = interval_of(record["perplexity"])
    first = f"Perplexity {value} on {on}."
    against = record.get("against")
    if not against or record.get("log_ratio") is None:
        return f"{first} No other model was given to measure it by."
    ratio = record["log_ratio"]
    change = signed(math.expm1(ratio["mean"]))
    sure = known(ratio["error"])
    unsure = sure is not None and abs(ratio["mean"]) < _WIDE * sure
    tail = ", which is less than chance may make it" if unsure else ""
    return f"{first} That is {change} from {against}{tail}."


def interval_of(measured: Mapping[str, Any] | None) -> str:
    """A mean with its standard error.

    >>> interval_of({"mean": 12.3456, "error": 0.1}), interval_of({"mean": 439.29, "error": None})
    ('12.346 ± 0.100', '439.3')
    """
    if measured is None or (mean := known(measured["mean"])) is None:
        return DASH
    error = known(measured["error"])
    return _rounded(mean, mean) + ("" if error is None else f" ± {_rounded(error, mean)}")


def _rounded(value: float, beside: float) -> str:
    return f"{value:,.{1 if beside >= 100 else 3}f}"


def _tiles(record: Mapping[str, Any]) -> list[Tile]:
    perplexity, ratio, kl, top = (record.get(name) for name in ("perplexity", "log_ratio", "kl", "same_top"))
    alone = "no model to compare with"
    assert perplexity is not None
    error = known(perplexity["error"])
    mean = known(perplexity["mean"])
    about = f"± {_rounded(error, mean)} standard error" if error is not None and mean is not None else ""
    found = [
        Tile("Perplexity", None if mean is None else _rounded(mean, mean), about),
        Tile("Change", signed(math.expm1(ratio["mean"])) if ratio else None, _plus(ratio) if ratio else alone),
        Tile("KL divergence", f"{kl['mean']:.4f}" if kl else None, _error(kl, "nats per token") if kl else alone),
        Tile("Same top token", percent(top["mean"]) if top else None, _share(top) if top else alone),
        Tile("RMS change of p", percent(known(record.get("rms_change")), 2), "of the true token" if ratio else alone),
    ]
    return found


def _plus(measured: Mapping[str, Any]) -> str:
    error = known(measured["error"])
    return "" if error is None else f"± {percent(error, 2)}, token by token"


def _error(measured: Mapping[str, Any], unit: str) -> str:
    error = known(measured["error"])
    return unit if error is None else f"± {error:.2g} {unit}"


def _share(measured: Mapping[str, Any]) -> str:
    error = known(measured["error"])
    return "of all places" if error is None else f"± {percent(error, 2)} of all places"


def _perplexities(record: Mapping[str, Any]) -> str:
    rows = [(str(record["model"]), record["perplexity"])]
    if record.get("reference_perplexity"):
        rows.append((str(record.get("against") or "the other"), record["reference_perplexity"]))
    return perplexities(rows)


def perplexities(rows: list[tuple[str, Mapping[str, Any]]]) -> str:
    """Perplexities with their intervals, one below the other."""
    drawn, cells = [], []
    for name, measured in rows:
        mean, error = known(measured["mean"]), known(measured["error"])
        if mean is None:
            continue
        low, high = (None, None) if error is None else (mean - _WIDE * error, mean + _WIDE * error)
        drawn.append((name, mean, low, high))
        cells.append([Cell(name, code=True), Cell(f"{mean:.4f}", mean), Cell(f"{error or 0:.4f}", error or 0.0)])
    if not drawn:
        return section("Perplexity", missing("The perplexity is not finite."))
    words = "; ".join(f"{name} {mean:.3f}" for name, mean, *_ in drawn)
    svg = whiskers("Perplexity", words, "perplexity", drawn, mark=None)
    numbers = table("Perplexity and its standard error", ("model", "perplexity", "standard error"), cells)
    caption = (
        "Perplexity with its 95 % interval; lower is better. The intervals tell how much another text would change "
    )
    caption += "it. What tells two models apart on one text is the change, taken token by token."
    return section("Perplexity", figure(svg, caption, data=numbers))


def _distance(record: Mapping[str, Any]) -> str:
    if record.get("log_ratio") is None:
        return ""
    rows = []
    for name, key, unit in (
        ("log of the ratio of perplexities", "log_ratio", "nats"),
        ("KL divergence", "kl", "nats"),
        ("same top token", "same_top", "share"),
    ):
        found = record.get(key)
        if found is not None:
            error = known(found["error"])
            rows.append(
                [
                    Cell(name),
                    Cell(f"{found['mean']:.6f}", found["mean"]),
                    Cell("" if error is None else f"{error:.6f}", error or 0.0),
                    Cell(unit),
                ]
            )
    caption = f"Means over tokens and their standard errors, against {record.get('against') or 'the other model'}"
    return section("Distance", table(caption, ("measure", "mean", "standard error", "unit"), rows))


def _layers(record: Mapping[str, Any]) -> str:
    found = [(str(name), db) for name, value in record.get("layers") or () if (db := known(value)) is not None]
    if not found:
        return ""
    layers = [db for name, db in found if name != "logits"]
    line = Line("", list(enumerate(layers)), 1)
    worst = min(found, key=lambda entry: entry[1])
    words = f"The lowest is {worst[1]:.1f} dB, of {worst[0]}"
    words += "".join(f"; the logits have {db:.1f} dB" for name, db in found if name == "logits") + "."
    drawn = chart("Signal to noise by layer", words, "layer", [Panel("Signal to noise, dB", [line], height=170)])
    rows = [[Cell(name, code=True), Cell(f"{db:.1f} dB", db)] for name, db in found]
    numbers = table("Signal to noise of each layer's output", ("layer", "SQNR"), rows, sortable=True)
    caption = f"Power of each layer's output over that of its error, on the first window of the text. {words}"
    return section("Error by layer", figure(drawn, caption, data=numbers))


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: record[name] for name in ("model", "describes", "against", "text", "tokens") if record.get(name)}
    found |= {str(k): v for k, v in (record.get("options") or {}).items() if v not in (None, "", 0)}
    took, peak = known(record.get("seconds")), known(record.get("peak_memory"))
    return {**found, "took": seconds(took), **({"peak memory": size(peak)} if peak else {})}
