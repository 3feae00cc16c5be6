"""Which kind of run lies at a path, how its page is written again, and what it says beside others of its kind."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo._names import did_you_mean
from octavo.report.compare import compare_report
from octavo.report.conversion import conversion_report, read_conversion
from octavo.report.evaluation import evaluation_report, read_evaluation
from octavo.report.markup import page, write
from octavo.report.page import write_report
from octavo.report.record import COMPARISON, CONVERSION, EVALUATION, read_record
from octavo.report.run import read_run
from octavo.report.several import comparisons, conversions, evaluations, trainings
from octavo.report.tables import versions
from octavo.train.metrics import METRICS


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of run: the files that it is known by, and functions that read it, write its page, and compare several."""

    name: str
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    write: Callable[[Path, Path], Path]
    side_by_side: Callable[[Sequence[tuple[str, Any]]], list[str]]


_kinds: list[Kind] = []


def register_kind(kind: Kind) -> None:
    """Make a kind of run known; those that were registered first are looked for first."""
    if any(kind.name == other.name for other in _kinds):
        raise ValueError(f"a kind of run named {kind.name!r} exists")
    _kinds.append(kind)


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """The kind of run at a path, a directory or the file that a kind is known by."""
    place = Path(path)
    for kind in _kinds:
        if place.is_dir() and any((place / name).is_file() for name in kind.files):
            return kind
        if place.is_file() and any(place.name.endswith(name) for name in kind.files):
            return kind
    if not place.exists():
        beside = sorted(p.name for p in place.parent.iterdir() if p.is_dir()) if place.parent.is_dir() else []
        raise FileNotFoundError(f"there is no {place}: {did_you_mean(place.name, beside)}Give the directory of a run")
    known = "; ".join(f"{kind.name} ({', '.join(kind.files)})" for kind in _kinds)
    raise ValueError(
        f"{place} is no run that there is a page about. These are, with the files they are known by: {known}"
    )


def render(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the page about a run again, whatever its kind: to `out`, by default where the run's own page is."""
    kind, place = kind_of(path), Path(path)
    folder = place if place.is_dir() else place.parent
    stem = next((place.name.removesuffix(name) for name in kind.files if place.name.endswith(name)), "")
    return kind.write(place, Path(out) if out is not None else folder / f"{stem if place.is_file() else ''}report.html")


def render_together(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Write one page about several runs, those of a kind beside each other."""
    groups: dict[str, list[tuple[str, Any]]] = {}
    for name, path in zip(_names(paths), map(Path, paths), strict=True):
        kind = kind_of(path)
        groups.setdefault(kind.name, []).append((name, kind.read(path)))
    parts: list[str] = []
    for kind in _kinds:
        if kind.name in groups:
            parts += kind.side_by_side(groups[kind.name])
    counts = " and ".join(f"{len(found)} {name}{'s' * (len(found) > 1)}" for name, found in groups.items())
    foot = f"Written by octavo {versions()['octavo']}."
    lead = f"{counts}: {', '.join(name for found in groups.values() for name, _ in found)}."
    return write(Path(out), page("Runs side by side", lead[0].upper() + lead[1:], parts, foot))


def _names(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """What runs are called: the last parts of their paths, as many as tell them apart."""
    parts = [_shown(Path(path).resolve()).parts for path in paths]
    most = max(map(len, parts))
    for count in range(1, most + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError("a run is given twice: name each of them once")


def _shown(path: Path) -> Path:
    """A path without the end that tells the kind of a file."""
    ends = (f".{name}" for kind in _kinds for name in kind.files if path.name.endswith(f".{name}"))
    return path.with_name(path.name.removesuffix(next(ends, "")))


def _compare_again(path: Path, out: Path) -> Path:
    return compare_report(_comparison(path), out)


def _comparison(path: Path) -> dict[str, Any]:
    return read_record(path / COMPARISON if path.is_dir() else path, ("steps", "runs", "table"))


register_kind(Kind("comparison", (COMPARISON,), _comparison, _compare_again, comparisons))
register_kind(
    Kind(
        "conversion",
        (CONVERSION,),
        read_conversion,
        lambda path, out: conversion_report(read_conversion(path), out),
        conversions,
    )
)
register_kind(
    Kind(
        "evaluation",
        (EVALUATION,),
        read_evaluation,
        lambda path, out: evaluation_report(read_evaluation(path), out),
        evaluations,
    )
)
register_kind(
    Kind(
        "training",
        (METRICS, "config.yml", "plan.json"),
        lambda path: read_run(path if path.is_dir() else path.parent),
        lambda path, out: write_report(path if path.is_dir() else path.parent, path=out),
        trainings,
    )
)
