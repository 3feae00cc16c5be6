"""Arrays to and from a directory with Orbax: one folder of chunks for each array, uncompressed."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from octavo.checkpoint.leaves import Path as Names
from octavo.checkpoint.leaves import dtype_of, nested

CHUNK_BYTES = 8 << 20
"""Large arrays are written in pieces of this size, in parallel."""

# Fixed here rather than asked of TensorStore, so that what is on disk does not depend on its version.
_NATIVE = {
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn"),
}
_LONGEST = 240  # A file name has at most 255 bytes.


def places(paths: list[Names]) -> dict[Names, Names]:
    """Where in Orbax's tree each leaf goes: its path, where that can be the name of a folder.

    >>> places([("params", "w"), ("stats", "mlp/x.y")])
    {('params', 'w'): ('params', 'w'), ('stats', 'mlp/x.y'): ('stats', 'mlp%2Fx%2Ey')}
    """
    found = {}
    for number, path in enumerate(paths):
        place = tuple(_escaped(name) for name in path)
        fits = place and len(folder(place).encode()) <= _LONGEST
        found[path] = place if fits else (f"%%{number}",)  # No escaped name has %%.
    return found


def folder(place: Names) -> str:
    """The folder of an array."""
    return ".".join(place)


def write(directory: Path, arrays: Mapping[Names, Any]) -> None:
    """Write arrays, by their places, to a directory that does not exist yet."""
    import orbax.checkpoint as ocp  # Half a second that only those who save or read should wait for.

    with _quiet():
        tree = nested({place: stored(array) for place, array in arrays.items()})
        chunks = nested({place: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for place in arrays})
        # OCDBT would put all arrays into a few files, at less than half the speed and with no telling which array is
        # damaged; compression saves 8 % of normally distributed float32 and doubles the time.
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=_handlers())
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(directory, args=ocp.args.PyTreeSave(tree, save_args=chunks))


def read(
    directory: Path, dtypes: Mapping[Names, str], shardings: Mapping[Names, Any] | None = None
) -> dict[Names, Any]:
    """The arrays at some places, given the dtype that each one had: in memory, or where a sharding says."""
    import orbax.checkpoint as ocp

    def how_to(place: Names) -> Any:
        sharding = (shardings or {}).get(place)
        if sharding is None or not is_native(dtype_of(dtypes[place])):
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=sharding, dtype=dtype_of(dtypes[place]))

    with _quiet():
        wanted = nested(dict.fromkeys(dtypes, 0))
        how = nested({place: how_to(place) for place in dtypes})
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=how, partial_restore=True)
        # A process may read what the others do not, a report's for one: it waits for nobody.
        alone: dict[str, Any] = {}
        if jax.distributed.is_initialized() and jax.process_count() > 1:
            this = jax.process_index()
            options = ocp.options.MultiprocessingOptions(
                primary_host=this, active_processes={this}, barrier_sync_key_prefix=f"process{this}"
            )
            alone = {"multiprocessing_options": options}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, **alone), **alone) as checkpointer:
            tree = checkpointer.restore(directory, args=args)
    found = {}
    for place, name in dtypes.items():
        array: Any = tree
        for part in place:
            array = array[part]
        dtype = dtype_of(name)
        found[place] = array if array.dtype == dtype else array.view(dtype)[..., 0]
    return found


def is_native(dtype: np.dtype) -> bool:
    """Whether TensorStore has a dtype."""
    return dtype.name in _NATIVE


def stored(array: Any) -> Any:
    """The array itself, or its bytes along one more axis where TensorStore does not have the dtype."""
    return array if is_native(array.dtype) else array[..., None].view(np.uint8)


def _handlers() -> Any:
    """Orbax's own, but that arrays of NumPy are written from where they lie: nothing else writes to them meanwhile."""
    from orbax.checkpoint import type_handlers

    return type_handlers.create_type_handler_registry(
        (np.ndarray, type_handlers.NumpyHandler(deepcopy_host_arrays=False)), (jax.Array, type_handlers.ArrayHandler())
    )


def _escaped(name: str) -> str:
    for char in "%/.\0":
        name = name.replace(char, f"%{ord(char):02X}")
    return name or "%"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax without its log: what goes wrong is raised, and the rest is of no use to whoever trains."""

    def others(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)
