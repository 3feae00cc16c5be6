"""Leaves of a pytree as named host arrays and back, with the metadata that makes the round trip bit-exact."""

import builtins
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from octavo._config import Config
from octavo.checkpoint.errors import CheckpointError
from octavo.numerics import formats
from octavo.qarray import QArray, is_qarray

type Path = tuple[str, ...]

_SCALARS = {"bool": "bool", "int": "int64", "float": "float64", "complex": "complex128"}
"""The dtype in which each Python number type is stored."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Metadata of a leaf; `kind` is `array`, `key` (a typed PRNG key) or the name of a Python number type."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    dtype: str
    implementation: str = ""

    def __str__(self) -> str:
        if self.kind in _SCALARS:
            return f"a Python {self.kind}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def stored_dtype(self) -> np.dtype:
        """The dtype of the stored array: that of the key data for PRNG keys."""
        return to_dtype("uint32" if self.kind == "key" else self.dtype)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Leaf":
        tuples: dict[str, Any] = {name: tuple(fields[name]) for name in ("path", "shape")}
        return Leaf(**(fields | tuples))


def path_text(path: Path) -> str:
    """A path in messages."""
    return "/".join(path) or "(the state itself)"


def to_dtype(name: str) -> np.dtype:
    """The dtype of a name, including those of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


def flatten(tree: Any) -> dict[Path, tuple[Leaf, Any]]:
    """The metadata and value of every leaf of a pytree by path; leaves may be abstract (ShapeDtypeStruct).

    >>> {path_text(path): str(leaf) for path, (leaf, _) in flatten({"w": np.zeros((2, 3), "int8"), "n": 3}).items()}
    {'n': 'a Python int', 'w': 'int8[2,3]'}
    """
    found: dict[Path, tuple[Leaf, Any]] = {}
    for keys, value in jax.tree_util.tree_leaves_with_path(tree):
        path = _names(keys)
        if path in found:
            raise CheckpointError(f"two leaves of the state are called {path_text(path)}; give them different names")
        found[path] = (_describe(path, value), value)
    return found


def differences(expected: Mapping[Path, str], found: Mapping[Path, str]) -> Iterator[str]:
    """A line for each path at which two descriptions differ, except below a path that already does."""
    different: set[Path] = set()
    for path in sorted({**expected, **found}, key=len):
        ours, theirs = expected.get(path, "nothing"), found.get(path, "nothing")
        if ours != theirs and path[:-1] not in different:
            different.add(path)
            yield f"  {path_text(path)}: expected {ours}, found {theirs}"


def to_host(leaf: Leaf, value: Any, *, copy: bool = True) -> np.ndarray:
    """A leaf in host memory; `copy` makes sure that nobody else will write to it."""
    if leaf.kind in _SCALARS:
        return np.asarray(value, _SCALARS[leaf.kind])
    if leaf.kind == "key":
        value = jax.random.key_data(value)
    # On a CPU, NumPy sees the buffer of a JAX array itself, and a step that donates it would write there.
    array = np.array(value, order="C", copy=True if copy else None)
    return array.astype(array.dtype.newbyteorder("=")) if not array.dtype.isnative else array


def from_host(leaf: Leaf, array: Any, like: Any) -> Any:
    """The leaf of a stored array (None: it has no elements), with the type and sharding of `like`."""
    if isinstance(array, jax.Array):
        return array
    if array is None:
        array = _empty(leaf)
    if leaf.kind in _SCALARS:
        return getattr(builtins, leaf.kind)(array.item())
    if leaf.kind == "key":
        value: Any = jax.random.wrap_key_data(jax.device_put(array), impl=leaf.implementation)
    elif isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        value = array
    else:
        return array[()] if isinstance(like, np.generic) else array
    # An uncommitted array stays uncommitted: a committed one would clash with others on more devices.
    sharding = getattr(like, "sharding", None) if getattr(like, "committed", True) else None
    if sharding is None or sharding.is_fully_addressable:
        value = jax.device_put(value, sharding)
    else:  # Every process has read all of it; device_put would compare their values first.
        value = jax.make_array_from_callback(value.shape, sharding, lambda index, source=value: source[index])
    if leaf.kind != "key" and value.dtype != array.dtype:
        raise CheckpointError(f"{path_text(leaf.path)} is {leaf}, which JAX holds only with jax_enable_x64=True")
    return value


def to_abstract(leaf: Leaf) -> Any:
    """The shape and dtype of a leaf."""
    return (
        jax.eval_shape(lambda: _keys(leaf))
        if leaf.kind == "key"
        else jax.ShapeDtypeStruct(leaf.shape, leaf.stored_dtype)
    )


def disk_size(leaves: Mapping[Path, tuple[Leaf, Any]]) -> int:
    """The size of a checkpoint on disk: arrays are not compressed, and each has two small files."""
    sizes = (getattr(value, "nbytes", leaf.stored_dtype.itemsize) for leaf, value in leaves.values())
    return sum(8192 + size for size in sizes) + (1 << 16)


def qarray_metadata(tree: Any) -> dict[Path, dict[str, Any]]:
    """The static fields of the QArrays of a pytree, as JSON, by path."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_qarray)
    return {
        _names(keys): {
            "qtype": q.qtype.to_json(),
            "dtype": q.dtype.name,
            "padding": [list(p) for p in q.padding],
            "packed": None if q.packed is None else list(q.packed),
        }
        for keys, q in nodes
        if isinstance(q, QArray)
    }


def qarray_text(static: Mapping[str, Any]) -> str:
    """The static fields of a QArray in messages."""
    padding = f", padding={static['padding']}" if static["padding"] else ""
    packed = f", packed={static['packed']}" if static["packed"] else ""
    fmt = Config.from_json(static["qtype"])
    shown = fmt.name if formats().get(fmt.name) == fmt else repr(fmt)
    return f"a QArray of {shown}, dtype={static['dtype']}{padding}{packed}"


def make_qarray(static: Mapping[str, Any], arrays: Mapping[str, Any]) -> QArray:
    """The QArray of static fields and arrays by field name."""
    packed = None if static["packed"] is None else tuple(static["packed"])
    aux = (Config.from_json(static["qtype"]), to_dtype(static["dtype"]), tuple(map(tuple, static["padding"])), packed)
    placed = {k: v if isinstance(v, jax.ShapeDtypeStruct) else jax.device_put(v) for k, v in arrays.items()}
    return QArray.tree_unflatten(aux, [placed.get(k) for k in ("qvalue", "scale", "zero_point", "outer_scale")])


def _keys(leaf: Leaf) -> jax.Array:
    return jax.random.split(jax.random.key(0, impl=leaf.implementation), leaf.shape)


def _empty(leaf: Leaf) -> np.ndarray:
    if leaf.kind == "key":
        return np.asarray(jax.random.key_data(_keys(leaf)))
    return np.empty(leaf.shape, leaf.stored_dtype)


def _names(keys: Any) -> Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _describe(path: Path, value: Any) -> Leaf:
    kind = type(value).__name__
    if kind in _SCALARS and not hasattr(value, "dtype"):
        if kind == "int" and not -(2**63) <= value < 2**63:
            raise CheckpointError(f"{path_text(path)} is an integer of more than 64 bits; keep it in `extra`, as text")
        return Leaf(path, kind, (), _SCALARS[kind])
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise CheckpointError(
            f"{path_text(path)} is a {kind}; the state of a checkpoint holds arrays, PRNG keys, numbers and QArrays, "
            "and `extra` any JSON"
        )
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        implementation = str(jax.random.key_impl(value)) if isinstance(value, jax.Array) else ""
        return Leaf(path, "key", tuple(value.shape), str(value.dtype), implementation)
    dtype = np.dtype(value.dtype)
    if dtype.kind not in "biufc" and not hasattr(ml_dtypes, dtype.name):
        raise CheckpointError(f"{path_text(path)} has dtype {dtype}, which is no number; keep it in `extra`")
    return Leaf(path, "array", tuple(value.shape), dtype.name)
