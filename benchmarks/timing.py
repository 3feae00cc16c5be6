"""What the benchmarks share: timing several functions side by side, and a header that says where."""

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

import octavo
from octavo.cli import machine


@dataclass(frozen=True)
class Timing:
    """The fastest of several runs, and how much slower the median run was (0.1: a tenth)."""

    seconds: float
    spread: float


def side_by_side(calls: Mapping[str, tuple[Callable, tuple[Any, ...]]], *, repeats: int) -> dict[str, Timing]:
    """Time functions on their arguments in turn, `repeats` rounds after one that compiles and warms up.

    A busy moment of the machine then strikes all of them alike, and the fastest round of each is the one it spared.
    """
    runs: dict[str, list[float]] = {name: [] for name in calls}
    for fn, args in calls.values():
        jax.block_until_ready(fn(*args))
    for _ in range(repeats):
        for name, (fn, args) in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(fn(*args))
            runs[name].append(time.perf_counter() - start)
    return {name: Timing(min(t), statistics.median(t) / min(t) - 1) for name, t in runs.items()}


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
