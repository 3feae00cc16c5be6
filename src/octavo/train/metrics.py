"""The record of a run: one line of JSON for each step, and the same for TensorBoard."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from octavo.train.events import EventWriter

METRICS = "metrics.jsonl"
TELEMETRY = "telemetry.jsonl"
EVAL = "eval/"
_RESERVED = ("step", "run_name")


class MetricWriter:
    """Writes a run's metrics to `metrics.jsonl`, its telemetry to `telemetry.jsonl` and both to `tensorboard/`.

    Every line is handed to the operating system before `write` returns, so a killed process loses at most the line that
    it was writing. A run that resumes gives its first step as `start_step`: lines from there on are dropped, and a torn
    one with them, so that each step and each evaluation stands once. `extra_file` gets a second copy of the metrics.

    JSON has no word for NaN and infinity, so a number that is not finite is written as null; TensorBoard gets it as it
    is. Names follow MaxText: `learning/loss`, `perf/step_time_seconds`, `eval/avg_loss`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with MetricWriter(directory, run_name="demo", tensorboard=False) as writer:
    ...         writer.write(0, {"learning/loss": 2.5, "learning/grad_norm": float("inf")})
    ...     print(Path(directory, "metrics.jsonl").read_text(), end="")
    {"step": 0, "run_name": "demo", "learning/loss": 2.5, "learning/grad_norm": null}
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        run_name: str,
        tensorboard: bool,
        extra_file: str = "",
        start_step: int = 0,
    ):
        folder = Path(directory)
        copies = [Path(extra_file)] if extra_file else []
        self.run_name = run_name
        self._metrics = [_Lines(path, start_step) for path in (folder / METRICS, *copies)]
        self._telemetry = _Lines(folder / TELEMETRY, start_step)
        self._events = EventWriter(folder / "tensorboard", start_step=start_step) if tensorboard else None

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write what is known about a step, at once; what evaluation found, names with `eval/`, may follow."""
        self._write(step, metrics, self._metrics)

    def write_telemetry(self, step: int, telemetry: Mapping[str, Any]) -> None:
        """Write what quantization does to tensors at this step: numbers, or nested mappings and lists of them."""
        self._write(step, telemetry, [self._telemetry])

    def close(self) -> None:
        """Close all files; harmless when they are closed."""
        for lines in (*self._metrics, self._telemetry):
            lines.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, step: int, values: Mapping[str, Any], files: "list[_Lines]") -> None:
        taken = [name for name in _RESERVED if name in values]
        if taken:
            raise ValueError(
                f"{taken[0]!r} is written by MetricWriter itself: give the metric of step {step} another name"
            )
        plain = {name: _plain(value) for name, value in values.items()}
        for lines in files:
            lines.append(step, {"step": step, "run_name": self.run_name, **_finite(plain)})
        if self._events is not None:
            self._events.write(step, dict(flatten(plain)))


class NoMetrics:
    """The writer of a process that leaves writing to another."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def write_telemetry(self, step: int, telemetry: Mapping[str, Any]) -> None:
        pass

    def __enter__(self) -> "NoMetrics":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """A metrics file as one dictionary for each step, in order, without a last line that was cut off."""
    steps: dict[int, dict[str, Any]] = {}
    for _, line in _read(Path(path)):
        steps.setdefault(line["step"], {}).update(line)
    return [steps[step] for step in sorted(steps)]


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """The numbers in nested mappings, each with its path.

    >>> dict(flatten({"loss": 2.5, "sqnr": {"weight": 31.0, "note": "not a number"}}))
    {'loss': 2.5, 'sqnr/weight': 31.0}
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


class _Lines:
    """A file with one JSON object per step and per evaluation, which starts with those before `start_step`."""

    def __init__(self, path: Path, start_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        kept = [(text, line) for text, line in _read(path) if line["step"] < start_step] if path.exists() else []
        self._last = {_is_eval(line): line["step"] for _, line in kept}
        whole = b"".join(text + b"\n" for text, _ in kept)
        if path.exists() and path.read_bytes() != whole:
            _replace(path, whole)
        self._file = path.open("ab", buffering=0)

    def append(self, step: int, line: Mapping[str, Any]) -> None:
        kind = _is_eval(line)
        if step <= self._last.get(kind, -1):
            raise ValueError(
                f"{self.path.name} has step {self._last[kind]} already, so step {step} cannot follow: write each step "
                "once, in order, with everything that is known about it"
            )
        # One call of the system per line: what it returns from outlives the process.
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._last[kind] = step

    def close(self) -> None:
        self._file.close()


def _is_eval(line: Mapping[str, Any]) -> bool:
    names = line.keys() - _RESERVED
    return bool(names) and all(name.startswith(EVAL) for name in names)


def _read(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    lines = path.read_bytes().split(b"\n")
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            line["step"] = int(line["step"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                return
            shown = text[:60].decode(errors="replace")
            raise ValueError(
                f"{path}, line {number}: not a JSON object with a step: {shown!r}; remove the line or the file"
            ) from error
        yield text, line


def _replace(path: Path, data: bytes) -> None:
    """Change a file at once: whoever looks, also after a crash, finds the old bytes or the new."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _plain(value: Any) -> Any:
    """Arrays as Python numbers and lists, at any depth."""
    if isinstance(value, Mapping):
        return {str(name): _plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _finite(value: Any) -> Any:
    """The same with null for what is not finite."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
