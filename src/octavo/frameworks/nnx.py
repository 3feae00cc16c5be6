"""Flax NNX models: the same model, whose methods are quantized when they are called."""

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from octavo.frameworks.module_call import ModuleCall, method_classes, unmatched_policy
from octavo.frameworks.nnx_state import (
    OverwriteWithGradient,
    QuantStat,
    is_member,
    map_attributes,
    open_parameters,
    put,
    state_places,
    stored_parameter,
    stored_paths,
    updating,
)
from octavo.frameworks.params import WithAux, is_stored
from octavo.transform.frame import Programs
from octavo.transform.provider import QuantizationProvider
from octavo.transform.site import Site
from octavo.transform.state import find_state, nest_state

__all__ = ["OverwriteWithGradient", "QuantStat", "nnx_sites", "quantize_nnx", "staged"]

_TAG = "octavo"
_CONTAINERS = (nnx.List, nnx.Dict)


class Family:
    """The state that the modules of one quantized model share: the provider and their classes."""

    def __init__(self, provider: QuantizationProvider, methods: Collection[str]):
        self.provider, self.methods = provider, tuple(methods)
        self.cache = Programs()
        self.classes: dict[type, tuple[type, type]] = {}

    def of(self, cls: type) -> tuple[type, type]:
        """The classes of a module for outside and inside of a call, see `method_classes`."""
        if cls not in self.classes:
            # A served model keeps the ranges that it was calibrated with.
            frozen = self.provider.quantizes_params or not getattr(self.provider, "updates", True)
            shared = {"_octavo": (self, cls), "disable_quant_stats_update": frozen, "qwix_rngs": None}
            entry = functools.partial(_entry, self)
            self.classes[cls] = method_classes(cls, nnx.Module, self.methods, shared, entry, _path)
        return self.classes[cls]


def quantize_nnx(
    model: Any,
    provider: QuantizationProvider,
    *model_inputs: Any,
    methods: Collection[str] | None = None,
    rngs: Any = None,
    skip_nnx_init: bool = False,
    **model_input_kwargs: Any,
) -> Any:
    """Quantize an NNX model: a copy that shares its arrays with the model.

    Static ranges are `QuantStat` variables of the modules. Every call updates them until
    `model.set_attributes(disable_quant_stats_update=True)`.

    Args:
      model: The model. Every public method of the model and of its submodules is quantized.
      provider: The provider of the rules. A `PtqProvider` quantizes the parameters.
      *model_inputs: Example inputs of the model (or of each of the `methods`), of which only the shapes matter. They
        are needed to quantize parameters and to create state.
      methods: Private methods that are quantized, too.
      rngs: PRNG streams for stochastic rounding: "stochastic_rounding" or a default; kept as `model.qwix_rngs`, and
        passed to methods that take `rngs` themselves.
      skip_nnx_init: Whether to quantize no parameters and create no state.
      **model_input_kwargs: Example inputs by keyword.

    Returns:
      The quantized model.

    >>> import jax.numpy as jnp, octavo
    >>> from octavo.transform import QtProvider
    >>> provider = QtProvider(octavo.rules.QtRule(weight_qtype="int8", act_qtype="int8"))
    >>> low = quantize_nnx(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), provider)
    >>> jax.jit(lambda x: low(x))(jnp.ones((3, 4))).shape
    (3, 2)
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"quantize_nnx takes an nnx.Module, got {type(model).__name__}")
    takes_rngs = [name for name in methods or ("__call__",) if "rngs" in _parameters_of(getattr(model, name, None))]
    if rngs is not None and not takes_rngs and not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs is an nnx.Rngs, got {type(rngs).__name__}")
    inputs = bool(model_inputs or model_input_kwargs)
    model = _converted(model, provider, methods or ())
    if isinstance(rngs, nnx.Rngs):
        model.qwix_rngs = rngs
    if skip_nnx_init:
        return model
    if not inputs:
        _check_without_inputs(model, provider)
        return model
    for name in methods or ("__call__",):
        own = {"rngs": rngs} if rngs is not None and name in takes_rngs else {}
        _initialize(model, name, _arrays(model_inputs), _arrays(model_input_kwargs | own))
    return model


def _parameters_of(method: Any) -> Collection[str]:
    try:
        return inspect.signature(method).parameters
    except (TypeError, ValueError):
        return ()


def nnx_sites(model: Any, provider: QuantizationProvider, *args: Any, **kwargs: Any) -> list[Site]:
    """Every matmul of a model on arguments like these, with the rule that applies to it."""
    model = _converted(model, provider, ())
    with nnx.update_context(_TAG):
        call, *_ = _module_call(type(model)._octavo[0], "__call__", (model, *_arrays(args)), _arrays(kwargs))
        return call.sites()


def staged(model: Any, provider: QuantizationProvider, methods: Collection[str] | None) -> Any:
    """A quantized model with other rules that shares the variables of the given one."""
    return _converted(model, provider, methods or (), share=True)


def _converted(model: Any, provider: QuantizationProvider, methods: Collection[str], *, share: bool = False) -> Any:
    """A copy with the same arrays or variables, whose modules have their paths as attributes."""
    model = nnx.clone(model, variables=not share)
    family = Family(provider, methods)
    for path, module in [*nnx.iter_modules(model)]:
        place: Any = module
        place.octavo_path = "/".join(map(str, path))
        if not isinstance(module, _CONTAINERS):
            place.__class__ = family.of(_original(module))[0]
    return model


def _arrays(inputs: Any) -> Any:
    """Inputs with zeros in place of `jax.ShapeDtypeStruct`s, which Flax does not take."""
    abstract = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if abstract(x) else x, inputs)


def _check_without_inputs(model: Any, provider: QuantizationProvider) -> None:
    """Raise if quantized parameters or state are missing, which only example inputs can determine."""
    variables = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)]
    reason = None
    held = any(is_stored(v.get_raw_value()) for v in variables)
    if provider.quantizes_params and not held and not stored_paths(model):
        reason = "quantized parameters have the granularity of the matmuls that use them"
    elif provider.stateful and not provider.overrides and not any(isinstance(v, QuantStat) for v in variables):
        reason = "static ranges and delayed scaling keep state for each matmul"
    if reason is not None:
        raise ValueError(
            f"{reason}, so the model has to be traced: quantize_model(model, provider, *example_inputs), where "
            "only the shapes of the inputs matter"
        )


def _original(module: Any) -> type:
    return getattr(type(module), "_octavo", (None, type(module)))[1]


def _path(module: Any) -> str:
    return module.octavo_path


def _entry(family: Family, name: str, method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        module, args, kwargs = family.provider.process_model_inputs(module, args, kwargs)
        return family.provider.process_model_output(name, _call(family, name, (module, *args), kwargs))

    return call


# One outermost call.


def _call(family: Family, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rngs = args[0].qwix_rngs
    key = rngs[family.provider.rng_stream]() if isinstance(rngs, nnx.Rngs) else None
    places = state_places((args, kwargs))
    state = {key: variable.get_value() for key, variable in places.items()}
    with nnx.update_context(_TAG):
        on_unmatched = unmatched_policy(name, family.provider, is_root=not _path(args[0]))
        call, graphdefs, codes = _module_call(family, name, args, kwargs, on_unmatched=on_unmatched)
        result, new = call.run(nest_state(state), key, updating(args, kwargs))
        if graphdefs[-1] is None:
            after, out = result
            _write((args, kwargs), after)
        else:
            after = nnx.from_flat_state(dict(nnx.to_flat_state(result)) | codes)
            with nnx.merge_context(_TAG, inner=False) as context:
                _, _, out = context.merge(graphdefs[-1], after)
    for place, variable in places.items():
        now = find_state(new, place)
        if now is not None and now is not state[place]:
            variable.set_value(now)
    return out


def _module_call(
    family: Family, name: str, args: Any, kwargs: Any, **options: Any
) -> tuple[ModuleCall, list[Any], dict[Any, Any]]:
    """The call; a list that is filled when it is traced: the new structure of arguments and result, or None if only
    values of variables have changed; and the variables of quantized parameters, by path.
    """
    with nnx.split_context(_TAG) as context:
        graphdef, split = context.split((args, kwargs))
    graphdefs: list[Any] = []
    flat = dict(nnx.to_flat_state(split))
    found = {path: x for path, x in stored_paths((args, kwargs)).items() if (*path, "array", "qvalue") in flat}
    codes = {path: v for path, v in flat.items() if path[:-2] in found}
    # Within the call, a quantized parameter is one array: the variables of its codes and scales only keep their place.
    places = {p: v.replace(jax.ShapeDtypeStruct((), v.get_raw_value().dtype)) for p, v in codes.items()}
    state = nnx.from_flat_state({path: v for path, v in flat.items() if path not in codes})

    def run(inputs: Any) -> Any:
        state, arrays = inputs
        with nnx.merge_context(_TAG, inner=True) as context:
            args, kwargs = context.merge(graphdef, nnx.from_flat_state(dict(nnx.to_flat_state(state)) | places))
        before = nnx.graphdef((args, kwargs))
        close = open_parameters((args, kwargs), dict(zip(found, arrays, strict=True)))
        kept = [(v, v.get_raw_value()) for path, v in nnx.iter_graph((args, kwargs)) if path in stored]
        _set_classes((args, kwargs), 1)
        out = family.provider.trace_model(name, getattr(args[0], name), *args[1:], **kwargs)
        for variable, value in kept:  # an inner Flax transformation returns unchanged values as new arrays
            variable.set_raw_value(value)
        close()
        _set_classes((args, kwargs, out), 0)
        if nnx.graphdef((args, kwargs)) == before and not _holds_nodes(out):
            graphdefs.append(None)
            return nnx.state((args, kwargs)), out
        with nnx.split_context(_TAG) as context:
            after, state = context.split((args, kwargs, out))
        graphdefs.append(after)
        return state

    run.__name__ = run.__qualname__ = f"{type(args[0]).__name__}.{name}"
    known = {path: name for path, name, _ in _parameters((args, kwargs))}
    leaves = [(_variable_path(p), x) for p, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_stored)]
    stored = {path for path, leaf in leaves if is_stored(leaf)}
    names = [known.get(path) for path in (*(path for path, _ in leaves), *found)]
    modules = [_path(node) for _, node in nnx.iter_graph((args, kwargs)) if is_member(node)]
    inputs = state, [x.unboxed() for x in found.values()]
    return ModuleCall(run, inputs, names, modules, family.provider, family.cache, **options), graphdefs, codes


def _set_classes(tree: Any, which: int) -> None:
    """Give every module the class for outside (0) or inside (1) of a call."""
    for _, node in list(nnx.iter_graph(tree)):
        if (member := getattr(type(node), "_octavo", None)) is not None:
            node.__class__ = member[0].of(member[1])[which]


def _variable_path(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path of a leaf's variable; the rest of the leaf's path is inside of the variable."""
    return tuple(p.key for p in itertools.takewhile(lambda p: isinstance(p, jax.tree_util.DictKey), path))


def _parameters(tree: Any) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
    """Every parameter: its path in the tree, its path from the root of the model, and its variable or `WithAux`."""
    nodes = list(nnx.iter_graph(tree))
    modules = {path: _path(node) for path, node in nodes if is_member(node)}
    codes = {path for path, node in nodes if isinstance(node, WithAux)}
    for path, node in nodes:
        held = isinstance(node, nnx.Variable) and is_stored(node.get_raw_value())
        if path in codes or held or (isinstance(node, nnx.Param) and path[:-2] not in codes):
            above = next((n for n in reversed(range(len(path))) if path[:n] in modules), None)
            inside = path[2:] if above is None else (modules[path[:above]], *path[above:])
            yield path, "/".join(str(part) for part in inside if part != ""), node


def _holds_nodes(tree: Any) -> bool:
    is_node = lambda x: isinstance(x, nnx.Pytree | nnx.Variable)  # noqa: E731
    return any(map(is_node, jax.tree.leaves(tree, is_leaf=is_node)))


def _write(tree: Any, after: Any) -> None:
    """Set variables to their new values. Unchanged ones are skipped: a model that is closed over must not change."""
    now = dict(nnx.to_flat_state(after))
    for path, variable in nnx.iter_graph(tree):
        if isinstance(variable, nnx.Variable):
            value = now[path].get_raw_value()
            if isinstance(value, jax.ShapeDtypeStruct):  # of a quantized parameter
                continue
            old, new = jax.tree.leaves(variable.get_raw_value()), jax.tree.leaves(value)
            if len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True)):
                variable.set_raw_value(value)


# State of the operations, and quantized parameters.


def _initialize(model: Any, name: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    family = type(model)._octavo[0]
    provider = family.provider
    with nnx.update_context(_TAG):
        call, *_ = _module_call(family, name, (model, *inputs), kwargs, on_unmatched="error")
        quantizers = call.stored_quantizers()
        rngs = model.qwix_rngs
        state = call.initial(rngs.params() if isinstance(rngs, nnx.Rngs) else None) if provider.stateful else {}
    modules = {_path(module): module for _, module in nnx.iter_modules(model)}
    for key, value in state.items():
        put(modules, key, value)
    stored: dict[int, WithAux] = {}
    for _, parameter, variable in list(_parameters(model)) if provider.quantizes_params else ():
        quantizer = quantizers.get(parameter)
        if quantizer is None or isinstance(variable, WithAux) or is_stored(value := variable.get_raw_value()):
            continue
        abstract = isinstance(value, jax.ShapeDtypeStruct)
        codes = jax.eval_shape(quantizer.quantize, value) if abstract else quantizer.quantize(value)
        stored[id(variable)] = stored_parameter(codes, quantizer, variable)
    map_attributes(model, lambda x: stored.get(id(x), x))
