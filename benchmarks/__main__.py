"""Run every benchmark in a fixed order and write docs/benchmarks.md.

    python benchmarks [--quick] [--torch PYTHON] [--llama PYTHON] [--only matmul,step] [--out FILE]

Each script runs in a process of its own, one after the other, and prints what it prints by itself. With `--only`, the
other sections of the page stay as they were made.
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

from timing import Table, header

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"


@dataclass(frozen=True)
class Script:
    """A benchmark: its heading, what makes it quick, and the interpreters that it may be given."""

    name: str
    title: str
    quick: tuple[str, ...] = ("--quick",)
    # A script that writes no tables is quoted as it prints.
    tables: bool = True
    interpreters: tuple[str, ...] = ()


SCRIPTS = (
    Script("formats", "Number formats"),
    Script("matmul", "Matmuls and their gradients", interpreters=("torch",)),
    Script("step", "A training step"),
    Script("trace", "Tracing and compiling"),
    Script("decode", "Generating text", tables=False, interpreters=("llama",)),
    Script("matvec", "Reading weights", quick=("--repeats", "9", "--layers", "10", "--vocab", "16384"), tables=False),
    Script("memory", "Memory"),
    Script("convert", "Converting a model"),
    Script("convergence", "Convergence"),
    Script("probe", "Telemetry"),
    Script("startup", "Importing"),
)

BUSY = " **The machine was busy with other things**: times say little, and ratios are rough."

INTRO = """\
# Benchmarks

Made by `make bench`, which runs every script of `benchmarks/` and writes this page; `make bench ARGS=--quick` takes
a few minutes. Times are the fastest of several rounds in which all contenders take turns; *spread* is how much slower
the median round was, so a ratio that is closer to 1 than the spread says nothing. Peers do the same job in the same run
where they can do it on this machine. Sections say when they were made, since they can be made again one by one.
"""


def about(name: str) -> str:
    """What a script says of itself, without the lines that tell how to call it."""
    text = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or ""
    kept = [part for part in text.split("\n\n") if not part.lstrip().startswith("python benchmarks/")]
    return "\n\n".join(" ".join(part.split()) for part in kept)


def section(script: Script, options: argparse.Namespace, folder: Path) -> str | None:
    """Run a script and give its part of the page, or None if it failed."""
    file = folder / f"{script.name}.json"
    command = [sys.executable, str(HERE / f"{script.name}.py"), *(script.quick if options.quick else ())]
    command += ["--json", str(file)] if script.tables else []
    for name in script.interpreters:
        if python := getattr(options, name):
            command += [f"--{name}", python]
    print(f"\n== {script.name}", flush=True)
    begin, load = time.perf_counter(), os.getloadavg()[0]
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            printed.append(line)
    if child.returncode:
        print(f"{script.name} failed with status {child.returncode}", file=sys.stderr)
        return None
    seconds = time.perf_counter() - begin
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    mode = "quick, " if options.quick else ""
    lines = [f"## {script.title}", f"`benchmarks/{script.name}.py`. {about(script.name)}"]
    made = f"Made on {when} ({mode}{seconds:.0f} s; load of the machine before it {load:.1f})."
    made += BUSY if load > 1 else ""
    if not script.tables:
        return "\n\n".join([*lines, made, f"```\n{''.join(printed).strip()}\n```"])
    found = json.loads(file.read_text())
    lines.append(f"{made} {' '.join(found['header'].split(chr(10)))}; {' '.join(found['how'].split())}.")
    for row in found["tables"]:
        table = Table(
            row["title"], tuple(row["columns"]), tuple(map(tuple, row["rows"])), row["note"], tuple(row["ratios"])
        )
        lines.append(table.markdown())
        if slow := table.slower():
            lines.append("Slower here: " + "; ".join(slow) + ".")
    return "\n\n".join(lines)


def sections(page: Path) -> dict[str, str]:
    """The sections of a page that was written before, by heading."""
    text = page.read_text() if page.exists() else ""
    return {part.split("\n", 1)[0]: f"## {part.strip()}" for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: under ten minutes on two quiet cores")
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter with torch and torchao")
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter with llama-cpp-python")
    parser.add_argument("--only", metavar="NAMES", help="some of them: " + ",".join(s.name for s in SCRIPTS))
    parser.add_argument("--out", metavar="FILE", default=str(PAGE), help="the page (default: docs/benchmarks.md)")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [script.name for script in SCRIPTS]
    if unknown := set(names) - {script.name for script in SCRIPTS}:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    page, failed = Path(options.out), []
    kept = sections(page)
    print(header())
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
            body = [kept[script.title] for script in SCRIPTS if script.title in kept]
            page.write_text("\n\n".join([INTRO.strip(), *body]) + "\n")
    print(f"\nwrote {page}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
