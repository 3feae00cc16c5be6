"""Run every benchmark in a fixed order and write docs/benchmarks.md.

    python benchmarks [--quick] [--torch PYTHON] [--llama PYTHON] [--only matmul,step] [--out FILE]

Each script runs in a process of its own, one after the other, and prints its tables. Without an interpreter for a
peer the page says that it was skipped. With `--only`, the other sections of the page are kept.
"""

import argparse
import ast
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from timing import PEERS, Table, header

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"


@dataclass(frozen=True)
class Script:
    """A benchmark: its heading, and the peers whose interpreters it takes."""

    name: str
    title: str
    interpreters: tuple[str, ...] = ()


SCRIPTS = (
    Script("formats", "Number formats"),
    Script("matmul", "Matmuls and their gradients", interpreters=("torch",)),
    Script("step", "A training step", interpreters=("torch",)),
    Script("trace", "Tracing and compiling"),
    Script("decode", "Generating text", interpreters=("llama",)),
    Script("serve", "Servers", interpreters=("llama",)),
    Script("matvec", "Reading weights"),
    Script("memory", "Memory"),
    Script("convert", "Converting a model"),
    Script("convergence", "Convergence"),
    Script("optimizers", "Optimizers"),
    Script("probe", "Telemetry"),
    Script("startup", "Importing"),
)

BUSY = "**The machine was busy**: times are unreliable, and ratios are rough."
# The number of cores used by other processes above which times are unreliable; where it is unknown, the load average
# at the start counts.
LOAD, OTHERS = 1.0, 0.25

INTRO = """\
# Benchmarks

`make bench` runs every script of `benchmarks/` and writes this page; `make bench ARGS=--quick` takes a few minutes, and
`ARGS="--torch PYTHON --llama PYTHON"` names interpreters that have torch with torchao, and llama-cpp-python. Times are
the fastest of several interleaved rounds; *spread* is how much slower the median round was, so a ratio closer to 1 than
the spread is not significant. Peers do the same job in the same run where this machine supports it; skipped ones are
named. Each section says when and on what machine it was measured, since sections can be updated one by one.
"""


@dataclass(frozen=True)
class CpuUsage:
    """CPU seconds: of this process and its children (`own`), and of all processes (`total`, None where unknown)."""

    wall: float
    own: float
    total: float | None

    @classmethod
    def now(cls) -> "CpuUsage":
        """The usage since the machine started."""
        times, stat = os.times(), Path("/proc/stat")
        total = None
        if stat.exists():
            # user, nice, system, idle, iowait, irq, softirq and steal (time taken by other virtual machines).
            ticks = list(map(int, stat.read_text().split("\n", 1)[0].split()[1:9]))
            total = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        own = times.user + times.system + times.children_user + times.children_system
        return cls(time.perf_counter(), own, total)

    def since(self, before: "CpuUsage") -> "CpuUsage":
        """The difference."""
        total = None if self.total is None or before.total is None else self.total - before.total
        return CpuUsage(self.wall - before.wall, self.own - before.own, total)

    @property
    def others(self) -> float | None:
        """The number of cores that other processes used."""
        return None if self.total is None else max(0.0, (self.total - self.own) / self.wall)


def description(name: str) -> str:
    """The docstring of a script, without its usage."""
    text = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or ""
    kept = [part for part in text.split("\n\n") if not part.lstrip().startswith("python benchmarks/")]
    return "\n\n".join(" ".join(part.split()) for part in kept)


def run(command: list[str]) -> int:
    """Run a script, which prints to the terminal, and return its status."""
    print(f"\n== {Path(command[1]).stem}", flush=True)
    return subprocess.run(command).returncode


def section(script: Script, options: argparse.Namespace, folder: Path) -> str | None:
    """Run a script and return its section of the page, or None if it failed."""
    file = folder / f"{script.name}.json"
    command = [sys.executable, str(HERE / f"{script.name}.py"), "--json", str(file)]
    command += ["--quick"] if options.quick else []
    for name in script.interpreters:
        if python := getattr(options, name):
            command += [f"--{name}", python]
    before = CpuUsage.now()
    status = run(command)
    if status:
        print(f"{script.name} failed with status {status}", file=sys.stderr)
        return None
    found = json.loads(file.read_text())
    parts = [f"## {script.title}", f"`benchmarks/{script.name}.py`. {description(script.name)}"]
    made = provenance(CpuUsage.now().since(before), options.load, quick=options.quick)
    parts.append(f"{made} {' '.join(found['header'].split(chr(10)))}; {' '.join(found['method'].split())}.")
    if found["skipped"]:
        parts.append("Skipped: " + "; ".join(found["skipped"]) + ".")
    for row in found["tables"]:
        table = Table(
            row["title"], tuple(row["columns"]), tuple(map(tuple, row["rows"])), row["note"], tuple(row["ratios"])
        )
        parts.append(table.markdown())
        if slow := table.slower():
            parts.append("Slower here: " + "; ".join(slow) + ".")
    return "\n\n".join(parts)


def provenance(use: CpuUsage, load: float, *, quick: bool) -> str:
    """When a section was measured, its time, and other load on the machine."""
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    mode = "quick, " if quick else ""
    text = (
        f"Measured on {when} ({mode}{use.wall:.0f} s, {use.own:.0f} s of CPU time; load average {load:.1f} at the start"
    )
    if use.others is not None:
        text += f", other processes on {use.others:.1f} cores meanwhile"
    busy = load > LOAD if use.others is None else use.others > OTHERS
    return f"{text})." + (f" {BUSY}" if busy else "")


def render_page(kept: dict[str, str]) -> str:
    """The page: an introduction, a warning if the machine was busy, and the sections in order."""
    body = [kept[script.title] for script in SCRIPTS if script.title in kept]
    busy = [script.title for script in SCRIPTS if BUSY in kept.get(script.title, "")]
    warning = [f"**Measured on a busy machine**: {', '.join(busy)}."] if busy else []
    return "\n\n".join([INTRO.strip(), *warning, *body]) + "\n"


def sections(page: Path) -> dict[str, str]:
    """The sections of an existing page by heading."""
    text = page.read_text() if page.exists() else ""
    return {part.split("\n", 1)[0]: f"## {part.strip()}" for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: under ten minutes on two quiet cores")
    for name, packages in PEERS.items():
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"an interpreter with {packages}")
    parser.add_argument("--only", metavar="NAMES", help="some of them: " + ",".join(s.name for s in SCRIPTS))
    parser.add_argument("--out", metavar="FILE", default=str(PAGE), help="the page (default: docs/benchmarks.md)")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [script.name for script in SCRIPTS]
    if unknown := set(names) - {script.name for script in SCRIPTS}:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    page, failed, begin = Path(options.out), [], time.perf_counter()
    # Before the first script, whose own load would count otherwise.
    options.load = os.getloadavg()[0]
    kept = sections(page)
    print(header(), f"load average {options.load:.1f}", sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        for script in SCRIPTS:
            if script.name not in names:
                continue
            text = section(script, options, Path(folder))
            if text is None:
                failed.append(script.name)
                continue
            # Written after every script, so that a failing one does not lose the others.
            kept[script.title] = text
            page.write_text(render_page(kept))
    print(
        f"\nwrote {page} after {time.perf_counter() - begin:.0f} s"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
