"""`octavo doctor`: what is installed here, which types have fast matmuls, what is missing and how to get it."""

import argparse
import dataclasses
import json
import platform
import re
from importlib import metadata
from typing import Any

from octavo._optional import installed_version
from octavo.cli import machine
from octavo.cli.probe import NO_ANSWER, SHAPE, probe

# Extras for building the documentation, which are not reported as missing.
_NOT_ASKED = ("docs",)
_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?:\[[^]]*\])?\s*(?P<bound>[^;]*)(?:;.*extra\s*==\s*['\"](?P<extra>[\w-]+))?"
)


@dataclasses.dataclass(frozen=True)
class Requirement:
    """A requirement of Octavo, the extra it belongs to (None: the core), and the installed version if any."""

    name: str
    bound: str
    extra: str | None
    installed: str | None

    @property
    def is_met(self) -> bool:
        return self.installed is not None and at_least(self.installed, self.bound)


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine has, which number types have fast matmuls, and what is missing",
        description="Print versions, CPU and devices; time a matmul in each number type against float32 on the default "
        "backend; list what is missing with the command that installs it. Takes a few seconds.",
        epilog="Exit status 1 when something Octavo cannot run without is missing. Next: make train",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when something that Octavo cannot run without is missing."""
    report = examine()
    print(json.dumps(report, indent=2) if args.json else show(report))
    return int(any(item["essential"] for item in report["missing"]))


def examine() -> dict:
    """The report as JSON."""
    requirements = read_requirements(metadata.requires("octavo") or [])
    probed = probe()
    return {
        "octavo": metadata.version("octavo"),
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in ("jax", "jaxlib", *(r.name for r in requirements))},
        "cpu": dataclasses.asdict(machine.cpu()),
        "compiler": machine.compiler(),
        **probed,
        "missing": missing(requirements, probed),
    }


def read_requirements(lines: list[str]) -> list[Requirement]:
    """Requirements from a distribution's metadata, without extras for building the documentation."""
    parsed = [match for line in lines if (match := _REQUIREMENT.match(line))]
    return [
        Requirement(match["name"], match["bound"].strip(), match["extra"], installed_version(match["name"]))
        for match in parsed
        if match["extra"] not in _NOT_ASKED
    ]


def at_least(version: str, bound: str) -> bool:
    """Whether the version satisfies the lower bound in a specifier such as '>=0.12'; true where there is none."""
    lower = re.search(r">=\s*([\d.]+)", bound)
    return lower is None or _release(version) >= _release(lower[1])


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def missing(requirements: list[Requirement], probed: dict) -> list[dict]:
    """What is missing, each with the command that installs it; Octavo cannot run without what is essential."""
    found = []

    def add(problem: str, fix: str, essential: bool = False) -> None:
        found.append({"problem": problem, "fix": fix, "essential": essential})

    if not at_least(platform.python_version(), metadata.metadata("octavo").get("Requires-Python") or ""):
        add(f"Python {platform.python_version()} is too old", "uv python install 3.12", essential=True)
    if probed["error"] and probed["error"].startswith(NO_ANSWER):
        add(f"JAX gave {probed['error']}: the machine or its device is busy", "octavo doctor, when it is idle")
    elif probed["error"]:
        add(f"JAX does not run: {probed['error']}", _pip("--upgrade", "jax"), essential=True)
    unmet = [requirement for requirement in requirements if not requirement.is_met]
    for extra in dict.fromkeys(requirement.extra for requirement in unmet):
        group = [requirement for requirement in unmet if requirement.extra == extra]
        names = ", ".join(f"{r.name} {r.installed} (needs {r.bound})" if r.installed else r.name for r in group)
        label = "required" if extra is None else f"extra '{extra}'"
        add(f"{label}: {names}", _pip(*(r.name + r.bound for r in group)), essential=extra is None)
    if machine.compiler() is None:
        fix = "xcode-select --install" if platform.system() == "Darwin" else "apt install g++"
        add("no C++ compiler: the CPU kernels cannot be built", fix)
    elif probed["kernels"] and not probed["kernels"]["ready"]:
        add(probed["kernels"]["status"].partition(":")[0], "python -m octavo.kernels.build")
    for accelerator in machine.accelerators():
        if probed["platform"] not in (accelerator.platform, None):
            problem = f"{accelerator.name} present, but JAX runs on {probed['platform']}"
            add(problem, _pip("--upgrade", accelerator.requirement))
    return found


def _pip(*words: str) -> str:
    return " ".join(["python -m pip install", *(f"'{w}'" if re.search(r"[<>\[]", w) else w for w in words)])


def show(report: dict) -> str:
    """The report as text."""
    cpu, kernels = report["cpu"], report["kernels"]
    kinds = {kind: report["devices"].count(kind) for kind in report["devices"]}
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"
    hardware = {
        "cpu": f"{cpu['model']}, {cpu['cores']} cores",
        "has": " ".join(cpu["has"]) or "unknown",
        "lacks": " ".join(cpu["lacks"]) or "-",
        "compiler": report["compiler"] or "none",
        **({"kernels": kernels["status"]} if kernels else {}),
        "devices": f"{devices} (backend {report['platform'] or 'none'})",
    }
    lines = [f"octavo {report['octavo']}", f"  {'python':18}{report['python']}"]
    lines += [f"  {name:18}{version or 'not installed'}" for name, version in report["versions"].items()]
    lines += ["", "machine", *(f"  {name:10}{text}" for name, text in hardware.items())]
    if report["dots"]:
        rows, inner, columns = SHAPE
        lines += ["", f"matmuls, {rows}x{inner} by {inner}x{columns}, speed against float32"]
        lines += [_dot_line(name, dot) for name, dot in report["dots"].items()]
    lines += ["", "missing" if report["missing"] else "nothing is missing"]
    for item in report["missing"]:
        lines += [f"  {item['problem']}", f"    {item['fix']}"]
    return "\n".join(lines)


def _dot_line(name: str, dot: dict) -> str:
    if not dot["runs"]:
        return f"  {name:16}unsupported   {dot['reason']}"
    speed = f"{dot['speed']:.2f}x" if dot["speed"] else "-"
    return f"  {name:16}runs  {speed:>6}  {dot['verdict']}"
