"""Arrays on disk in Orbax's layout: one folder of uncompressed chunks per array."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from octavo._tree import unflatten_paths
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.leaves import Leaf, path_text, to_host
from octavo.checkpoint.leaves import Path as Names

CHUNK_BYTES = 8 << 20
"""Larger arrays are written in chunks of this size, in parallel."""

# A fixed list instead of a query to TensorStore, so that the layout on disk does not depend on its version.
_NATIVE = {
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn"),
}
_MAX_NAME = 240  # A file name has at most 255 bytes.


def folder_keys(paths: Sequence[Names]) -> dict[Names, Names]:
    """The key of each leaf in Orbax's tree: its path, escaped so that its parts joined by dots name a folder.

    >>> folder_keys([("params", "w"), ("stats", "mlp/x.y")])
    {('params', 'w'): ('params', 'w'), ('stats', 'mlp/x.y'): ('stats', 'mlp%2Fx%2Ey')}
    """
    found = {}
    for number, path in enumerate(paths):
        key = tuple(_escape(name) for name in path)
        fits = key and len(".".join(key).encode()) <= _MAX_NAME
        found[path] = key if fits else (f"%%{number}",)  # No escaped name contains %%.
    return found


def folders(leaves: Mapping[Names, Leaf], paths: Sequence[Names]) -> set[str]:
    """The names of the folders of some leaves, given the paths of all."""
    keys = folder_keys(paths)
    return {".".join(keys[leaf.path]) for leaf in leaves.values()}


def write(directory: Path, arrays: Mapping[Names, Any]) -> None:
    """Write arrays by path to a directory that does not exist yet; those without elements have no folder."""
    keys = folder_keys(list(arrays))
    stored = {keys[path]: _to_stored(array) for path, array in arrays.items() if array.size}
    if not stored:
        return
    import orbax.checkpoint as ocp  # Takes half a second, so it is imported only to save or restore.
    from orbax.checkpoint import type_handlers

    with _without_logging():
        # Orbax's own handlers, except that NumPy arrays are not copied: nothing else writes to them meanwhile.
        handlers = type_handlers.create_type_handler_registry(
            (np.ndarray, type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
            (jax.Array, type_handlers.ArrayHandler()),
        )
        chunks = unflatten_paths({key: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for key in stored})
        # OCDBT would write all arrays to a few files, at less than half the speed, and damage could not be attributed
        # to an array; compression saves 8 % of normally distributed float32 and doubles the time.
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=handlers)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(directory, args=ocp.args.PyTreeSave(unflatten_paths(stored), save_args=chunks))


def read(
    directory: Path, leaves: Mapping[Names, Leaf], paths: Sequence[Names], shardings: Mapping[Names, Any]
) -> dict[Names, Any]:
    """Read arrays.

    Args:
      directory: A directory written by `write`.
      leaves: The metadata of the arrays to read.
      paths: The paths of all arrays in the directory.
      shardings: By a leaf's own path, the sharding to read it with; each process reads only its shards. Other arrays
        are read into host memory.

    Returns:
      The arrays by the leaf's own path, without those that have no elements.
    """
    keys = folder_keys(paths)
    wanted = {keys[leaf.path]: leaf for leaf in leaves.values() if 0 not in leaf.shape}
    if not wanted:
        return {}
    import orbax.checkpoint as ocp

    def restore_args(leaf: Leaf) -> Any:
        if leaf.path in shardings and is_native(leaf.stored_dtype):
            return ocp.ArrayRestoreArgs(sharding=shardings[leaf.path], dtype=leaf.stored_dtype)
        return ocp.RestoreArgs(restore_type=np.ndarray)

    args = ocp.args.PyTreeRestore(
        item=unflatten_paths(dict.fromkeys(wanted, 0)),
        restore_args=unflatten_paths({key: restore_args(leaf) for key, leaf in wanted.items()}),
        partial_restore=True,
    )
    options = _single_process_options()
    with (
        _without_logging(),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, **options), **options) as checkpointer,
    ):
        tree = checkpointer.restore(directory, args=args)
    found = {}
    for key, leaf in wanted.items():
        array: Any = tree
        for name in key:
            array = array[name]
        found[leaf.path] = array if array.dtype == leaf.stored_dtype else array.view(leaf.stored_dtype)[..., 0]
    return found


def is_native(dtype: np.dtype) -> bool:
    """Whether TensorStore has a dtype."""
    return dtype.name in _NATIVE


def to_global(leaf: Leaf, value: Any) -> Any:
    """A leaf as several processes write it: a JAX array with its sharding."""
    if not is_native(leaf.stored_dtype):
        raise CheckpointError(f"{path_text(leaf.path)} is {leaf}, which only a run of one process can save")
    if leaf.kind == "key":
        value = jax.random.key_data(value)
    return value if isinstance(value, jax.Array) else to_host(leaf, value, copy=False)


def _to_stored(array: Any) -> Any:
    """The array itself, or its bytes along one more axis where TensorStore does not have the dtype."""
    return array if is_native(array.dtype) else array[..., None].view(np.uint8)


def _single_process_options() -> dict[str, Any]:
    """Let a process read without a barrier: it may read what the others do not, for example for a report."""
    import orbax.checkpoint as ocp

    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return {}
    this = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=this, active_processes={this}, barrier_sync_key_prefix=f"process{this}"
    )
    return {"multiprocessing_options": options}


def _escape(name: str) -> str:
    for char in "%/.\0":
        name = name.replace(char, f"%{ord(char):02X}")
    return name or "%"


@contextlib.contextmanager
def _without_logging() -> Iterator[None]:
    """Filter out Orbax's log messages; its errors are raised."""

    def is_other(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
