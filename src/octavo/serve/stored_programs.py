"""Compiled programs on disk: another engine of the same model and sizes neither traces nor compiles them."""

import hashlib
import os
import platform
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

import octavo
from octavo import kernels
from octavo._io import atomic_write
from octavo.kernels import compiling

MOST_BYTES = 256 << 20
"""The programs used least recently are deleted beyond this size; a small model has 5 MiB of them."""

_SUFFIX = ".program"


class StoredProgram:
    """A compiled function of one device, whose second argument is donated, and whose program is kept in a file.

    A file has the machine code of one process for another of the same user, like JAX's own compilation cache: it is
    trusted as far as the directory is. A file that is damaged, or of an incompatible version, is written again.

    Args:
        function: The function, without keyword arguments.
        path: The file, named after all that the program depends on; None to keep no file.
        outputs: A pytree of the structure that the function returns.
    """

    def __init__(self, function: Callable[..., Any], path: Path | None, outputs: Any):
        def named(*args: Any) -> Any:
            return function(*args)

        # XLA cannot serialize what it has loaded itself. By this name JAX's cache of compiled programs has no other.
        named.__name__ = function.__name__ if path is None else f"{path.stem}_{os.urandom(4).hex()}".replace("-", "_")
        self.jitted, self._path = jax.jit(named, donate_argnums=1), path
        self._tree = jax.tree.structure(outputs)
        self._call: Callable[..., Any] | None = self.jitted if path is None else None
        self._compiling: Future[Any] | None = None

    @property
    def is_stored(self) -> bool:
        """Whether there is a file of the program."""
        return self._path is not None and self._path.exists()

    def __call__(self, *args: Any) -> Any:
        if self._call is None:
            self.prepare(*args)
            self._call = self._compiled()
        return self._call(*args)

    def prepare(self, *args: Any) -> None:
        """Load the program, or trace it and begin to compile; arguments may be abstract."""
        if self._call is not None or self._compiling is not None:
            return
        assert self._path is not None
        device = next(x.device for x in jax.tree.leaves(args) if isinstance(x, jax.Array))
        self._call = _load(self._path, device, jax.tree.structure((args, {})), self._tree)
        if self._call is None:
            pool = ThreadPoolExecutor(1)
            self._compiling = pool.submit(self.jitted.lower(*args).compile)
            pool.shutdown(wait=False)

    def _compiled(self) -> Callable[..., Any]:
        if self._call is not None:
            return self._call
        assert self._compiling is not None
        compiled = self._compiling.result()
        if compiled.out_tree == self._tree:
            _save(self._path, compiled)
        return compiled


def program_path(directory: Path | None, name: str, *facts: Any) -> Path | None:
    """The file of a program that depends on `facts`, which print as what they are; also on versions and the machine."""
    if directory is None:
        return None
    digest = hashlib.sha256(repr((_environment(), facts)).encode()).hexdigest()
    return directory / f"{name}-{digest[:32]}{_SUFFIX}"


def _environment() -> tuple[Any, ...]:
    """What every compiled program depends on besides its function."""
    # Sources rather than a version: they change between versions while they are developed.
    sources = sorted(Path(octavo.__file__).parent.rglob("*.py"))
    stats = [(path.name, stat.st_size, stat.st_mtime_ns) for path in sources if (stat := path.stat())]
    library = compiling.library()
    kernel = library.stat().st_mtime_ns if library.exists() else None
    settings = {
        name: value
        for name, value in jax.config.values.items()
        if isinstance(value, bool | int | str | None) and "cache" not in name and "log" not in name
    }
    device = jax.devices()[0]
    machine = platform.machine(), _processor(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    flags = [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    versions = jax.__version__, version("jaxlib"), device.client.platform_version, device.device_kind
    return versions, len(jax.devices()), machine, flags, sorted(settings.items()), stats, kernel, kernels.status()


def _processor() -> str:
    """The instruction sets of the processor, for which CPU programs are compiled."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()


def _load(path: Path, device: jax.Device, in_tree: Any, out_tree: Any) -> Callable[..., Any] | None:
    try:
        data = path.read_bytes()
        if len(data) < 4 or zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
            return None
        os.utime(path)
        return serialize_executable.deserialize_and_load(data[4:], in_tree, out_tree, execution_devices=[device])
    except Exception:  # of XLA or pickle, for which anything may be wrong
        return None


def _save(path: Path | None, compiled: Any) -> None:
    assert path is not None
    try:
        data, _, _ = serialize_executable.serialize(compiled)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic_write(path, zlib.crc32(data).to_bytes(4, "little") + data)
        _delete_oldest(path.parent)
    except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return  # a disk that is full, or a backend that cannot serialize: the program runs all the same


def _delete_oldest(directory: Path) -> None:
    files = sorted(directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    total = 0
    for path in files:
        total += path.stat().st_size
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)
