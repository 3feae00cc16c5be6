"""Reading a checkpoint: the newest whole one, or a part of it, into the structure that a caller expects."""

import dataclasses
import json
import operator
import os
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax

from octavo.checkpoint import leaves, manifest, store
from octavo.checkpoint.errors import CheckpointError, CheckpointWarning, DamagedError
from octavo.checkpoint.folder import Folder
from octavo.checkpoint.leaves import Leaf

STATE = "state"
TREE = "tree.json"
EXTRA = "extra/metadata"  # Where Orbax's JSON handler looks for it.

_SHOWN = 8

type Renew = Callable[[leaves.Path], bool]
"""Whether the leaf at a path may begin anew where a checkpoint has another one."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read: its step, the state, and what was saved as `extra`."""

    step: int
    state: Any
    extra: dict[str, Any]


def load(path: str | os.PathLike[str], like: Any = None, *, step: int | None = None, part: str = "") -> Restored:
    """Read a run's newest whole checkpoint, or the one in the folder of a step, without being the run's writer.

    `like` is a pytree of arrays or ShapeDtypeStructs that says what to expect and where to put it; without it the
    state comes as dictionaries of NumPy arrays, numbers, keys and QArrays. `part` names a subtree, as in `"params"` or
    `"params/decoder"`: only its files are read, and `like` is of its structure.

    >>> import numpy as np, tempfile
    >>> from octavo.checkpoint import Checkpoints
    >>> with tempfile.TemporaryDirectory() as directory, Checkpoints(directory) as checkpoints:
    ...     checkpoints.save(7, {"params": {"w": np.ones(2)}, "moments": {"w": np.zeros(2)}}, {"tokens": 512})
    ...     checkpoints.wait()
    ...     load(directory, part="params")
    Restored(step=7, state={'w': array([1., 1.])}, extra={'tokens': 512})
    """
    path = Path(path)
    if step is None and (path / manifest.NAME).exists():
        return read(path, like, part=part)
    restored = newest(Folder(path), like, step=step, part=part)
    if restored is None:
        raise CheckpointError(f"{path} holds no checkpoint" + ("" if path.is_dir() else ": there is no such directory"))
    return restored


def structure(path: str | os.PathLike[str], *, step: int | None = None, part: str = "") -> Restored:
    """What a checkpoint holds, without its arrays: its state as ShapeDtypeStructs, and QArrays of them.

    >>> import numpy as np, tempfile
    >>> from octavo.checkpoint import Checkpoints
    >>> with tempfile.TemporaryDirectory() as directory, Checkpoints(directory) as checkpoints:
    ...     checkpoints.save(7, {"params": {"w": np.ones((2, 3))}})
    ...     checkpoints.wait()
    ...     structure(directory, part="params").state
    {'w': ShapeDtypeStruct(shape=(2, 3), dtype=float64)}
    """
    folder = _folder(Path(path), step)
    found = manifest.check(folder, contents=lambda name: name in (TREE, EXTRA))
    wanted, statics, _ = _described(folder, part)

    def value(path: leaves.Path, target: Any) -> Any:
        return leaves.abstract(wanted[path])

    extra = json.loads((folder / EXTRA).read_text(encoding="utf-8"))
    return Restored(found, _built(None, wanted, statics, value), extra)


def _folder(path: Path, step: int | None) -> Path:
    """The folder of a step, or of the newest one."""
    if step is None and (path / manifest.NAME).exists():
        return path
    steps = Folder(path).whole()
    if not steps or (step is not None and step not in steps):
        raise CheckpointError(f"{path} holds no checkpoint" + ("" if step is None else f" of step {step}"))
    return Folder(path).of(steps[-1] if step is None else step)


def newest(
    folder: Folder, like: Any, *, step: int | None = None, part: str = "", renew: Renew | None = None
) -> Restored | None:
    """The newest checkpoint that is whole, with a warning for each that is not; or the one of a step."""
    if step is not None:
        step = operator.index(step)
        if step not in (steps := folder.all()):
            there = f"the steps {', '.join(map(str, steps))} are" if steps else "no step is"
            raise CheckpointError(f"{folder.directory} has no checkpoint of step {step}; {there} there")
        return read(folder.of(step), like, step=step, part=part, renew=renew)
    tried: dict[int, str] = {}
    # The run that writes here may go on while it is read: what it deletes meanwhile is no damage.
    while remaining := [step for step in folder.all() if step not in tried]:
        step = remaining[-1]
        try:
            restored = read(folder.of(step), like, step=step, part=part, renew=renew)
        except DamagedError as error:
            tried[step] = str(error)
            continue
        _warn(folder, tried, step)
        return restored
    if tried:
        raise _none_whole(folder, tried)
    return None


def sound(folder: Folder) -> int | None:
    """The newest step whose files are all as they were written, with a warning for each newer one; None: no step."""
    tried: dict[int, str] = {}
    for step in reversed(folder.all()):
        try:
            if manifest.check(folder.of(step), contents=lambda _: True) == step:
                _warn(folder, tried, step)
                return step
            tried[step] = "it is of another step: the folder was renamed"
        except DamagedError as error:
            tried[step] = str(error)
    if tried:
        raise _none_whole(folder, tried)
    return None


def _warn(folder: Folder, tried: dict[int, str], step: int) -> None:
    for passed, problem in tried.items():
        if passed > step and folder.of(passed).exists():
            warnings.warn(
                f"the checkpoint of step {passed} is damaged: {problem}; step {step} is used instead",
                CheckpointWarning,
                stacklevel=4,
            )


def _none_whole(folder: Folder, tried: dict[int, str]) -> CheckpointError:
    problems = "".join(f"\n  step {step}: {problem}" for step, problem in tried.items())
    return CheckpointError(f"no checkpoint in {folder.directory} is whole:{problems}")


def read(
    directory: Path, like: Any, *, step: int | None = None, part: str = "", renew: Renew | None = None
) -> Restored:
    """The checkpoint in a folder, checked against its manifest; `step` is the one it should be of."""
    found = manifest.check(directory, contents=lambda name: name in (TREE, EXTRA))
    if step is not None and found != step:
        raise DamagedError(f"{directory / manifest.NAME} is of step {found}: the folder was renamed")
    wanted, statics, stored = _described(directory, part)
    begun = _begun_anew(directory, like, wanted, renew) if like is not None and renew is not None else set()
    wanted = {path: leaf for path, leaf in wanted.items() if path not in begun}
    if like is not None:
        _compare(directory, like, wanted, statics, begun)
    places = store.places(stored)
    arrays = {places[leaf.path]: leaf for leaf in wanted.values() if 0 not in leaf.shape}
    manifest.check(directory, contents=_files(set(map(store.folder, arrays))))
    dtypes = {place: "uint32" if leaf.kind == "key" else leaf.dtype for place, leaf in arrays.items()}
    try:
        values = store.read(directory / STATE, dtypes, _shardings(like, arrays)) if arrays else {}
    except Exception as error:
        manifest.check(directory, contents=lambda _: True)  # Deleted or damaged while it was read?
        raise CheckpointError(f"{directory} is whole, but cannot be read: {type(error).__name__}: {error}") from error
    extra = json.loads((directory / EXTRA).read_text(encoding="utf-8"))

    def value(path: leaves.Path, target: Any) -> Any:
        if path in begun:
            return target
        leaf = wanted[path]
        array = values.get(places[leaf.path])
        return leaves.from_host(leaf, leaves.empty(leaf) if array is None else array, target)

    return Restored(found, _built(like, wanted, statics, value), extra)


def _shardings(like: Any, arrays: dict[leaves.Path, Leaf]) -> dict[leaves.Path, Any]:
    """By place, where the arrays that are expected on several devices go: a process reads only its part of these."""
    if like is None:
        return {}
    targets = {leaf.path: target for leaf, target in leaves.leaves_of(like).values()}
    found = {}
    for place, leaf in arrays.items():
        sharding = getattr(targets.get(leaf.path), "sharding", None)
        if sharding is not None and len(sharding.device_set) > 1 and leaf.kind == "array":
            found[place] = sharding
    return found


def _described(directory: Path, part: str) -> tuple[dict[leaves.Path, Leaf], dict[leaves.Path, Any], list[leaves.Path]]:
    """The leaves and the QArrays of a part by their paths in it, and the paths of all that is stored."""
    prefix = tuple(name for name in part.split("/") if name)
    described = json.loads((directory / TREE).read_text(encoding="utf-8"))
    stored = {leaf.path: leaf for leaf in map(Leaf.from_json, described["leaves"])}
    quantized = {tuple(q["path"]): q["static"] for q in described["quantized"]}
    size = len(prefix)
    wanted = {path[size:]: leaf for path, leaf in stored.items() if path[:size] == prefix}
    statics = {path[size:]: static for path, static in quantized.items() if path[:size] == prefix}
    if prefix and not wanted:
        tops = sorted({path[0] for path in stored if path})
        raise CheckpointError(f"{directory} has nothing at {part!r}; at the top it has {', '.join(tops)}")
    return wanted, statics, list(stored)


def _files(folders: set[str]) -> Callable[[str], bool]:
    """Whether a file is one of those that the arrays in some folders are read from."""

    def needed(name: str) -> bool:
        top, *rest = name.split("/")
        return top == STATE and (len(rest) == 1 or rest[0] in folders)

    return needed


def _built(like: Any, wanted: dict[leaves.Path, Leaf], statics: dict[leaves.Path, Any], value: Callable) -> Any:
    if like is not None:
        targets = leaves.leaves_of(like)
        return jax.tree.unflatten(jax.tree.structure(like), [value(path, t) for path, (_, t) in targets.items()])
    values = {path: value(path, None) for path in wanted}
    for path, static in statics.items():
        parts = {p[-1]: values.pop(p) for p in list(values) if p[:-1] == path}
        values[path] = leaves.qarray(static, parts)
    return leaves.nested(values)


def _begun_anew(directory: Path, like: Any, wanted: dict[leaves.Path, Leaf], renew: Renew) -> set[leaves.Path]:
    """The paths of leaves that may begin anew, and do because they are stored otherwise, or on one side alone."""
    expected = {path: str(leaf) for path, (leaf, _) in leaves.leaves_of(like).items()}
    found = {path: str(leaf) for path, leaf in wanted.items()}
    begun = {path for path in {**expected, **found} if renew(path) and expected.get(path) != found.get(path)}
    if begun:
        first = "/".join(min(begun))
        warnings.warn(
            f"{directory} has other shapes for {len(begun)} arrays that begin anew, {first} for one",
            CheckpointWarning,
            stacklevel=4,
        )
    return begun


def _compare(
    directory: Path,
    like: Any,
    wanted: dict[leaves.Path, Leaf],
    statics: dict[leaves.Path, Any],
    begun: Collection[leaves.Path],
) -> None:
    expected = {path: str(leaf) for path, (leaf, _) in leaves.leaves_of(like).items() if path not in begun}
    expected |= {path: leaves.static_text(leaves.static_of(q)) for path, q in leaves.qarrays_of(like).items()}
    found = {path: str(leaf) for path, leaf in wanted.items()}
    found |= {path: leaves.static_text(static) for path, static in statics.items()}
    lines = list(leaves.differences(expected, found))
    if lines:
        more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        count = "1 place differs" if len(lines) == 1 else f"{len(lines)} places differ"
        listed = "\n".join(lines[:_SHOWN])
        raise CheckpointError(
            f"{directory} holds another state than is expected; {count}:\n{listed}{more}\n"
            "Restore with the model and optimizer that it was saved from, or read a part of it"
        )
