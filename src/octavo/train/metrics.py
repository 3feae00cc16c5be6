"""Metrics of a run: one line of JSON per step, and TensorBoard events."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo._io import atomic_write
from octavo._optional import import_optional

METRICS = "metrics.jsonl"
TELEMETRY = "telemetry.jsonl"
EVAL = "eval/"
_RESERVED = ("step", "run_name")


class MetricWriter:
    """Writes a run's metrics to `metrics.jsonl`, its telemetry to `telemetry.jsonl` and both to `tensorboard/`.

    Every line is flushed before `write` returns, so a killed process loses at most the line that it was writing. A run
    that resumes gives its first step as `start_step`: lines from there on are dropped, and an incomplete one with them,
    so that each step and each evaluation is there once. `extra_file` gets a second copy of the metrics, and the project
    `wandb_project` of Weights & Biases a third. If `directory` is None, as in processes other than the main one,
    nothing is written.

    JSON has no NaN and infinity, so a number that is not finite is written as null; TensorBoard gets it as it is. Names
    follow MaxText: `learning/loss`, `perf/step_time_seconds`, `eval/avg_loss`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with MetricWriter(directory, run_name="demo", tensorboard=False) as writer:
    ...         writer.write(0, {"learning/loss": 2.5, "learning/grad_norm": float("inf")})
    ...     print(Path(directory, "metrics.jsonl").read_text(), end="")
    {"step": 0, "run_name": "demo", "learning/loss": 2.5, "learning/grad_norm": null}
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        run_name: str,
        tensorboard: bool,
        extra_file: str = "",
        wandb_project: str = "",
        start_step: int = 0,
    ):
        self.run_name = run_name
        self._metrics: list[_Lines] = []
        self._telemetry: list[_Lines] = []
        self._events: list[EventWriter | WandbWriter] = []
        if directory is None:
            return
        folder = Path(directory)
        copies = [Path(extra_file)] if extra_file else []
        self._metrics = [_Lines(path, start_step) for path in (folder / METRICS, *copies)]
        self._telemetry = [_Lines(folder / TELEMETRY, start_step)]
        if tensorboard:
            self._events.append(EventWriter(folder / "tensorboard", start_step=start_step))
        if wandb_project:
            self._events.append(WandbWriter(folder, project=wandb_project, run_name=run_name))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step; those of an evaluation, named `eval/...`, may follow."""
        self._write(step, metrics, self._metrics)

    def write_telemetry(self, step: int, telemetry: Mapping[str, Any]) -> None:
        """Write the telemetry of a step: numbers, or nested mappings and lists of them."""
        self._write(step, telemetry, self._telemetry)

    def close(self) -> None:
        """Close all files; does nothing when they are closed."""
        for file in (*self._metrics, *self._telemetry, *self._events):
            file.close()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, step: int, values: Mapping[str, Any], files: "list[_Lines]") -> None:
        if taken := [name for name in _RESERVED if name in values]:
            text = f"{taken[0]!r} is written by MetricWriter itself: give the metric of step {step} another name"
            raise ValueError(text)
        for lines in files:
            lines.append(step, {"step": step, "run_name": self.run_name, **as_json(values)})
        for events in self._events:
            events.write(step, dict(flatten(as_json(values, nulls=False))))


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """A metrics file as one dictionary per step, in order, without an incomplete last line."""
    steps: dict[int, dict[str, Any]] = {}
    for _, line in _read_lines(Path(path)):
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
    """A file with one JSON object per step and per evaluation; those from `start_step` on are dropped."""

    def __init__(self, path: Path, start_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        kept = [(text, line) for text, line in _read_lines(path) if line["step"] < start_step] if path.exists() else []
        self._last = {_is_eval(line): line["step"] for _, line in kept}
        whole = b"".join(text + b"\n" for text, _ in kept)
        if path.exists() and path.read_bytes() != whole:
            atomic_write(path, whole)
        self._file = path.open("ab", buffering=0)

    def append(self, step: int, line: Mapping[str, Any]) -> None:
        kind = _is_eval(line)
        if step <= self._last.get(kind, -1):
            raise ValueError(
                f"{self.path.name} has step {self._last[kind]} already, so step {step} cannot follow: write each step "
                "once, in order, with everything that is known about it"
            )
        # Unbuffered, one system call per line: written lines survive a killed process.
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._last[kind] = step

    def close(self) -> None:
        self._file.close()


def _is_eval(line: Mapping[str, Any]) -> bool:
    names = line.keys() - _RESERVED
    return bool(names) and all(name.startswith(EVAL) for name in names)


def _read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
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


class EventWriter:
    """Writes scalars to a new event file in `directory`.

    Every event is flushed before `write` returns: tensorboardX's `SummaryWriter` queues them, and what a killed process
    has queued would be missing from a run that resumes. Where a directory has event files already, the new one begins
    with a session start, which makes TensorBoard drop what they say about `start_step` and later steps.
    """

    def __init__(self, directory: str | os.PathLike[str], *, start_step: int = 0):
        needed = ("enable_tensorboard=true", "'octavo[training]', or set enable_tensorboard=false")
        self._event: Any = import_optional("tensorboardX.proto.event_pb2", *needed).Event
        writer: Any = import_optional("tensorboardX.event_file_writer", *needed).EventsWriter
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sum(1 for _ in folder.glob("events.out.tfevents.*"))
        # TensorBoard reads files in the order of their names, and two runs may start within a second.
        self._writer = writer(str(folder / "events"), f".{earlier:04d}")
        if earlier:
            event = self._event(wall_time=time.time(), step=start_step)
            event.session_log.status = event.session_log.START
            self._writer.write_event(event)
        self._writer.flush()

    def write(self, step: int, scalars: Mapping[str, int | float]) -> None:
        """Write one event with these scalars, which are stored as float32."""
        event = self._event(wall_time=time.time(), step=step)
        for tag, value in scalars.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Close the file; does nothing when it is closed."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def import_wandb(project: str) -> Any:
    """The package `wandb`, which a project needs."""
    return import_optional("wandb", f"wandb_project_name={project}", "wandb, or leave wandb_project_name out")


class WandbWriter:
    """Sends scalars to a project of Weights & Biases, by the package `wandb`, whose login and settings apply.

    A run that resumes continues the W&B run of the same id, which is that of the project and the run. W&B ignores steps
    that it has already.
    """

    def __init__(self, directory: Path, *, project: str, run_name: str):
        name = run_name.replace("/", "-")
        self._run: Any = import_wandb(project).init(
            project=project, name=run_name, id=f"{project}-{name}", resume="allow", dir=str(directory)
        )

    def write(self, step: int, scalars: Mapping[str, int | float]) -> None:
        """Send the scalars of a step."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """End the run; does nothing when it has ended."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def as_json(value: Any, *, nulls: bool = True) -> Any:
    """Nested values with arrays as numbers and lists, and None for numbers that are not finite, which JSON lacks."""
    if isinstance(value, Mapping):
        return {str(name): as_json(x, nulls=nulls) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(x, nulls=nulls) for x in value]
    if hasattr(value, "tolist"):
        return as_json(value.tolist(), nulls=nulls)
    return None if nulls and isinstance(value, float) and not math.isfinite(value) else value
