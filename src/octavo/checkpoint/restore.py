"""Restoring a checkpoint, or a subtree of it, into the structure that a caller expects."""

import dataclasses
import json
import operator
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from octavo._tree import unflatten_paths
from octavo.checkpoint import array_store, manifest
from octavo.checkpoint.errors import CheckpointError, CheckpointWarning, DamagedError
from octavo.checkpoint.leaves import (
    Leaf,
    differences,
    flatten,
    from_host,
    make_qarray,
    path_text,
    qarray_metadata,
    qarray_text,
    to_abstract,
)
from octavo.checkpoint.leaves import Path as Names
from octavo.checkpoint.steps import StepDirectory

STATE = "state"
TREE = "tree.json"
EXTRA = "extra/metadata"  # Where Orbax's JSON handler expects it.

_MAX_LINES = 8

type Reinit = Callable[[Names], bool]
"""Whether the leaf at a path may keep its value of `like` where the checkpoint has another shape or no such leaf."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint: its step, the state, and the dictionary that was saved as `extra`."""

    step: int
    state: Any
    extra: dict[str, Any]


def load(path: str | os.PathLike[str], like: Any = None, *, step: int | None = None, subtree: str = "") -> Restored:
    """Read a checkpoint without locking its directory.

    Args:
      path: The directory of a run's checkpoints, or the folder of one step.
      like: A pytree of arrays or ShapeDtypeStructs with the expected structure, shapes, dtypes and shardings. Without
        it the state is nested dictionaries of NumPy arrays, numbers, keys and QArrays.
      step: The step to read; the newest undamaged one by default.
      subtree: A path such as `"params"` or `"params/decoder"`. Only its files are read, and `like` has its structure.

    Returns:
      The step, state and `extra` of the checkpoint.

    >>> import numpy as np, tempfile
    >>> from octavo.checkpoint import CheckpointManager
    >>> with tempfile.TemporaryDirectory() as directory, CheckpointManager(directory) as manager:
    ...     manager.save(7, {"params": {"w": np.ones(2)}, "moments": {"w": np.zeros(2)}}, {"tokens": 512})
    ...     manager.wait_until_finished()
    ...     load(directory, subtree="params")
    Restored(step=7, state={'w': array([1., 1.])}, extra={'tokens': 512})
    """
    return _load(Path(path), step, lambda folder, step: read(folder, like, step=step, subtree=subtree))


def load_abstract(path: str | os.PathLike[str], *, step: int | None = None, subtree: str = "") -> Restored:
    """Like `load`, with ShapeDtypeStructs in place of arrays; no array is read.

    >>> import numpy as np, tempfile
    >>> from octavo.checkpoint import CheckpointManager
    >>> with tempfile.TemporaryDirectory() as directory, CheckpointManager(directory) as manager:
    ...     manager.save(7, {"params": {"w": np.ones((2, 3))}})
    ...     manager.wait_until_finished()
    ...     load_abstract(directory, subtree="params").state
    {'w': ShapeDtypeStruct(shape=(2, 3), dtype=float64)}
    """

    def read_abstract(folder: Path, step: int | None) -> Restored:
        stored = _Stored.read(folder, step, subtree)
        return Restored(
            stored.step, stored.build({p: to_abstract(leaf) for p, leaf in stored.leaves.items()}), stored.extra
        )

    return _load(Path(path), step, read_abstract)


def _load(path: Path, step: int | None, read: Callable[[Path, int | None], Restored]) -> Restored:
    if step is None and (path / manifest.NAME).exists():
        return read(path, None)
    steps = StepDirectory(path)
    if step is not None:
        return read(existing(steps, step), step)
    restored = newest(steps, lambda step: read(steps.path(step), step))
    if restored is None:
        raise CheckpointError(f"{path} holds no checkpoint" + ("" if path.is_dir() else ": there is no such directory"))
    return restored


def existing(steps: StepDirectory, step: int) -> Path:
    """The folder of a step, which must exist."""
    step = operator.index(step)
    if step not in (known := steps.all()):
        there = f"the steps {', '.join(map(str, known))} are" if known else "no step is"
        raise CheckpointError(f"{steps.root} has no checkpoint of step {step}; {there} there")
    return steps.path(step)


def newest[T](steps: StepDirectory, read: Callable[[int], T]) -> T | None:
    """Call `read` on the newest step for which it does not raise DamagedError; None if there are no checkpoints.

    Warns about each damaged checkpoint that is newer.
    """
    tried: dict[int, str] = {}
    # The run that writes here may continue meanwhile: a checkpoint that it deletes is not damaged.
    while remaining := [step for step in steps.all() if step not in tried]:
        step = remaining[-1]
        try:
            result = read(step)
        except DamagedError as error:
            tried[step] = str(error)
            continue
        still_there = steps.all()
        for damaged, problem in tried.items():
            if damaged in still_there:
                text = f"the checkpoint of step {damaged} is damaged: {problem}; step {step} is used instead"
                warnings.warn(text, CheckpointWarning, stacklevel=4)
        return result
    if tried:
        problems = "".join(f"\n  step {step}: {problem}" for step, problem in tried.items())
        raise CheckpointError(f"no checkpoint in {steps.root} is intact:{problems}")
    return None


def read(
    folder: Path, like: Any, *, step: int | None = None, subtree: str = "", reinit: Reinit | None = None
) -> Restored:
    """Read the checkpoint in a folder, verified by its manifest; `step` is the expected step."""
    stored = _Stored.read(folder, step, subtree)
    expected = {} if like is None else flatten(like)
    reset: set[Names] = set() if like is None else _match(folder, like, stored, reinit or (lambda path: False))
    wanted = {path: leaf for path, leaf in stored.leaves.items() if path not in reset}
    folders = array_store.folders(wanted, stored.paths)

    def is_needed(name: str) -> bool:
        top, *rest = name.split("/")
        return top == STATE and (len(rest) == 1 or rest[0] in folders)

    manifest.verify(folder, contents=is_needed)
    try:
        arrays = array_store.read(folder / STATE, wanted, stored.paths, _shardings(wanted, expected))
    except Exception as error:
        manifest.verify(folder, contents=manifest.EVERY_FILE)  # Deleted or damaged while it was read?
        raise CheckpointError(f"{folder} is intact, but cannot be read: {type(error).__name__}: {error}") from error
    if like is None:
        values = {path: from_host(leaf, arrays.get(leaf.path), None) for path, leaf in wanted.items()}
        return Restored(stored.step, stored.build(values), stored.extra)
    leaves = [
        value if path in reset else from_host(wanted[path], arrays.get(wanted[path].path), value)
        for path, (_, value) in expected.items()
    ]
    return Restored(stored.step, jax.tree.unflatten(jax.tree.structure(like), leaves), stored.extra)


@dataclasses.dataclass(frozen=True)
class _Stored:
    """The metadata of a checkpoint; `leaves` and `qarrays` are those of a subtree, by their paths in it."""

    step: int
    leaves: dict[Names, Leaf]
    qarrays: dict[Names, Any]
    paths: list[Names]
    extra: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, step: int | None, subtree: str) -> "_Stored":
        found = manifest.verify(folder, step, contents=(TREE, EXTRA).__contains__)
        tree, extra = (json.loads((folder / name).read_text(encoding="utf-8")) for name in (TREE, EXTRA))
        prefix = tuple(name for name in subtree.split("/") if name)
        leaves = {leaf.path: leaf for leaf in map(Leaf.from_json, tree["leaves"])}
        qarrays = {tuple(q["path"]): q["static"] for q in tree["quantized"]}
        inside = _subtree(leaves, prefix)
        if prefix and not inside:
            tops = sorted({path[0] for path in leaves if path})
            raise CheckpointError(f"{folder} has nothing at {subtree!r}; at the top it has {', '.join(tops)}")
        return cls(found, inside, _subtree(qarrays, prefix), list(leaves), extra)

    def build(self, values: dict[Names, Any]) -> Any:
        """Nested dictionaries of values by path, with QArrays."""
        for path, static in self.qarrays.items():
            arrays = {p[-1]: values.pop(p) for p in list(values) if p[:-1] == path}
            values[path] = make_qarray(static, arrays)
        return values[()] if () in values else unflatten_paths(values)


def _subtree[T](values: dict[Names, T], prefix: Names) -> dict[Names, T]:
    return {path[len(prefix) :]: value for path, value in values.items() if path[: len(prefix)] == prefix}


def _shardings(wanted: dict[Names, Leaf], expected: dict[Names, tuple[Leaf, Any]]) -> dict[Names, Any]:
    """By a leaf's own path, the expected shardings over several devices."""
    found = {}
    for path, leaf in wanted.items():
        sharding = getattr(expected[path][1], "sharding", None) if path in expected else None
        if sharding is not None and len(sharding.device_set) > 1 and leaf.kind == "array":
            found[leaf.path] = sharding
    return found


def _match(folder: Path, like: Any, stored: _Stored, reinit: Reinit) -> set[Names]:
    """Compare a checkpoint with the expected structure.

    Returns:
      The paths that differ and that `reinit` accepts; any other difference is an error.
    """
    expected = {path: str(leaf) for path, (leaf, _) in flatten(like).items()}
    found = {path: str(leaf) for path, leaf in stored.leaves.items()}
    reset = {path for path in {**expected, **found} if expected.get(path) != found.get(path) and reinit(path)}
    if reset:
        text = f"{folder} has other shapes for {len(reset)} arrays that are reset, such as {path_text(min(reset))}"
        warnings.warn(text, CheckpointWarning, stacklevel=4)
    expected |= {path: qarray_text(static) for path, static in qarray_metadata(like).items()}
    found |= {path: qarray_text(static) for path, static in stored.qarrays.items()}
    lines = list(differences(_without(expected, reset), _without(found, reset)))
    if lines:
        more = f"\n  and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
        count = "1 leaf differs" if len(lines) == 1 else f"{len(lines)} leaves differ"
        listed = "\n".join(lines[:_MAX_LINES])
        raise CheckpointError(
            f"{folder} holds another state than is expected; {count}:\n{listed}{more}\n"
            "Restore with the model and optimizer that it was saved from, or read a subtree of it"
        )
    return reset


def _without(texts: dict[Names, str], paths: Iterable[Names]) -> dict[Names, str]:
    return {path: text for path, text in texts.items() if path not in paths}
