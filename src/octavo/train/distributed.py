"""Several processes as one run: how they start, what each of them reads, and what they agree on.

All of it is JAX's own: `jax.distributed` knows Slurm, MPI, Kubernetes and Cloud TPUs, and starts elsewhere from an
address and numbers.
"""

import dataclasses
import os
import signal
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from octavo.data import Dataset
from octavo.train.keys import ConfigError, Problem

if TYPE_CHECKING:
    from octavo.train.config import Config

_VARIABLES = {
    "coordinator_address": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}


class LostError(RuntimeError):
    """Another process of this run ended or cannot be reached."""


def start(config: "Config", environ: Mapping[str, str] | None = None) -> None:
    """Join the other processes of the run, if there are any; before that, no device may have been touched.

    Where neither the configuration nor the environment speaks of others, the run is this one process.
    """
    if config.skip_jax_distributed_system or jax.distributed.is_initialized():
        return
    given = settings(config, os.environ if environ is None else environ)
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=config.jax_distributed_initialization_timeout,
            heartbeat_timeout_seconds=config.jax_distributed_heartbeat_timeout_seconds,
        )
    except Exception as error:
        # Nobody asked for others, and jax.distributed found none; or JAX runs already, as one process.
        alone = "coordinator_address should be defined" in str(error) or "must be called before" in str(error)
        if given or not alone:
            raise LostError(_not_started(given, error)) from error


def settings(config: "Config", environ: Mapping[str, str]) -> dict[str, Any]:
    """What the configuration, or else the environment, says about the processes; nothing if neither does.

    >>> from octavo.train.config import Config
    >>> settings(Config(coordinator_address="node0:1234", process_id=1), {"JAX_NUM_PROCESSES": "2"})
    {'coordinator_address': 'node0:1234', 'num_processes': 2, 'process_id': 1}
    """
    found: dict[str, Any] = {}
    for name, variable in _VARIABLES.items():
        value = getattr(config, name)
        if value not in ("", 0, -1) or (name == "process_id" and value == 0):
            found[name] = value
        elif text := environ.get(variable, ""):
            found[name] = text if name == "coordinator_address" else _whole(variable, text)
    return found


def _whole(variable: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError([Problem((), f"{variable}={text}: a whole number of at least 0")])
    return int(text)


def _not_started(given: Mapping[str, Any], error: Exception) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in given.items()) or "what the cluster says"
    return (
        f"the processes of this run did not come together ({settings}): {str(error).splitlines()[0]}. Every process "
        "needs the same coordinator_address and num_processes and a process_id of its own; "
        "skip_jax_distributed_system=true runs this process alone"
    )


_OWN = ("process_id", "run_name", "coordinator_address")


def agreed(config: "Config") -> "Config":
    """The configuration, if all processes have the same; a run's name that was made up is that of process 0."""
    if not several():
        return config
    from jax.experimental import multihost_utils

    names = [field.name for field in dataclasses.fields(config) if field.name not in _OWN]
    sums = [zlib.crc32(repr(getattr(config, name)).encode()) for name in names]
    ours = np.asarray(sums, np.uint32)
    theirs = multihost_utils.broadcast_one_to_all(ours)
    differing = np.max(multihost_utils.process_allgather(ours != np.asarray(theirs)), axis=0)
    if differing.any():
        keys = ", ".join(name for name, bad in zip(names, differing, strict=True) if bad)
        raise ConfigError([Problem((), f"the processes of this run have different values of {keys}")])
    longest = 1024
    padded = np.frombuffer(config.run_name.encode()[:longest].ljust(longest, b"\0"), np.uint8)
    name = bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).rstrip(b"\0").decode()
    return config.replace(run_name=name)


def several() -> bool:
    """Whether this run has other processes."""
    # Asked in this order, a process that is alone need not start a backend to know it.
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this is the process that writes logs, metrics and reports."""
    return not several() or jax.process_index() == 0


def lost(step: int, saved: int | None, error: Exception) -> LostError:
    """What to say when a step could not be taken together."""
    back = f"the checkpoint of step {saved}" if saved is not None else "the start"
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return LostError(
        f"process {jax.process_index()} of {jax.process_count()} lost the others at step {step}: one of them ended or "
        f"cannot be reached. Start all processes again with the same command: the run goes on from {back}. ({first})"
    )


# Batches.


def placed_batch(data: Dataset, index: int, sharding: Any) -> dict[str, jax.Array]:
    """A batch on the devices of a sharding; of its rows this process reads only those that its own devices hold."""
    shape = (data.config.batch_size, data.config.length)
    places = sharding.addressable_devices_indices_map(shape)
    rows = [place[0].indices(shape[0]) for place in places.values()]
    start, stop = min(r[0] for r in rows), max(r[1] for r in rows)
    local = data.batch_rows(index, start, stop)

    def array(values: np.ndarray) -> jax.Array:
        def shard(place: Any) -> np.ndarray:
            first, last, _ = place[0].indices(shape[0])
            return values[first - start : last - start, place[1]]

        return jax.make_array_from_callback(shape, sharding, shard)

    return {name: array(values) for name, values in local.items()}


def spread(tree: Any, shardings: Any) -> Any:
    """Arrays that every process has whole, on the devices of their shardings."""

    def one(x: Any, sharding: Any) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda place: host[place])

    return jax.tree.map(one, tree, shardings)


# Stopping together.


def stop_flags(by: signal.Signals | None, sharding: Any) -> jax.Array:
    """The signal that this process was sent, or 0, once for each device: a step returns the largest of all."""
    value = np.full(1, 0 if by is None else int(by), np.int32)
    return jax.make_array_from_callback((sharding.mesh.size,), sharding, lambda _: value)
