"""A run as its directory tells it: whatever is there, and a sentence about what cannot be read."""

import dataclasses
import functools
import json
import os
import statistics
from pathlib import Path
from typing import Any

from octavo._names import did_you_mean
from octavo.report.scale import Point
from octavo.report.words import Number
from octavo.train.config import Config
from octavo.train.metrics import METRICS, TELEMETRY, read_metrics

LOSS = "learning/loss"
EVAL_LOSS = "eval/avg_loss"
STEP_SECONDS = "perf/step_time_seconds"
MEMORY = "perf/memory_bytes"
TOKENS = "perf/per_device_tokens_per_sec"
TFLOPS = "perf/per_device_tflops_per_sec"
_LOW = ("native", "emulated")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run wrote down. Parts that are not there are empty or None; `problems` says which could not be read."""

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
        return "quantized" if self.config.get("quantization_rules_path") else "float"

    def series(self, name: str) -> list[Point]:
        """A metric by step; None where it was not finite."""
        return [(line["step"], line[name]) for line in self.metrics if name in line]

    @functools.cached_property
    def step_seconds(self) -> Number | None:
        """The median time of a step. The first one also compiles, so it does not count if there are others."""
        return self.median(STEP_SECONDS)

    def median(self, name: str) -> Number | None:
        """The median of a metric over all steps but the first."""
        found = [y for _, y in self.series(name) if y is not None]
        return statistics.median(found[1:] or found) if found else None

    @property
    def memory(self) -> Number | None:
        """The most bytes that a step needed."""
        return max((y for _, y in self.series(MEMORY) if y is not None), default=None)

    def share(self, backward: bool | None = None) -> Number | None:
        """The share of matmul FLOPs in low precision, of both passes or of one, from the verification."""
        found = (self.verification or {}).get("products", [])
        chosen = [p for p in found if backward in (None, p["backward"])]
        total = sum(p["flops"] for p in chosen)
        return sum(p["flops"] for p in chosen if p["kind"] in _LOW) / total if total else None


def read_run(directory: str | os.PathLike[str]) -> Run:
    """Read a run's directory."""
    folder = Path(directory)
    if not folder.is_dir():
        beside = sorted(p.name for p in folder.parent.iterdir() if p.is_dir()) if folder.parent.is_dir() else []
        hint = did_you_mean(folder.name, beside)
        raise FileNotFoundError(f"there is no run in {folder}: {hint}Give a run's base_output_directory/run_name")
    if not any((folder / name).exists() for name in (METRICS, "config.yml", "plan.json")):
        raise FileNotFoundError(f"{folder} is no run's directory: it has no {METRICS}, config.yml or plan.json")
    problems: list[str] = []

    def read(name: str, how: Any, empty: Any) -> Any:
        try:
            return how(folder / name) if (folder / name).exists() else empty
        except (ValueError, OSError) as error:
            problems.append(f"{name} cannot be read: {error}")
            return empty

    return Run(
        directory=folder,
        metrics=read(METRICS, read_metrics, []),
        telemetry=read(TELEMETRY, read_metrics, []),
        config=read("config.yml", _yaml, {}),
        data=read("data.json", _json, {}),
        plan=read("plan.json", _json, None),
        verification=read("verify.json", _json, None),
        problems=tuple(problems),
    )


_FREE = {"run_name", "base_output_directory", "log_period", "metrics_file", "enable_tensorboard", "checkpoint_period"}
_FREE |= {"enable_checkpointing", "async_checkpointing", "max_num_checkpoints_to_keep", "keep_period"}
"""Keys that may differ between a run and its twin beside those of quantization: names, places and records."""
_FREE_GROUPS = ("quantization", "schedule", "serving")
_MOST_BESIDE = 200


def float_twin(run: Run) -> Run | None:
    """The float run in the same place that differs from this one in its number formats only; the latest of several."""
    if run.precision == "float" or not run.config or not run.metrics:
        return None
    beside = [p for p in run.directory.resolve().parent.iterdir() if (p / METRICS).is_file()][:_MOST_BESIDE]
    wanted, found = _bound(run.config), []
    for folder in beside:
        try:
            other = read_run(folder)
        except OSError:
            continue
        if other.precision == "float" and other.metrics and other.config and _bound(other.config) == wanted:
            found.append(other)
    return max(found, key=lambda other: (other.directory / METRICS).stat().st_mtime) if found else None


def _bound(config: dict[str, Any]) -> dict[str, Any]:
    """The keys on which the curve of a float run depends."""
    groups = {field.name: field.metadata["key"].group for field in dataclasses.fields(Config)}
    return {k: v for k, v in config.items() if k not in _FREE and groups.get(k) not in _FREE_GROUPS}


def _json(path: Path) -> dict[str, Any]:
    return _mapping(json.loads(path.read_text("utf8")))


def _yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ValueError("reading YAML takes the package pyyaml (pip install octavo[training])") from error
    try:
        return _mapping(yaml.safe_load(path.read_text("utf8")))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a mapping is expected, this is a {type(value).__name__}")
    return value
