"""A training run, read from its directory: the files that exist, and problems with those that cannot be read."""

import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo._documents import parse_json, parse_yaml
from octavo._names import did_you_mean
from octavo.report.axis import Point
from octavo.report.format import Number
from octavo.train.config import Config
from octavo.train.metrics import METRICS, TELEMETRY, read_metrics

FLOAT = "float"
LOSS = "learning/loss"
EVAL_LOSS = "eval/avg_loss"
STEP_SECONDS = "perf/step_time_seconds"
MEMORY = "perf/memory_bytes"
TOKENS = "perf/per_device_tokens_per_sec"
TFLOPS = "perf/per_device_tflops_per_sec"
RUN_FILES = (METRICS, "config.yml", "plan.json")


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of a run. Those that are not there are empty or None; `problems` names those that cannot be read."""

    directory: Path
    metrics: list[dict[str, Any]]
    telemetry: list[dict[str, Any]]
    config: dict[str, Any]
    data: dict[str, Any]
    plan: dict[str, Any] | None
    verification: dict[str, Any] | None
    problems: tuple[str, ...]

    @property
    def name(self) -> str:
        return str(self.config.get("run_name") or self.directory.resolve().name)

    @property
    def precision(self) -> str:
        """The recipe, "float", or "quantized" where rules come from a file."""
        if self.config.get("quantization"):
            return str(self.config["quantization"])
        return "quantized" if self.config.get("quantization_rules_path") else FLOAT

    @property
    def steps(self) -> int:
        """The number of steps that were recorded."""
        return len(self.series(LOSS))

    def series(self, name: str) -> list[Point]:
        """A metric by step; None where it was not finite."""
        return [(line["step"], line[name]) for line in self.metrics if name in line]

    @functools.cached_property
    def step_seconds(self) -> Number | None:
        """The median time of a step."""
        return self.median(STEP_SECONDS)

    def median(self, name: str) -> Number | None:
        """The median of a metric over all steps but the first, which also compiles."""
        found = [y for _, y in self.series(name) if y is not None]
        return statistics.median(found[1:] or found) if found else None

    @property
    def tokens_per_second(self) -> Number | None:
        return self.median(TOKENS)

    @property
    def gflops(self) -> Number | None:
        tflops = self.median(TFLOPS)
        return None if tflops is None else 1000 * tflops

    @property
    def memory(self) -> Number | None:
        """The peak memory of a step, in bytes."""
        return max((y for _, y in self.series(MEMORY) if y is not None), default=None)

    def share(self, backward: bool | None = None) -> Number | None:
        """The share of matmul FLOPs in low precision, of both passes or of one, from the verification."""
        matmuls = [p for p in (self.verification or {}).get("matmuls", []) if backward in (None, p["backward"])]
        total = sum(p["flops"] for p in matmuls)
        return sum(p["flops"] for p in matmuls if p["kind"] in ("native", "emulated")) / total if total else None


def tail(points: Sequence[Point]) -> tuple[Number | None, int]:
    """The mean over the last tenth of the steps, None if one of them is not finite, and the number of these steps.

    >>> tail([(0, 4.0), (1, 2.0)]), tail([])
    ((2.0, 1), (None, 0))
    """
    values = [y for _, y in points[-max(1, len(points) // 10) :]]
    known = [y for y in values if y is not None]
    return (statistics.fmean(known) if values and len(known) == len(values) else None), len(values)


def divide(a: Number | None, b: Number | None) -> Number | None:
    """A quotient of numbers that may be unknown."""
    return a / b if a is not None and b else None


def read_run(directory: str | os.PathLike[str]) -> Run:
    """Read a run's directory."""
    folder = Path(directory)
    if not folder.is_dir():
        hint = did_you_mean(folder.name, neighbors(folder))
        raise FileNotFoundError(f"there is no run in {folder}: {hint}Give a run's base_output_directory/run_name")
    if not any((folder / name).exists() for name in RUN_FILES):
        raise FileNotFoundError(f"{folder} is no run's directory: it has no {METRICS}, config.yml or plan.json")
    problems: list[str] = []

    def read(name: str, parse: Callable[[Path], Any], default: Any) -> Any:
        try:
            return parse(folder / name) if (folder / name).exists() else default
        except (ValueError, OSError) as error:
            problems.append(f"{name} cannot be read: {error}")
            return default

    found = {
        "metrics": read(METRICS, read_metrics, []),
        "telemetry": read(TELEMETRY, read_metrics, []),
        "config": read("config.yml", _read_mapping, {}),
        "data": read("data.json", _read_mapping, {}),
        "plan": read("plan.json", _read_mapping, None),
        "verification": read("verify.json", _read_mapping, None),
    }
    return Run(directory=folder, **found, problems=tuple(problems))


def neighbors(path: Path) -> list[str]:
    """The sibling directories of a path, by name."""
    return sorted(p.name for p in path.parent.iterdir() if p.is_dir()) if path.parent.is_dir() else []


_FREE = {"run_name", "base_output_directory", "log_period", "metrics_file", "enable_tensorboard", "checkpoint_period"}
_FREE |= {"enable_checkpointing", "async_checkpointing", "max_num_checkpoints_to_keep", "keep_period"}
"""Keys besides those of quantization that may differ between a run and its float twin."""
_FREE_GROUPS = ("quantization", "schedule", "serving")
_MOST_NEIGHBORS = 200


def float_twin(run: Run) -> Run | None:
    """The float run in a sibling directory with otherwise the same configuration; the latest of several."""
    if run.precision == FLOAT or not run.config or not run.metrics:
        return None
    folders = [p for p in run.directory.resolve().parent.iterdir() if (p / METRICS).is_file()][:_MOST_NEIGHBORS]
    wanted, found = _comparable(run.config), []
    for folder in folders:
        try:
            other = read_run(folder)
        except OSError:
            continue
        if other.precision == FLOAT and other.metrics and other.config and _comparable(other.config) == wanted:
            found.append(other)
    return max(found, key=lambda other: (other.directory / METRICS).stat().st_mtime) if found else None


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    """The keys on which the loss of a float run depends."""
    groups = {field.name: field.metadata["key"].group for field in dataclasses.fields(Config)}
    return {k: v for k, v in config.items() if k not in _FREE and groups.get(k) not in _FREE_GROUPS}


def _read_mapping(path: Path) -> dict[str, Any]:
    parse = parse_json if path.suffix == ".json" else parse_yaml
    value = parse(path.read_text("utf8"))
    if not isinstance(value, dict):
        raise ValueError(f"a mapping is expected, this is a {type(value).__name__}")
    return value
