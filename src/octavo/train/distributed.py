"""Multi-process runs: initialization, data loading, and consistency of the configuration.

`jax.distributed` detects Slurm, MPI, Kubernetes and Cloud TPUs; elsewhere it needs an address and numbers.
"""

import dataclasses
import os
import signal
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from octavo.checkpoint.multiprocess import is_multiprocess as is_multiprocess
from octavo.data import Dataset
from octavo.train.config import Config, ConfigError

_VARIABLES = {
    "coordinator_address": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}


class ConnectionLostError(RuntimeError):
    """Another process of this run ended or cannot be reached."""


def initialize(config: Config, environ: Mapping[str, str] | None = None) -> None:
    """Initialize `jax.distributed` if the run has several processes; no device may have been used before.

    If neither the configuration nor the environment names other processes, the run has one process.
    """
    if config.skip_jax_distributed_system or jax.distributed.is_initialized():
        return
    given = distributed_settings(config, os.environ if environ is None else environ)
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=config.jax_distributed_initialization_timeout,
            heartbeat_timeout_seconds=config.jax_distributed_heartbeat_timeout_seconds,
        )
    except Exception as error:
        # A single process: no other was configured or detected, or JAX is already initialized.
        alone = "coordinator_address should be defined" in str(error) or "must be called before" in str(error)
        if given or not alone:
            raise ConnectionLostError(_not_started(given, error)) from error


def distributed_settings(config: Config, environ: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `jax.distributed.initialize` that the configuration, or else the environment, gives.

    >>> distributed_settings(Config(coordinator_address="node0:1234", process_id=1), {"JAX_NUM_PROCESSES": "2"})
    {'coordinator_address': 'node0:1234', 'num_processes': 2, 'process_id': 1}
    """
    found: dict[str, Any] = {}
    for name, variable in _VARIABLES.items():
        value = getattr(config, name)
        if value not in ("", 0, -1) or (name == "process_id" and value == 0):
            found[name] = value
        elif text := environ.get(variable, ""):
            found[name] = text if name == "coordinator_address" else _parse_int(variable, text)
    return found


def _parse_int(variable: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError([f"{variable}={text}: a whole number of at least 0"])
    return int(text)


def _not_started(given: Mapping[str, Any], error: Exception) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in given.items()) or "what the cluster says"
    return (
        f"the processes of this run could not connect ({settings}): {str(error).splitlines()[0]}. Every process "
        "needs the same coordinator_address and num_processes and a process_id of its own; "
        "skip_jax_distributed_system=true runs this process alone"
    )


_OWN = ("process_id", "run_name", "coordinator_address")


def agree_on_config(config: Config) -> Config:
    """The configuration, with the run name of process 0; raises a ConfigError if processes differ in other keys."""
    if not is_multiprocess():
        return config
    from jax.experimental import multihost_utils

    names = [field.name for field in dataclasses.fields(config) if field.name not in _OWN]
    sums = [zlib.crc32(repr(getattr(config, name)).encode()) for name in names]
    ours = np.asarray(sums, np.uint32)
    theirs = multihost_utils.broadcast_one_to_all(ours)
    differing = np.max(multihost_utils.process_allgather(ours != np.asarray(theirs)), axis=0)
    if differing.any():
        keys = ", ".join(name for name, bad in zip(names, differing, strict=True) if bad)
        raise ConfigError([f"the processes of this run have different values of {keys}"])
    longest = 1024
    padded = np.frombuffer(config.run_name.encode()[:longest].ljust(longest, b"\0"), np.uint8)
    name = bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).rstrip(b"\0").decode()
    return config.replace(run_name=name)


def is_main_process() -> bool:
    """Whether this is the process that writes logs, metrics and reports."""
    return not is_multiprocess() or jax.process_index() == 0


def resume_point(saved: int | None) -> str:
    """What a run resumes from, if the last checkpoint that was saved is that of this step.

    >>> resume_point(40), resume_point(None)
    ('the checkpoint of step 40', 'the start')
    """
    return f"the checkpoint of step {saved}" if saved is not None else "the start"


def connection_lost(step: int, saved: int | None, error: Exception) -> ConnectionLostError:
    """The error for a step that failed because another process ended."""
    back = resume_point(saved)
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ConnectionLostError(
        f"process {jax.process_index()} of {jax.process_count()} lost the others at step {step}: one of them ended or "
        f"cannot be reached. Start all processes again with the same command: the run resumes from {back}. ({first})"
    )


def shard_batch(data: Dataset, index: int, sharding: Any) -> dict[str, jax.Array]:
    """A batch on the devices of a sharding; this process reads only the rows that its own devices hold."""
    shape = (data.config.batch_size, data.config.length)
    indices = sharding.addressable_devices_indices_map(shape)
    rows = [slices[0].indices(shape[0]) for slices in indices.values()]
    start, stop = min(r[0] for r in rows), max(r[1] for r in rows)
    local = data.batch_rows(index, start, stop)

    def array(values: np.ndarray) -> jax.Array:
        def shard(slices: Any) -> np.ndarray:
            first, last, _ = slices[0].indices(shape[0])
            return values[first - start : last - start, slices[1]]

        return jax.make_array_from_callback(shape, sharding, shard)

    return {name: array(values) for name, values in local.items()}


def shard_tree(tree: Any, shardings: Any) -> Any:
    """Shard arrays that every process holds in full."""

    def one(x: Any, sharding: Any) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree, shardings)


def stop_flags(by: signal.Signals | None, sharding: Any) -> jax.Array:
    """The signal that this process received, or 0, once per device: a step returns the largest of all."""
    value = np.full(1, 0 if by is None else int(by), np.int32)
    return jax.make_array_from_callback((sharding.mesh.size,), sharding, lambda _: value)
