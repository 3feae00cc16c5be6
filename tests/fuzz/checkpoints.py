"""Damaged checkpoints: what is restored is exactly what was saved, or an error is raised."""

import functools
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from octavo.checkpoint import CheckpointError, CheckpointManager
from tests.fuzz.runner import Case, DefectError, Fuzzer

STEPS = (1, 2, 3)
KINDS = ("flip", "truncate", "delete", "extend", "zero", "swap", "copy")


def state(step: int) -> dict[str, object]:
    return {"w": np.arange(100.0) + step, "b": {"c": np.arange(3) * step}, "empty": np.zeros((0, 2), np.float32)}


@functools.cache
def original() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="fuzz-checkpoints-"))
    with CheckpointManager(directory) as manager:
        for step in STEPS:
            manager.save(step, state(step), {"step": step})
    return directory


def files(directory: Path) -> list[Path]:
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


def draw(rng: np.random.Generator) -> Case:
    count = len(files(original()))
    damage = []
    for _ in range(rng.integers(1, 5)):
        kind, file = str(rng.choice(KINDS)), int(rng.integers(count))
        damage.append({"kind": kind, "file": file, "at": float(rng.random()), "bit": int(rng.integers(8))})
    return {"damage": damage}


def damage(directory: Path, kind: str, file: int, at: float, bit: int) -> None:
    names = files(original())
    path, other = directory / names[file], directory / names[int(at * len(names))]
    if not path.exists():
        return
    data = bytearray(path.read_bytes())
    i = int(at * len(data))
    if kind == "delete":
        path.unlink()
    elif kind == "swap" and other.exists():
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif kind == "copy" and other.exists():
        path.write_bytes(other.read_bytes())
    elif kind == "truncate":
        path.write_bytes(data[:i])
    elif kind == "extend":
        path.write_bytes(data + bytes([bit]))
    elif kind == "zero":
        path.write_bytes(bytes(len(data)))
    elif data:
        data[i] ^= 1 << bit
        path.write_bytes(data)


def check(case: Case) -> str:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Path(folder) / "run"
        shutil.copytree(original(), run)
        for each in case["damage"]:
            damage(run, **each)
        try:
            with CheckpointManager(run) as manager:
                restored = manager.restore(state(0))
        except CheckpointError:
            return "raised"
        if restored is None:
            return "nothing found"
        if restored.step not in STEPS or restored.extra != {"step": restored.step}:
            raise DefectError(f"step {restored.step} came with {restored.extra}")
        want = state(restored.step)
        same = jax.tree.map(np.array_equal, restored.state, want)
        if not all(jax.tree.leaves(same)):
            raise DefectError(f"step {restored.step} was restored with other values than were saved")
        return f"step {restored.step}"


def shrink(case: Case) -> Iterator[Case]:
    if len(case["damage"]) > 1:
        for i in range(len(case["damage"])):
            yield {"damage": case["damage"][:i] + case["damage"][i + 1 :]}


CHECKPOINTS = Fuzzer("checkpoints", draw, check, shrink)
