"""Run every benchmark in a fixed order and write docs/benchmarks.md.

    python benchmarks [--quick] [--torch PYTHON] [--llama PYTHON] [--only matmul,step] [--out FILE]

Each script runs in a process of its own, one after the other, and prints what it prints by itself. Without an
interpreter for a peer the page is made all the same and says what was left out. With `--only`, the other sections of
the page stay as they were made.
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
    """A benchmark: its heading, and the interpreters that it may be given."""

    name: str
    title: str
    interpreters: tuple[str, ...] = ()


SCRIPTS = (
    Script("formats", "Number formats"),
    Script("matmul", "Matmuls and their gradients", interpreters=("torch",)),
    Script("step", "A training step", interpreters=("torch",)),
    Script("trace", "Tracing and compiling"),
    Script("decode", "Generating text", interpreters=("llama",)),
    Script("matvec", "Reading weights"),
    Script("memory", "Memory"),
    Script("convert", "Converting a model"),
    Script("convergence", "Convergence"),
    Script("probe", "Telemetry"),
    Script("startup", "Importing"),
)

BUSY = "**The machine was busy with other things**: times say little, and ratios are rough."
# Cores that other processes took meanwhile, above which times are not to be trusted; where that cannot be known, the
# load at the start, which still tells of what ran before.
LOAD, OTHERS = 1.0, 0.25

INTRO = """\
# Benchmarks

Made by `make bench`, which runs every script of `benchmarks/` and writes this page; `make bench ARGS=--quick` takes
a few minutes, and `ARGS="--torch PYTHON --llama PYTHON"` names interpreters that have torch with torchao, and
llama-cpp-python. Times are the fastest of several rounds in which all contenders take turns; *spread* is how much
slower the median round was, so a ratio that is closer to 1 than the spread says nothing. Peers do the same job in the
same run where they can do it on this machine; what was left out is named. Sections say when and on what machine they
were made, since they can be made again one by one.
"""


@dataclass(frozen=True)
class Use:
    """What was taken of the machine since it started: by this process's children, and by all; None where unknown."""

    wall: float
    own: float
    every: float | None

    @classmethod
    def now(cls) -> "Use":
        """As it is now."""
        times, stat = os.times(), Path("/proc/stat")
        every = None
        if stat.exists():
            # user, nice, system, idle, iowait, irq, softirq and steal, which is what other machines took of the host.
            ticks = list(map(int, stat.read_text().split("\n", 1)[0].split()[1:9]))
            every = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        own = times.user + times.system + times.children_user + times.children_system
        return cls(time.perf_counter(), own, every)

    def since(self, before: "Use") -> "Use":
        """The difference."""
        every = None if self.every is None or before.every is None else self.every - before.every
        return Use(self.wall - before.wall, self.own - before.own, every)

    @property
    def others(self) -> float | None:
        """How many cores other processes kept busy."""
        return None if self.every is None else max(0.0, (self.every - self.own) / self.wall)


def about(name: str) -> str:
    """What a script says of itself, without the lines that tell how to call it."""
    text = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or ""
    kept = [part for part in text.split("\n\n") if not part.lstrip().startswith("python benchmarks/")]
    return "\n\n".join(" ".join(part.split()) for part in kept)


def run(command: list[str]) -> int:
    """Run a script, whose words go to the terminal, and return its status."""
    print(f"\n== {Path(command[1]).stem}", flush=True)
    return subprocess.run(command).returncode


def section(script: Script, options: argparse.Namespace, folder: Path) -> str | None:
    """Run a script and give its part of the page, or None if it failed."""
    file = folder / f"{script.name}.json"
    command = [sys.executable, str(HERE / f"{script.name}.py"), "--json", str(file)]
    command += ["--quick"] if options.quick else []
    for name in script.interpreters:
        if python := getattr(options, name):
            command += [f"--{name}", python]
    before = Use.now()
    status = run(command)
    if status:
        print(f"{script.name} failed with status {status}", file=sys.stderr)
        return None
    found = json.loads(file.read_text())
    parts = [f"## {script.title}", f"`benchmarks/{script.name}.py`. {about(script.name)}"]
    made = made_with(Use.now().since(before), options.load, quick=options.quick)
    parts.append(f"{made} {' '.join(found['header'].split(chr(10)))}; {' '.join(found['how'].split())}.")
    if found["left_out"]:
        parts.append("Left out: " + "; ".join(found["left_out"]) + ".")
    for row in found["tables"]:
        table = Table(
            row["title"], tuple(row["columns"]), tuple(map(tuple, row["rows"])), row["note"], tuple(row["ratios"])
        )
        parts.append(table.markdown())
        if slow := table.slower():
            parts.append("Slower here: " + "; ".join(slow) + ".")
    return "\n\n".join(parts)


def made_with(use: Use, load: float, *, quick: bool) -> str:
    """When a section was made, what it took, and what else the machine did."""
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    mode = "quick, " if quick else ""
    text = f"Made on {when} ({mode}{use.wall:.0f} s, {use.own:.0f} s of CPU time; load average {load:.1f} at the start"
    if use.others is not None:
        text += f", other processes on {use.others:.1f} cores meanwhile"
    busy = load > LOAD if use.others is None else use.others > OTHERS
    return f"{text})." + (f" {BUSY}" if busy else "")


def whole(kept: dict[str, str]) -> str:
    """The page: an introduction, a warning where one is due, and the sections in order."""
    body = [kept[script.title] for script in SCRIPTS if script.title in kept]
    busy = [script.title for script in SCRIPTS if BUSY in kept.get(script.title, "")]
    warning = [f"**Made on a machine that was busy with other things**: {', '.join(busy)}."] if busy else []
    return "\n\n".join([INTRO.strip(), *warning, *body]) + "\n"


def sections(page: Path) -> dict[str, str]:
    """The sections of a page that was written before, by heading."""
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
    # Once, before the first script: afterwards it is the scripts' own.
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
            # Written after every script: what is there is not lost to the one that fails.
            kept[script.title] = text
            page.write_text(whole(kept))
    print(
        f"\nwrote {page} after {time.perf_counter() - begin:.0f} s"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
