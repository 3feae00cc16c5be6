"""State of the operations of an NNX model, and its quantized parameters, as variables of their modules.

A quantized parameter is a `WithAux` whose codes and scales are variables of the parameter's type, as in Qwix.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from octavo.frameworks.params import WithAux
from octavo.qarray import QArray, Quantizer, shardings
from octavo.transform.frame import Key
from octavo.transform.learned import LEARNED
from octavo.transform.state import GRADIENT_STATE, QUANT_STATS, state_structure


class QuantStat(nnx.Variable):
    """The NNX variable of a static range: the number of measurements and the sums of the measured bounds.

    >>> import octavo, jax.numpy as jnp
    >>> rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    >>> model = octavo.quantize_model(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), rule, jnp.ones((3, 4)))
    >>> _ = model(jnp.ones((3, 4)))
    >>> int(nnx.state(model, QuantStat)["dot_general0_lhs"].get_value()["count"])
    1
    """


class OverwriteWithGradient(nnx.Variable):
    """The NNX variable of delayed scaling, whose gradient is its new value."""


class LearnedScale(nnx.Param):
    """The NNX parameter of a weight's learned scale."""


VARIABLES = {
    QUANT_STATS: QuantStat,
    GRADIENT_STATE: OverwriteWithGradient,
    LEARNED: LearnedScale,
    "params": nnx.LoRAParam,
}
"""The variables of each collection of state; parameters that a provider adds are adapters."""


def is_member(node: Any) -> bool:
    """Whether a node is a module of a quantized model."""
    return isinstance(node, nnx.Module) and "octavo_path" in vars(node)


def put(modules: dict[str, Any], key: Key, value: Any) -> None:
    """Give the module at a key's path a variable for its state, unless it has one."""
    if key.collection not in VARIABLES:
        raise ValueError(f"NNX models keep state of the collections {list(VARIABLES)}, not of {key.collection!r}")
    path, attribute = key.path, key.name
    while path not in modules:  # the scope is not a module: its name becomes part of the state's name
        path, _, last = path.rpartition("/")
        attribute = f"{last}/{attribute}"
    if not hasattr(modules[path], attribute):
        setattr(modules[path], attribute, VARIABLES[key.collection](value))
    elif state_structure(getattr(modules[path], attribute).get_value()) != state_structure(value):
        raise ValueError(
            f"{key.name} at {key.path!r} has another state already: give static ranges the same act_batch_axes in all "
            "stages of a schedule, and quantize the float model rather than one that is quantized by other rules"
        )


def state_places(tree: Any) -> dict[Key, Any]:
    """The variables that hold state of operations, by key."""
    collections = {variable: name for name, variable in VARIABLES.items()}
    places = {}
    for _, module in nnx.iter_graph(tree):
        for attribute, variable in vars(module).items() if is_member(module) else ():
            if type(variable) in collections:
                scope, _, name = attribute.rpartition("/")
                path = "/".join(part for part in (module.octavo_path, scope) if part)
                places[Key(collections[type(variable)], path, name)] = variable
    return places


def updating(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | frozenset[str]:
    """Whether statistics are updated, or the paths of the modules in which they are not."""
    modules: list[Any] = [node for _, node in nnx.iter_graph((args, kwargs)) if is_member(node)]
    frozen = [module.octavo_path for module in modules if getattr(module, "disable_quant_stats_update", False)]
    if not frozen or args[0].disable_quant_stats_update:
        return not frozen
    return frozenset(frozen)


def stored_parameter(codes: QArray, quantizer: Quantizer, variable: Any) -> WithAux:
    """Codes and scales as variables like that of the parameter, with the names of their sharded axes."""
    metadata = variable.get_metadata()
    field = next((name for name in ("out_sharding", "sharding_names") if metadata.get(name) is not None), None)
    if field is None:
        return WithAux(jax.tree.map(variable.replace, codes), quantizer)

    def box(x: Any, spec: Any) -> Any:
        new = variable.replace(x)
        new.set_metadata(field, (*spec, *(None,) * (len(x.shape) - len(spec))))
        return new

    specs = shardings(codes, jax.sharding.PartitionSpec(*metadata[field]))
    return WithAux(jax.tree.map(box, codes, specs), quantizer)


def stored_paths(tree: Any) -> dict[tuple[Any, ...], WithAux]:
    """The quantized parameters of a model, by path; one that is shared has several paths."""
    return {path: node for path, node in nnx.iter_graph(tree) if isinstance(node, WithAux)}


def map_attributes(tree: Any, fn: Callable[[Any], Any]) -> None:
    """Replace attributes of the modules and containers of a tree, where `fn` returns something else."""
    for _, node in list(nnx.iter_graph(tree)):
        for name, value in list(vars(node).items()) if isinstance(node, nnx.Pytree) else ():
            if (new := fn(value)) is not value:
                setattr(node, name, new)


def open_parameters(tree: Any, arrays: Mapping[tuple[Any, ...], Any]) -> Callable[[], None]:
    """Put a parameter with its array in place of each quantized one; returns a function that undoes it."""
    opened, before = {}, {}
    for path, node in stored_paths(tree).items():
        codes = node.array.qvalue
        if path in arrays:
            opened[id(codes)] = nnx.Param(arrays[path]) if type(codes) is nnx.Param else type(codes)(arrays[path])
            before[id(opened[id(codes)])] = node
    map_attributes(tree, lambda x: opened.get(id(x.array.qvalue), x) if isinstance(x, WithAux) else x)
    return lambda: map_attributes(tree, lambda x: before.get(id(x), x))
