"""Variables of a Flax Linen model: names, boxes and wrappers, and the variables of overridden operations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import serialization
from flax.core import meta

from octavo.frameworks.params import WithAux, unwrap
from octavo.qarray import QArray, is_qarray, shardings
from octavo.transform import Site
from octavo.transform.frame import Frame, Key
from octavo.transform.state import GRADIENT_STATE

PARAMS = "params"


def replace_leaf(tree: Any, path: Sequence[str], quantizer: Any) -> Any:
    """A parameter tree with one leaf quantized; codes and scales keep the names of its sharded axes."""
    if path:
        return {**tree, path[0]: replace_leaf(tree[path[0]], path[1:], quantizer)}
    if not isinstance(tree, meta.AxisMetadata):
        return WithAux(quantizer.quantize(tree), quantizer)
    return WithAux(boxed(quantizer.quantize(tree.unbox()), tree), quantizer)


def boxed(q: QArray, box: Any, *, replicate_scale: bool = False) -> QArray:
    """Codes and scales in boxes with the axis names of the parameter's box."""
    if not isinstance(box, nn.Partitioned):
        return jax.tree.map(box.replace_boxed, q)
    specs = shardings(q, jax.sharding.PartitionSpec(*box.names))

    def put(x: Any, spec: Any) -> Any:
        kept = tuple(spec) if x is q.qvalue or not replicate_scale else ()
        return box.replace(value=x, names=kept + (None,) * (x.ndim - len(kept)))

    return jax.tree.map(put, q, specs)


def plain(tree: Any) -> Any:
    """Variables without boxes and `WithAux`: arrays and QArrays."""
    return unwrap(meta.unbox(tree))


def leaf_names(args: tuple[Any, ...], kwargs: dict[str, Any], prefix: str = "") -> list[str | None]:
    """The paths of parameters, which are in the first argument; None for all other leaves."""
    names: list[str | None] = []
    for path, _ in jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=is_qarray):
        keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
        own = keys[keys.index(PARAMS) + 1 :] if keys[:2] == ["0", "0"] and PARAMS in keys else None
        names.append(None if own is None else "/".join([prefix, *own] if prefix else own))
    return names


def static_scales(params: Any) -> dict[str, Any]:
    """The static ranges among parameters, as state of the operations: `<name>_scale` and `<name>_zero_point`."""
    found: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            if inner := static_scales(value):
                found[name] = inner
        elif isinstance(value, WithAux) and not is_qarray(value.array):
            operand = name.removesuffix("_scale")
            found[operand] = {"scale": meta.unbox(value.array)}
            if (zero_point := params.get(f"{operand}_zero_point")) is not None:
                found[operand]["zero_point"] = meta.unbox(zero_point)
    return found


def companions(params: Any) -> dict[str, Any]:
    """The arrays that are stored with quantized parameters, as parameters of their own."""
    found: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            if inner := companions(value):
                found[name] = inner
        elif isinstance(value, WithAux):
            found |= {f"{name}_{part}": meta.unbox(x) for part, x in value.companions.items()}
    return found


def _to_state_dict(x: WithAux | QArray) -> dict[str, Any]:
    if isinstance(x, WithAux):
        return {"array": serialization.to_state_dict(x.array)}
    parts = {name: getattr(x, name) for name in ("qvalue", "scale", "zero_point")}
    parts |= {} if x.outer_scale is None else {"outer_scale": x.outer_scale}
    return {name: serialization.to_state_dict(part) for name, part in parts.items()}


def _from_state_dict(x: WithAux | QArray, state: dict[str, Any]) -> WithAux | QArray:
    if isinstance(x, WithAux):
        return WithAux(serialization.from_state_dict(x.array, state["array"]), x.how)
    parts = {name: serialization.from_state_dict(getattr(x, name), part) for name, part in state.items()}
    return x._replace(**parts)


for _cls in (WithAux, QArray):
    serialization.register_serialization_state(_cls, _to_state_dict, _from_state_dict, override=True)


class _Host(nn.Module):
    """A module in which an overridden operation may create submodules."""

    fn: Callable[[], Any]

    @nn.compact
    def __call__(self):
        return self.fn()


def host(frame: Frame, site: Site, call: Callable[[], Any]) -> Any:
    """Run an overridden operation that may hold Linen variables, which are state of its module."""
    place, path = _Host(call, parent=None), site.path
    if frame.context.init:
        out, made = place.init_with_output(jax.random.key(0))
        for collection, tree in made.items():
            for name, value in tree.items():
                frame.read(Key(collection, path, name), lambda value=value: value)
        return out
    variables: dict[str, Any] = {}
    for key, value in frame.state.items():
        if key.path == path and key.name == site.op_id:
            variables.setdefault(key.collection, {})[key.name] = value
    mutable = [c for c in variables if c != GRADIENT_STATE] if frame.context.update else []
    rngs = {} if frame.key is None else {"params": frame.key}
    out, after = place.apply(variables, mutable=mutable or ["intermediates"], rngs=rngs)  # pyrefly: ignore
    for collection in mutable:
        for name, value in after[collection].items():
            frame.write(Key(collection, path, name), value)
    return out
