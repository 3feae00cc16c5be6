"""Checkpoints of several processes: each writes what its devices hold, one vouches for the whole.

Every function here is called by all processes at the same point of their programs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from octavo.checkpoint import leaves, store
from octavo.checkpoint.errors import CheckpointError

_LONGEST = 4096


def several() -> bool:
    """Whether there are other processes."""
    # Asked in this order, a process that is alone need not start a backend to know it.
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process names, checks and deletes folders."""
    return not several() or jax.process_index() == 0


def agree(problem: BaseException | None) -> None:
    """Wait for all processes; raise on each of them what went wrong on any."""
    if not several():
        if problem is not None:
            raise problem
        return
    from jax.experimental import multihost_utils

    text = "" if problem is None else str(problem) or type(problem).__name__
    data = np.frombuffer(text.encode()[:_LONGEST].ljust(_LONGEST, b"\0"), np.uint8)
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in multihost_utils.process_allgather(data)]
    for number, other in enumerate(texts):
        if other:
            said = "" if number == jax.process_index() else f"process {number}: "
            raise CheckpointError(f"{said}{other}") from problem


def first_only[T](act: Callable[[], T]) -> T | None:
    """Let one process act while the others wait; what it raises, all raise."""
    result, problem = None, None
    if is_first():
        try:
            result = act()
        except Exception as error:
            problem = error
    agree(problem)
    return result


def same(number: int) -> int:
    """A number of the first process, on all of them."""
    if not several():
        return number
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def write(directory: Path, found: dict[leaves.Path, tuple[leaves.Leaf, Any]]) -> None:
    """Write arrays that are spread over the processes to a directory that does not exist yet."""
    places = store.places(list(found))
    arrays = {}
    for path, (leaf, value) in found.items():
        if 0 in leaf.shape:
            continue
        if leaf.kind == "key":
            value = jax.random.key_data(value)
        if not isinstance(value, jax.Array):
            value = leaves.to_host(leaf, value, copy=False)
        if not store.is_native(np.dtype(value.dtype)):
            raise CheckpointError(f"{leaves.show(path)} is {leaf}, which only a run of one process can save")
        arrays[places[path]] = value
    store.write(directory, arrays)
