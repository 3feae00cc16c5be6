"""Flax NNX models in low precision: the same model, whose methods are rewritten as they are called."""

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from flax import nnx

from octavo.frameworks.crossing import Crossing, scoped
from octavo.frameworks.params import WithAux, is_stored
from octavo.transform.frame import Key
from octavo.transform.provider import OVERWRITE, QUANT_STATS, QuantizationProvider

_TAG = "octavo"
_CONTAINERS = (nnx.List, nnx.Dict)


class QuantStat(nnx.Variable):
    """Statistics of a static range: how often it was measured, and the sums of what was found."""


class OverwriteWithGradient(nnx.Variable):
    """State of delayed scaling, whose gradient is its new value."""


_VARIABLES = {QUANT_STATS: QuantStat, OVERWRITE: OverwriteWithGradient}


class Family:
    """What the modules of one quantized model have in common: the provider, and their classes."""

    def __init__(self, provider: QuantizationProvider, methods: Collection[str]):
        self.provider, self.methods = provider, tuple(methods)
        self.cache: dict[Any, Any] = {}
        self.classes: dict[type, tuple[type, type]] = {}

    def of(self, cls: type) -> tuple[type, type]:
        """Two subclasses of a module's class: one whose methods are rewritten when they are called, and one for within
        such a call, whose methods only say where they are. Being different classes, they never share a compiled
        function of Flax or JAX.
        """
        if cls not in self.classes:
            # A model that is only run keeps the ranges that it was calibrated with.
            frozen = self.provider.quantizes_params
            same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            shared = {**same, "_octavo": (self, cls), "disable_quant_stats_update": frozen, "qwix_rngs": None}
            methods = dict(_public_methods(cls, self.methods))
            outer = {name: _entry(self, name, method) for name, method in methods.items()}
            inner = {name: scoped(method, _path) for name, method in methods.items()}
            kind: Any = type(cls)
            self.classes[cls] = kind(cls.__name__, (cls,), shared | outer), kind(cls.__name__, (cls,), shared | inner)
        return self.classes[cls]


def quantize_nnx(
    model: Any,
    provider: QuantizationProvider,
    *model_inputs: Any,
    methods: Collection[str] | None = None,
    rngs: nnx.Rngs | None = None,
    skip_nnx_init: bool = False,
    **model_input_kwargs: Any,
) -> Any:
    """A copy of an NNX model that computes as the provider's rules say; it shares its arrays with the model.

    Every public method of the model and of its submodules is quantized, and so are private ones that `methods` names.
    `model_inputs` are what the model is called with, or each of the `methods`; only their shapes matter. They are
    needed where parameters become low precision (PtqProvider) and where state is kept (static ranges): that state
    appears as `QuantStat` variables of the modules, and every call updates it until
    `model.set_attributes(disable_quant_stats_update=True)`. `skip_nnx_init` leaves both as they are. `rngs` has the
    stream "stochastic_rounding" or a default one; it is kept as `model.qwix_rngs`.

    >>> import jax.numpy as jnp, octavo
    >>> from octavo.transform import QtProvider
    >>> model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    >>> quantize_nnx(model, QtProvider(octavo.rules.QtRule(weight_qtype="int8", act_qtype="int8")))(jnp.ones((3, 4))).shape
    (3, 2)
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"quantize_nnx takes an nnx.Module, got {type(model).__name__}")
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs is an nnx.Rngs, got {type(rngs).__name__}")
    inputs = bool(model_inputs or model_input_kwargs)
    model = nnx.clone(model)
    family = Family(provider, methods or ())
    for path, module in list(nnx.iter_modules(model)):
        module.octavo_path = "/".join(map(str, path))
        if not isinstance(module, _CONTAINERS):
            module.__class__ = family.of(_original(module))[0]
    if rngs is not None:
        model.qwix_rngs = rngs
    if skip_nnx_init:
        return model
    if not inputs:
        _refuse_without_inputs(model, provider)
        return model
    for name in methods or ("__call__",):
        _initialize(model, name, model_inputs, model_input_kwargs)
    return model


def _refuse_without_inputs(model: Any, provider: QuantizationProvider) -> None:
    """Say what only inputs can tell, unless the model has it already."""
    variables = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)]
    what = None
    if provider.quantizes_params and not any(is_stored(v.get_raw_value()) for v in variables):
        what = "low-precision parameters are laid out for the products that use them"
    elif provider.stateful and not provider.overrides and not any(isinstance(v, QuantStat) for v in variables):
        what = "static ranges and delayed scaling keep state for each product"
    if what is not None:
        raise ValueError(
            f"{what}, so the model has to be seen running: quantize_model(model, provider, *example_inputs), where only "
            "the shapes of the inputs matter"
        )


def _original(module: Any) -> type:
    return getattr(type(module), "_octavo", (None, type(module)))[1]


def _path(module: Any) -> str:
    return module.octavo_path


def _public_methods(cls: type, named: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The methods that a module class adds to nnx.Module, and those that are asked for."""
    for name in dir(cls):
        public = name == "__call__" or not (name.startswith("_") or hasattr(nnx.Module, name))
        method = inspect.getattr_static(cls, name)
        # A method that Flax or JAX has wrapped, as nnx.jit does, is no function but can be bound like one.
        bound = callable(method) and hasattr(method, "__get__") and not isinstance(method, type)
        if (public or name in named) and bound and not isinstance(method, staticmethod | classmethod):
            yield name, method


def _entry(family: Family, name: str, method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _call(family, name, args, kwargs)

    return call


# One call from outside.


def _call(family: Family, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rngs = args[0].qwix_rngs
    key = rngs.stochastic_rounding() if isinstance(rngs, nnx.Rngs) else None
    places = _state_places((args, kwargs)) if family.provider.stateful else {}
    state: dict[str, Any] = {}
    for place, variable in places.items():
        _level(state, place)[place.name] = variable.get_value()
    with nnx.update_context(_TAG):
        crossing, graphdefs = _crossing(family, name, args, kwargs)
        result, new = crossing.run(state, key, _update(args, kwargs))
        if graphdefs[-1] is None:
            after, out = result
            _write((args, kwargs), after)
        else:
            with nnx.merge_context(_TAG, inner=False) as context:
                _, _, out = context.merge(graphdefs[-1], result)
    for place, variable in places.items():
        now = _level(new, place).get(place.name)
        if now is not None and now is not _level(state, place)[place.name]:
            variable.set_value(now)
    return out


def _crossing(family: Family, name: str, args: Any, kwargs: Any, **options: Any) -> tuple[Crossing, list[Any]]:
    """The call, and a list that is told when it is traced: the new structure of arguments and result, or None if they
    are what they were but for the values of variables.
    """
    with nnx.split_context(_TAG) as context:
        graphdef, state = context.split((args, kwargs))
    graphdefs: list[Any] = []

    def run(state: Any) -> Any:
        with nnx.merge_context(_TAG, inner=True) as context:
            args, kwargs = context.merge(graphdef, state)
        before = nnx.graphdef((args, kwargs))
        _turn((args, kwargs), 1)
        out = getattr(args[0], name)(*args[1:], **kwargs)
        _turn((args, kwargs, out), 0)
        if nnx.graphdef((args, kwargs)) == before and not _holds_nodes(out):
            graphdefs.append(None)
            return nnx.state((args, kwargs)), out
        with nnx.split_context(_TAG) as context:
            after, state = context.split((args, kwargs, out))
        graphdefs.append(after)
        return state

    run.__name__ = run.__qualname__ = f"{type(args[0]).__name__}.{name}"
    known = {path: name for path, name, _ in _parameters((args, kwargs))}
    names = [known.get(_variable_path(path)) for path, _ in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_stored)]
    return Crossing(run, state, names, family.provider, family.cache, **options), graphdefs


def _turn(tree: Any, which: int) -> None:
    """Give every module the class for outside (0) or for inside (1) of a call."""
    for _, node in list(nnx.iter_graph(tree)):
        if (member := getattr(type(node), "_octavo", None)) is not None:
            node.__class__ = member[0].of(member[1])[which]


def _variable_path(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The place of a leaf's variable in its state; what comes after is inside of the variable."""
    return tuple(p.key for p in itertools.takewhile(lambda p: isinstance(p, jax.tree_util.DictKey), path))


def _parameters(tree: Any) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
    """Every parameter: where it is, its name from the root of the model, and its variable."""
    nodes = list(nnx.iter_graph(tree))
    modules = {path: node.octavo_path for path, node in nodes if hasattr(node, "octavo_path")}
    for path, node in nodes:
        if isinstance(node, nnx.Param) or (isinstance(node, nnx.Variable) and is_stored(node.get_raw_value())):
            above = next((n for n in reversed(range(len(path))) if path[:n] in modules), None)
            inside = path[2:] if above is None else (modules[path[:above]], *path[above:])
            yield path, "/".join(str(part) for part in inside if part != ""), node


def _holds_nodes(tree: Any) -> bool:
    is_node = lambda x: isinstance(x, nnx.Pytree | nnx.Variable)  # noqa: E731
    return any(map(is_node, jax.tree.leaves(tree, is_leaf=is_node)))


def _write(tree: Any, after: nnx.State) -> None:
    """Give variables the values that they were changed to; those of a model that is closed over may not be."""
    now = dict(nnx.to_flat_state(after))
    for path, variable in nnx.iter_graph(tree):
        if isinstance(variable, nnx.Variable):
            value = now[path].get_raw_value()
            pairs = zip(*(jax.tree.leaves(v, is_leaf=is_stored) for v in (variable.get_raw_value(), value)), strict=True)
            if any(old is not new for old, new in pairs):
                variable.set_raw_value(value)


# State of operations, and parameters in low precision.


def _initialize(model: Any, name: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    family = type(model)._octavo[0]
    provider = family.provider
    with nnx.update_context(_TAG):
        crossing, _ = _crossing(family, name, (model, *inputs), kwargs, on_unmatched="error")
        quantizers = crossing.stored_quantizers() if provider.quantizes_params or not provider.stateful else {}
        state = crossing.initial() if provider.stateful else {}
    modules = {module.octavo_path: module for _, module in nnx.iter_modules(model)}
    for key, value in state.items():
        if key.collection not in _VARIABLES:
            raise ValueError(f"NNX models keep state of the collections {list(_VARIABLES)}, not of {key.collection!r}")
        path, attribute = key.path, key.name
        while path not in modules:  # a scope that is no module: its name becomes part of the state's
            path, _, last = path.rpartition("/")
            attribute = f"{last}/{attribute}"
        if not hasattr(modules[path], attribute):
            setattr(modules[path], attribute, _VARIABLES[key.collection](value))
    for _, parameter, variable in _parameters(model) if provider.quantizes_params else ():
        value = variable.get_raw_value()
        if (how := quantizers.get(parameter)) is not None and not is_stored(value):
            abstract = isinstance(value, jax.ShapeDtypeStruct)
            codes = jax.eval_shape(how.quantize, value) if abstract else how.quantize(value)
            variable.set_raw_value(WithAux(codes, how))


def _state_places(tree: Any) -> dict[Key, Any]:
    """The variables that hold state of operations, by its keys."""
    collections = {variable: name for name, variable in _VARIABLES.items()}
    places = {}
    for _, module in nnx.iter_graph(tree):
        for attribute, variable in vars(module).items() if hasattr(module, "octavo_path") else ():
            if type(variable) in collections:
                scope, _, name = attribute.rpartition("/")
                path = "/".join(part for part in (module.octavo_path, scope) if part)
                places[Key(collections[type(variable)], path, name)] = variable
    return places


def _level(tree: dict[str, Any], key: Key) -> dict[str, Any]:
    """The dictionary that holds a piece of state."""
    place = tree.setdefault(key.collection, {})
    for part in key.path.split("/") if key.path else ():
        place = place.setdefault(part, {})
    return place


def _update(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | Callable[[str], bool]:
    """Whether statistics are collected, or for which modules."""
    nodes = [node for _, node in nnx.iter_graph((args, kwargs))]
    frozen = [node.octavo_path for node in nodes if getattr(node, "disable_quant_stats_update", False)]
    if not frozen or args[0].disable_quant_stats_update:
        return not frozen
    return lambda path: not any(f"{path}/".startswith(f"{above}/") for above in frozen)
