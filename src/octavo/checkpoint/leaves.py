"""A pytree as named host arrays and back: what every leaf was, so that it returns bit for bit."""

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

SCALARS = {"bool": "bool", "int": "int64", "float": "float64", "complex": "complex128"}
"""Python's numbers, and the dtype that each is stored in."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a leaf is besides its values; `kind` is `array`, `key` (a typed PRNG key) or the name of a Python type."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    dtype: str
    implementation: str = ""

    def __str__(self) -> str:
        if self.kind in SCALARS:
            return f"a Python {self.kind}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Leaf":
        tuples: dict[str, Any] = {name: tuple(fields[name]) for name in ("path", "shape")}
        return Leaf(**(fields | tuples))


def show(path: Path) -> str:
    """A path as it is written in messages."""
    return "/".join(path) or "(the state itself)"


def leaves_of(tree: Any) -> dict[Path, tuple[Leaf, Any]]:
    """Every leaf of a pytree by its path, with its description. Abstract leaves (ShapeDtypeStruct) will do.

    >>> {show(path): str(leaf) for path, (leaf, _) in leaves_of({"w": np.zeros((2, 3), "int8"), "n": 3}).items()}
    {'n': 'a Python int', 'w': 'int8[2,3]'}
    """
    found: dict[Path, tuple[Leaf, Any]] = {}
    for keys, value in jax.tree_util.tree_leaves_with_path(tree):
        path = _names(keys)
        if path in found:
            raise CheckpointError(f"two leaves of the state are called {show(path)}; give them different names")
        found[path] = (_describe(path, value), value)
    return found


def qarrays_of(tree: Any) -> dict[Path, QArray]:
    """The QArrays of a pytree by their paths."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_qarray)
    return {_names(keys): node for keys, node in nodes if isinstance(node, QArray)}


def static_of(q: QArray) -> dict[str, Any]:
    """What a QArray is besides its arrays, as JSON."""
    return {
        "qtype": q.qtype.to_json(),
        "dtype": q.dtype.name,
        "padding": [list(p) for p in q.padding],
        "packed": None if q.packed is None else list(q.packed),
    }


def static_text(static: Mapping[str, Any]) -> str:
    """What a QArray is besides its arrays, in a message."""
    padding = f", padding={static['padding']}" if static["padding"] else ""
    packed = f", packed={static['packed']}" if static["packed"] else ""
    fmt = Config.from_json(static["qtype"])
    shown = fmt.name if formats().get(fmt.name) == fmt else repr(fmt)
    return f"a QArray of {shown}, dtype={static['dtype']}{padding}{packed}"


def qarray(static: Mapping[str, Any], parts: Mapping[str, Any]) -> QArray:
    """The QArray of stored parts."""
    names = ("qvalue", "scale", "zero_point", "outer_scale")
    packed = None if static["packed"] is None else tuple(static["packed"])
    aux = (Config.from_json(static["qtype"]), dtype_of(static["dtype"]), tuple(map(tuple, static["padding"])), packed)
    arrays = [_put(parts[name]) if name in parts else None for name in names]
    return QArray.tree_unflatten(aux, arrays)


def _put(part: Any) -> Any:
    return part if isinstance(part, jax.ShapeDtypeStruct) else jax.device_put(part)


def dtype_of(name: str) -> np.dtype:
    """The dtype of a name, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def to_host(leaf: Leaf, value: Any, *, copy: bool = True) -> np.ndarray:
    """A leaf in host memory: a copy that nobody else will change, unless nobody would anyway."""
    if leaf.kind in SCALARS:
        return np.asarray(value, SCALARS[leaf.kind])
    if leaf.kind == "key":
        value = jax.random.key_data(value)
    # NumPy sees the very buffer of a JAX array on a CPU, and a step that donates it would write there.
    array = np.array(value, order="C", copy=True if copy else None)
    return array.astype(array.dtype.newbyteorder("=")) if not array.dtype.isnative else array


def nbytes(leaf: Leaf, value: Any) -> int:
    """How many bytes a leaf has."""
    return value.nbytes if hasattr(value, "nbytes") else dtype_of(leaf.dtype).itemsize


def empty(leaf: Leaf) -> np.ndarray:
    """The array of a leaf without elements, of which there is nothing to store."""
    if leaf.kind == "key":
        return np.asarray(
            jax.random.key_data(jax.random.split(jax.random.key(0, impl=leaf.implementation), leaf.shape))
        )
    return np.empty(leaf.shape, dtype_of(leaf.dtype))


def abstract(leaf: Leaf) -> Any:
    """The shape and dtype of a leaf."""
    if leaf.kind == "key":
        return jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl=leaf.implementation), leaf.shape))
    return jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype))


def from_host(leaf: Leaf, array: Any, like: Any) -> Any:
    """The leaf that an array was, of the type and in the place of `like`, where it may be already."""
    if isinstance(array, jax.Array):
        return array
    if leaf.kind in SCALARS:
        return getattr(builtins, leaf.kind)(array.item())
    if leaf.kind == "key":
        value: Any = jax.random.wrap_key_data(jax.device_put(array), impl=leaf.implementation)
    elif isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        value = array
    else:
        return array[()] if isinstance(like, np.generic) else array
    # An array that was free to move stays free: a committed one would clash with others on more devices.
    sharding = getattr(like, "sharding", None) if getattr(like, "committed", True) else None
    value = _placed(value, sharding)
    if leaf.kind != "key" and value.dtype != array.dtype:
        raise CheckpointError(f"{show(leaf.path)} is {leaf}, which JAX holds only with jax_enable_x64=True")
    return value


def _placed(value: Any, sharding: Any) -> Any:
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    # What every process has read whole; device_put would compare their values first.
    return jax.make_array_from_callback(value.shape, sharding, lambda place: value[place])


def nested(values: Mapping[Path, Any]) -> Any:
    """Dictionaries within dictionaries, from values by path."""
    if set(values) == {()}:
        return values[()]
    tree: dict[str, Any] = {}
    for path, value in values.items():
        place = tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    return tree


def differences(expected: Mapping[Path, str], found: Mapping[Path, str]) -> Iterator[str]:
    """What differs between two descriptions, a line for each place that is not within one of them."""
    different: set[Path] = set()
    for path in sorted({**expected, **found}, key=len):
        ours, theirs = expected.get(path, "nothing"), found.get(path, "nothing")
        if ours != theirs and path[:-1] not in different:
            different.add(path)
            yield f"  {show(path)}: expected {ours}, found {theirs}"


def _names(keys: Any) -> Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _describe(path: Path, value: Any) -> Leaf:
    if type(value).__name__ in SCALARS and not hasattr(value, "dtype"):
        kind = type(value).__name__
        if kind == "int" and not -(2**63) <= value < 2**63:
            raise CheckpointError(f"{show(path)} is an integer of more than 64 bits; keep it in `extra`, as text")
        return Leaf(path, kind, (), SCALARS[kind])
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise CheckpointError(
            f"{show(path)} is a {type(value).__name__}; the state of a checkpoint holds arrays, PRNG keys, numbers and "
            "QArrays, and `extra` whatever JSON can say"
        )
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        implementation = str(jax.random.key_impl(value)) if isinstance(value, jax.Array) else ""
        return Leaf(path, "key", tuple(value.shape), str(value.dtype), implementation)
    dtype = np.dtype(value.dtype)
    if dtype.kind not in "biufc" and not hasattr(ml_dtypes, dtype.name):
        raise CheckpointError(f"{show(path)} has dtype {dtype}, which is no number; keep it in `extra`")
    return Leaf(path, "array", tuple(value.shape), dtype.name)
