"""Shared helpers of the benchmarks: interleaved timing, tables, and a header with versions and hardware."""

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

import octavo
from octavo.cli import machine


@dataclass(frozen=True)
class Timing:
    """The fastest of several runs, and the relative slowdown of the median run."""

    seconds: float
    spread: float

    @classmethod
    def of(cls, runs: Sequence[float]) -> "Timing":
        """The timing of runs, given the seconds of each."""
        return cls(min(runs), statistics.median(runs) / min(runs) - 1)


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column labels the rows, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    # Columns in which a number below 1 means that octavo is slower.
    ratios: tuple[str, ...] = ()

    def slower(self) -> list[str]:
        """The ratios below 1: in the rows of octavo if there are any, else in all."""
        named = [row for row in self.rows if row[0].startswith("octavo")] or self.rows
        found = []
        for row in named:
            for column, cell in zip(self.columns, row, strict=True):
                if column in self.ratios and cell and float(cell) < 1:
                    found.append(f"{row[0]}: {column} {cell}")
        return found

    def text(self) -> str:
        """The table aligned for a terminal."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        shown = [
            "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines
        ]
        return "\n".join([self.title, *(line.rstrip() for line in shown), *([self.note] if self.note else [])])

    def markdown(self) -> str:
        """The table in Markdown, with the note below it."""
        line = lambda cells: f"| {' | '.join(cells)} |"  # noqa: E731
        rule = "|---|" + "--:|" * (len(self.columns) - 1)
        body = "\n".join([line(self.columns), rule, *map(line, self.rows)])
        return f"**{self.title}**\n\n{body}" + (f"\n\n{self.note}" if self.note else "")


def side_by_side(calls: Mapping[str, Any], *, repeats: int) -> dict[str, Timing]:
    """Time functions in `repeats` interleaved rounds, after one that compiles and warms up.

    A call is a pair of a function and its arguments, or a function without arguments that returns its own seconds.
    Other load on the machine affects all of them alike, and the fastest round of each counts.
    """
    runs: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        _seconds(call)
    for _ in range(repeats):
        for name, call in calls.items():
            runs[name].append(_seconds(call))
    return {name: Timing.of(t) for name, t in runs.items()}


def _seconds(call: tuple[Callable, tuple[Any, ...]] | Callable[[], float]) -> float:
    if callable(call):
        return call()
    fn, args = call
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - start


def spreads(timings: Mapping[str, Timing]) -> str:
    """The largest spread of a row, in percent."""
    return f"{max(t.spread for t in timings.values()):.0%}"


def progress(text: str) -> None:
    """Show progress on one line of the terminal, if there is one."""
    if sys.stderr.isatty():
        print(f"\r{text:60}\r", end="", file=sys.stderr, flush=True)


def header(*packages: str) -> str:
    """Versions, processor and devices, as two lines."""
    cpu = machine.cpu()
    versions = [f"octavo {octavo.__version__}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", *packages)]
    devices = f"{jax.device_count()} {jax.devices()[0].platform} device" + "s" * (jax.device_count() > 1)
    return (
        f"{', '.join(versions)}, Python {platform.python_version()}\n"
        f"{cpu.model}, {cpu.cores} cores ({' '.join(cpu.has) or 'flags unknown'}), {devices}"
    )


PEERS = {"torch": "torch and torchao", "llama": "llama-cpp-python"}
"""Packages that run in an interpreter of their own, by the option that names it."""


def arguments(doc: str, *, quick: str = "fewer repeats", peers: Sequence[str] = ()) -> argparse.ArgumentParser:
    """A parser with the common options --quick and --json, and one for the interpreter of each peer."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc.strip(), formatter_class=form)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", metavar="FILE", help="also write the tables to this file")
    for name in peers:
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"an interpreter with {PEERS[name]}")
    return parser


class Results:
    """The tables of a script: printed when they are ready, and written as JSON with versions and method."""

    def __init__(self, *packages: str, method: str, file: str | None) -> None:
        self.header, self.method, self.file = header(*packages), method, file
        self.tables: list[Table] = []
        self.skipped: list[str] = []
        print(self.header, method, sep="\n", flush=True)
        self._write()

    def add(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        note: str = "",
        ratios: Sequence[str] = (),
    ) -> None:
        """Print a table and write it to the file."""
        table = Table(title, tuple(columns), tuple(map(tuple, rows)), note, tuple(ratios))
        print(f"\n{table.text()}", flush=True)
        self.append(table)

    def append(self, table: Table) -> None:
        """Write a table to the file without printing it."""
        self.tables.append(table)
        self._write()

    def add_versions(self, text: str) -> None:
        """Add the versions that a peer's process reports."""
        if text not in self.method:
            self.method += f"; {text}"
            print(text, flush=True)
            self._write()

    def skip(self, what: str, reason: str) -> None:
        """Record once what is not measured, and the reason."""
        text = f"{what} ({reason})"
        if text not in self.skipped:
            self.skipped.append(text)
            print(f"skipped: {text}", flush=True)
            self._write()

    def _write(self) -> None:
        if self.file:
            found = {"header": self.header, "method": self.method, "skipped": self.skipped}
            Path(self.file).write_text(json.dumps(found | {"tables": [asdict(t) for t in self.tables]}, indent=1))
