"""`octavo doctor`: what is here, what multiplies fast, what is missing and how to get it."""

import argparse
import dataclasses
import json
import platform
import re
from importlib import metadata

from octavo.cli import machine
from octavo.cli.probe import SHAPE, probe

# Extras for people who build the documentation: their absence is no finding.
_NOT_ASKED = ("docs",)
_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?:\[[^]]*\])?\s*(?P<bound>[^;]*)(?:;.*extra\s*==\s*['\"](?P<extra>[\w-]+))?"
)


@dataclasses.dataclass(frozen=True)
class Requirement:
    """One requirement of Octavo, the extra it belongs to (None: the core), and the installed version if any."""

    name: str
    bound: str
    extra: str | None
    installed: str | None

    @property
    def met(self) -> bool:
        return self.installed is not None and at_least(self.installed, self.bound)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when something that Octavo cannot run without is missing."""
    report = examine()
    print(json.dumps(report, indent=2) if args.json else show(report))
    return int(any(item["essential"] for item in report["missing"]))


def examine() -> dict:
    """Everything the doctor knows, as plain data."""
    requirements = read_requirements(metadata.requires("octavo") or [])
    probed = probe()
    versions = {name: installed(name) for name in ("jax", "jaxlib", *(r.name for r in requirements))}
    return {
        "octavo": metadata.version("octavo"),
        "python": platform.python_version(),
        "versions": versions,
        "cpu": dataclasses.asdict(machine.cpu()),
        "compiler": machine.compiler(),
        **probed,
        "missing": missing(requirements, probed),
    }


def read_requirements(lines: list[str]) -> list[Requirement]:
    """Requirements from a distribution's metadata, without those nobody is asked to install."""
    parsed = [match for line in lines if (match := _REQUIREMENT.match(line))]
    return [
        Requirement(match["name"], match["bound"].strip(), match["extra"], installed(match["name"]))
        for match in parsed
        if match["extra"] not in _NOT_ASKED
    ]


def installed(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def at_least(version: str, bound: str) -> bool:
    """Whether the version satisfies the lower bound in a specifier such as '>=0.12'; true where there is none."""
    lower = re.search(r">=\s*([\d.]+)", bound)
    return lower is None or _release(version) >= _release(lower[1])


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def missing(requirements: list[Requirement], probed: dict) -> list[dict]:
    """What is missing, each with the command that mends it; essential is what Octavo cannot run without."""
    found = []

    def add(problem: str, fix: str, essential: bool = False) -> None:
        found.append({"problem": problem, "fix": fix, "essential": essential})

    if not at_least(platform.python_version(), metadata.metadata("octavo").get("Requires-Python") or ""):
        add(f"Python {platform.python_version()} is too old", "uv python install 3.12", essential=True)
    if probed["error"]:
        add(f"JAX does not run: {probed['error']}", _pip("--upgrade", "jax"), essential=True)

    by_extra: dict[str | None, list[Requirement]] = {}
    for requirement in requirements:
        if not requirement.met:
            by_extra.setdefault(requirement.extra, []).append(requirement)
    for extra, unmet in by_extra.items():
        names = ", ".join(f"{r.name} {r.installed} (needs {r.bound})" if r.installed else r.name for r in unmet)
        label = "required" if extra is None else f"extra '{extra}'"
        add(f"{label}: {names}", _pip(*(r.name + r.bound for r in unmet)), essential=extra is None)

    if machine.compiler() is None:
        add("no C++ compiler: the CPU kernels cannot be built", machine.compiler_fix())
    elif probed["kernels"] and not probed["kernels"]["ready"]:
        add(probed["kernels"]["status"].partition(":")[0], "python -m octavo.kernels.build")
    for accelerator in machine.accelerators():
        if probed["platform"] not in (accelerator.platform, None):
            problem = f"{accelerator.name} present, but JAX runs on {probed['platform']}"
            add(problem, _pip("--upgrade", accelerator.requirement))
    return found


def _pip(*words: str) -> str:
    quoted = [f"'{word}'" if re.search(r"[<>\[]", word) else word for word in words]
    return " ".join(["python -m pip install", *quoted])


def show(report: dict) -> str:
    """The report as text."""
    cpu = report["cpu"]
    lines = [f"octavo {report['octavo']}", f"  {'python':18}{report['python']}"]
    lines += [f"  {name:18}{version or 'not installed'}" for name, version in report["versions"].items()]

    lines += ["", "machine", f"  {'cpu':10}{cpu['model']}, {cpu['cores']} cores"]
    lines += [f"  {'has':10}{' '.join(cpu['has']) or 'unknown'}", f"  {'lacks':10}{' '.join(cpu['lacks']) or '-'}"]
    lines += [f"  {'compiler':10}{report['compiler'] or 'none'}"]
    if report["kernels"]:
        lines += [f"  {'kernels':10}{report['kernels']['status']}"]
    kinds = {kind: report["devices"].count(kind) for kind in report["devices"]}
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"
    lines += [f"  {'devices':10}{devices} (backend {report['platform'] or 'none'})"]

    if report["dots"]:
        rows, inner, columns = SHAPE
        lines += ["", f"matrix products, {rows}x{inner} by {inner}x{columns}, speed against float32"]
        lines += [_dot_line(name, dot) for name, dot in report["dots"].items()]

    lines += ["", "missing" if report["missing"] else "nothing is missing"]
    for item in report["missing"]:
        lines += [f"  {item['problem']}", f"    {item['fix']}"]
    return "\n".join(lines)


def _dot_line(name: str, dot: dict) -> str:
    if not dot["runs"]:
        return f"  {name:16}refused       {dot['reason']}"
    speed = f"{dot['speed']:.2f}x" if dot["speed"] else "-"
    return f"  {name:16}runs  {speed:>6}  {dot['verdict']}"
