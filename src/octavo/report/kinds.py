"""The kinds of runs that have a page: the files that each is recognized by, and functions that read and render it."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo._names import did_you_mean
from octavo.report.comparison import compare_report, comparisons_together, runs_together
from octavo.report.conversion import conversion_report, conversions_together
from octavo.report.evaluation import evaluation_report, evaluations_together
from octavo.report.page import write_page
from octavo.report.record import COMPARISON, CONVERSION, EVALUATION, ROLLOUTS, read_record
from octavo.report.rollouts import rollouts_report, rollouts_together
from octavo.report.run import RUN_FILES, Run, neighbors, read_run
from octavo.report.run_page import write_report


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
      name: What it is called on pages.
      files: The files that its directory, or itself, is recognized by.
      read: Reads a run.
      write: Writes the page about a run.
      together: The tables and figures about several named runs, for the template `together.html`.
    """

    name: str
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    write: Callable[[Any, Path], Path]
    together: Callable[[Sequence[tuple[str, Any]]], Any]


def _record(name: str, file: str, write: Callable[..., Path], together: Callable[..., Any]) -> Kind:
    return Kind(name, (file,), functools.partial(read_record, kind=file), write, together)


def _write_run(run: Run, out: Path) -> Path:
    return write_report(run.directory, path=out)


# In the order in which they are looked for: a converted model's directory may hold the files of a run, too.
_KINDS = (
    _record("comparison", COMPARISON, compare_report, comparisons_together),
    _record("conversion", CONVERSION, conversion_report, conversions_together),
    _record("evaluation", EVALUATION, evaluation_report, evaluations_together),
    _record("rollouts", ROLLOUTS, rollouts_report, rollouts_together),
    Kind("training", RUN_FILES, lambda p: read_run(p if p.is_dir() else p.parent), _write_run, runs_together),
)


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """The kind of run at a path, a directory or one of the files that a kind is recognized by."""
    path = Path(path)
    for kind in _KINDS:
        found = (path / name if path.is_dir() or not path.name.endswith(name) else path for name in kind.files)
        if any(file.is_file() for file in found):
            return kind
    if not path.exists():
        hint = did_you_mean(path.name, neighbors(path))
        raise FileNotFoundError(f"there is no {path}: {hint}Give the directory of a run")
    known = "; ".join(f"{kind.name} ({', '.join(kind.files)})" for kind in _KINDS)
    raise ValueError(f"{path} is no run that there is a page about. These are, with the files they have: {known}")


def render(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the page about a run, a comparison, a conversion or an evaluation again.

    Args:
      path: Its directory, or its record.
      out: Where to write the page, by default where the run's own page is.

    Returns:
      The path of the page.
    """
    kind, path = kind_of(path), Path(path)
    if out is None:
        prefix = "" if path.is_dir() else next(path.name.removesuffix(n) for n in kind.files if path.name.endswith(n))
        out = (path if path.is_dir() else path.parent) / f"{prefix}report.html"
    return kind.write(kind.read(path), Path(out))


def render_together(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Write one page about several runs, those of a kind side by side.

    Args:
      paths: Their directories or records.
      out: Where to write the page.

    Returns:
      The path of the page.
    """
    groups: dict[str, list[tuple[str, Any]]] = {}
    for name, path in zip(_names(paths), map(Path, paths), strict=True):
        kind = kind_of(path)
        groups.setdefault(kind.name, []).append((name, kind.read(path)))
    together = {kind.name: kind.together(groups[kind.name]) for kind in _KINDS if kind.name in groups}
    return write_page(out, "together.html", title="Runs side by side", groups=groups, together=together)


def _names(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The names of runs: the fewest last components of their paths that distinguish them."""
    parts = [_without_suffix(Path(path).resolve()).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError("a run is given twice: name each of them once")


def _without_suffix(path: Path) -> Path:
    suffixes = (f".{name}" for kind in _KINDS for name in kind.files if path.name.endswith(f".{name}"))
    return path.with_name(path.name.removesuffix(next(suffixes, "")))
