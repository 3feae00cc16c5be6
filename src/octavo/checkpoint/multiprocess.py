"""Synchronisation of the processes of a run under `jax.distributed`.

All processes call each of these functions at the same point of their programs.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from octavo.checkpoint.errors import CheckpointError, PeerLostError

_MAX_TEXT = 4096


def is_multiprocess() -> bool:
    """Whether there are other processes."""
    # In this order, a single process need not start a backend.
    return jax.distributed.is_initialized() and jax.process_count() > 1


def raise_on_all(problem: BaseException | None) -> None:
    """Wait for all processes; raise on each of them the error of any."""
    if not is_multiprocess():
        if problem is not None:
            raise problem
        return
    text = "" if problem is None else str(problem) or type(problem).__name__
    data = np.frombuffer(text.encode()[:_MAX_TEXT].ljust(_MAX_TEXT, b"\0"), np.uint8)
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in _collective("process_allgather", data)]
    for number, other in enumerate(texts):
        if other:
            origin = "" if number == jax.process_index() else f"process {number}: "
            raise CheckpointError(f"{origin}{other}") from problem


def on_primary[T](call: Callable[[], T]) -> T | None:
    """Call a function on process 0 while the others wait; its error is raised on all.

    Returns:
      The result on process 0, None on the others.
    """
    result, problem = None, None
    if not is_multiprocess() or jax.process_index() == 0:
        try:
            result = call()
        except Exception as error:
            problem = error
    raise_on_all(problem)
    return result


def broadcast(number: int) -> int:
    """The number of process 0, on all processes."""
    return int(_collective("broadcast_one_to_all", np.int32(number)))


def _collective(name: str, data: np.ndarray | np.integer) -> Any:
    """A function of `multihost_utils`; raises a PeerLostError if another process is gone."""
    from jax.experimental import multihost_utils

    try:
        return getattr(multihost_utils, name)(data)
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # reading a failed result raises a ValueError
        raise PeerLostError(str(error)) from error
