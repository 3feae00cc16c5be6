"""Compiling for TPUs and GPUs that this machine does not have.

The compilers are packages: libtpu holds the one of TPUs, jax's CUDA plugin the one of NVIDIA GPUs. Both compile for a
described device. Their result does not depend on this machine, so programs can be compared exactly.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo._names import unknown_name


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A device to compile for.

    Attributes:
        name: Its name, such as `v6e`.
        platform: JAX's platform, `tpu` or `cuda`.
        topology: The number of devices along each axis, such as `2x2`.
        clock: The clock in GHz by which cycles become seconds.
        description: For CUDA, the device as text of a `GpuTargetConfigProto`.

    >>> get_accelerator("v6e:4x4").topology
    '4x4'
    """

    name: str
    platform: str
    topology: str
    clock: float
    description: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.topology}" if self.platform == "tpu" else self.name

    def seconds(self, cycles: int | float) -> float:
        """The time of some cycles at the device's clock."""
        return cycles / (1e9 * self.clock)


# Without versions the compiler takes CUDA to be older than the float8 matmuls of cuBLAS, and widens to float16.
def _gpu(name: str, kind: str, *, cores: int, bandwidth: int, memory: int, capability: int, l2: int) -> Accelerator:
    description = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {cores} fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} device_memory_size: {memory}
  cuda_compute_capability {{ major: {capability} }}
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{kind}"
"""
    return Accelerator(name, "cuda", "1x1x1", 1.98, description)


_H100 = {"cores": 132, "bandwidth": 3_352_320_000_000, "memory": 84_878_819_328, "capability": 9, "l2": 52_428_800}
_B200 = {"cores": 148, "bandwidth": 8_000_000_000_000, "memory": 191_510_085_632, "capability": 10, "l2": 132_644_864}

# The clock of a TPU follows from its peak in bf16: 2 x (size of a matrix unit)**2 x (number of units) FLOPs a cycle.
ACCELERATORS: dict[str, Accelerator] = {
    a.name: a
    for a in (
        Accelerator("v5e", "tpu", "2x2", 1.5),
        Accelerator("v5p", "tpu", "2x2x1", 1.75),
        Accelerator("v6e", "tpu", "2x2", 1.75),
        Accelerator("tpu7x", "tpu", "2x2x1", 2.2),
        _gpu("h100", "NVIDIA H100 80GB HBM3", **_H100),
        _gpu("b200", "NVIDIA B200", **_B200),
    )
}


def get_accelerator(name: str) -> Accelerator:
    """An accelerator by its name, with a topology after a colon: `v5e`, `v6e:16x16`, `h100`."""
    kind, _, topology = name.partition(":")
    if kind not in ACCELERATORS:
        raise ValueError(f"unknown accelerator {kind!r}: {unknown_name(kind, ACCELERATORS)}")
    found = ACCELERATORS[kind]
    if not topology:
        return found
    if found.platform != "tpu":
        raise ValueError(f"{kind} is a single device; a topology as in {name!r} is for TPUs")
    if re.sub(r"\d+", "n", topology) != re.sub(r"\d+", "n", found.topology):
        raise ValueError(f"the topology of {kind} is written as {found.topology}, got {topology!r}")
    return dataclasses.replace(found, topology=topology)


def compiler_missing(accelerator: Accelerator) -> str | None:
    """The line that says how to install the accelerator's compiler; None if it is installed."""
    if accelerator.platform == "tpu":
        if importlib.util.find_spec("libtpu") or os.environ.get("TPU_LIBRARY_PATH"):
            return None
        return f"compiling for {accelerator.name} needs libtpu: pip install 'octavo[tpu]'"
    if importlib.util.find_spec("jax_cuda12_plugin"):
        return None
    return f"compiling for {accelerator.name} needs jax's CUDA plugin: pip install 'octavo[cuda]'"


@functools.cache
def devices(accelerator: Accelerator) -> tuple[Any, ...]:
    """The accelerator's devices, which can be compiled for but not run on.

    Raises:
        ModuleNotFoundError: The compiler is not installed.
    """
    if (missing := compiler_missing(accelerator)) is not None:
        raise ModuleNotFoundError(missing)
    if accelerator.platform == "tpu":
        with _environment(_LIBTPU):
            found = topologies.get_topology_desc(platform="tpu", topology_name=str(accelerator))
    else:
        found = topologies.get_topology_desc(
            platform="cuda", topology=accelerator.topology, target_config=accelerator.description
        )
    return tuple(found.devices)


# No device is opened: libtpu asks no metadata server for one, locks none against other processes, and need not warn
# that it found none.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables where they are not set, for the duration of the context."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def compile_for(
    accelerator: Accelerator, fn: Callable[..., Any], *args: Any, in_shardings: Any = None, out_shardings: Any = None
) -> Any:
    """Compile a function for an accelerator.

    Args:
        accelerator: The accelerator.
        fn: The function.
        *args: Its arguments, arrays or `jax.ShapeDtypeStruct`s.
        in_shardings: Shardings over `devices(accelerator)`, as `jax.jit` takes them; by default one device.
        out_shardings: Those of the results.

    Returns:
        The compiled program, as `jax.jit(fn).lower(*args).compile()` returns it.
    """
    target: Any = contextlib.nullcontext()
    if in_shardings is None:
        mesh = Mesh(np.asarray(devices(accelerator)[:1]), ("device",))
        in_shardings = out_shardings = NamedSharding(mesh, PartitionSpec())
        if accelerator.platform == "tpu":  # by which Pallas kernels know the device while they are traced
            target = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), args)
    with target:
        return jax.jit(fn, in_shardings=in_shardings, out_shardings=out_shardings).lower(*shapes).compile()
