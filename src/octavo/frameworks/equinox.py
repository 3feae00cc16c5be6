"""Equinox models in low precision: the same pytree, whose methods are rewritten as they are called."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from octavo.frameworks.module_call import ModuleCall, public_methods, scoped
from octavo.frameworks.params import is_stored
from octavo.qarray import QArray, Quantizer
from octavo.transform.arguments import key_name
from octavo.transform.provider import QuantizationProvider
from octavo.transform.site import Site


class Family:
    """What the modules of one quantized model have in common: the provider, and their classes."""

    def __init__(self, provider: QuantizationProvider, methods: Collection[str]):
        self.provider, self.methods = provider, tuple(methods)
        self.cache: dict[Any, Any] = {}
        self.classes: dict[tuple[type, str], tuple[type, type]] = {}

    def of(self, cls: type, path: str) -> tuple[type, type]:
        """Two subclasses of a module's class for one place in the model: one whose methods are rewritten when they are
        called, and one for within such a call, whose methods only say where they are.
        """
        if (cls, path) not in self.classes:
            same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            methods = dict(public_methods(cls, eqx.Module, self.methods))
            shared = {**same, "_octavo": property(lambda _: (self, cls, path))}
            outer = {name: _entry(name, method) for name, method in methods.items()}
            inner = {name: scoped(method, lambda _: path) for name, method in methods.items()}
            # What has nothing to call, such as an index of Equinox's own, stays what it is.
            made = [type(cls)(cls.__name__, (cls,), shared | own) if own else cls for own in (outer, inner)]
            self.classes[cls, path] = made[0], made[1]
        return self.classes[cls, path]


def quantize_equinox[M](
    model: M, provider: QuantizationProvider, *inputs: Any, methods: Collection[str] | None = None, **kwargs: Any
) -> M:
    """An Equinox model that computes as the provider's rules say: the same fields, leaves and arrays.

    Every public method of the model and of its submodules is quantized, and so are private ones that `methods` names.
    A PtqProvider replaces the parameters that its rules quantize by QArrays; for that it needs `inputs`, what the model
    is called with (or each of the `methods`), of which only the shapes matter. Rules with state need a function
    that takes and gives it, which a module is not: `octavo.quantized(lambda model, x: model(x), rules)`.

    >>> import octavo
    >>> from octavo.transform import QtProvider
    >>> model = eqx.nn.Linear(4, 2, key=jax.random.key(0))
    >>> low = quantize_equinox(model, QtProvider(octavo.rules.QtRule(weight_qtype="int8", act_qtype="int8")))
    >>> low(jnp.ones(4)).shape, low.weight is model.weight
    ((2,), True)
    """
    if not isinstance(model, eqx.Module):
        raise TypeError(f"quantize_equinox takes an eqx.Module, got {type(model).__name__}")
    if provider.stateful and not provider.overrides:
        raise ValueError(
            "these rules keep state (static ranges or delayed scaling), which an Equinox module has no place for: use "
            "q = octavo.quantized(lambda model, x: model(x), rules), then state = q.init(model, x) and "
            "out, state = q.stateful(state)(model, x)"
        )
    family = Family(provider, methods or ())
    result = _converted(model, family)
    if not provider.quantizes_params:
        return result
    if not inputs and not kwargs:
        raise ValueError(
            "low-precision parameters are laid out for the products that use them, so the model has to be seen "
            "running: quantize_model(model, provider, *example_inputs), where only the shapes of the inputs matter"
        )
    quantizers: dict[str, Quantizer] = {}
    for name in methods or ("__call__",):
        quantizers |= _module_call(name, (result, *inputs), kwargs, on_unmatched="error").stored_quantizers()
    return _quantize(result, quantizers)


def equinox_sites(model: eqx.Module, provider: QuantizationProvider, *args: Any, **kwargs: Any) -> list[Site]:
    """Every multiplication of a model called with arguments like these, and what the rules decide about it."""
    return _module_call("__call__", (_converted(model, Family(provider, ())), *args), kwargs).sites()


def _converted(model: Any, family: Family) -> Any:
    return _rebuild(model, lambda module, path: family.of(_original(module), path)[0])


def _original(module: Any) -> type:
    return module._octavo[1] if hasattr(module, "_octavo") else type(module)


def _quantize(model: Any, quantizers: dict[str, Quantizer]) -> Any:
    """A model with the named parameters in low precision."""

    def convert(path: tuple[Any, ...], leaf: Any) -> Any:
        how = quantizers.get("/".join(map(key_name, path)))
        if how is None or isinstance(leaf, QArray):
            return leaf
        return jax.eval_shape(how.quantize, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else how.quantize(leaf)

    return jax.tree_util.tree_map_with_path(convert, model, is_leaf=is_stored)


def _rebuild(tree: Any, class_of: Callable[[Any, str], type], path: tuple[str, ...] = ()) -> Any:
    """A tree with other classes for its modules; everything else is shared."""
    if not isinstance(tree, eqx.Module):
        convert = lambda keys, x: _rebuild(x, class_of, (*path, *map(key_name, keys))) if _is_module(x) else x  # noqa: E731
        return jax.tree_util.tree_map_with_path(convert, tree, is_leaf=lambda x: _is_module(x) or is_stored(x))
    made = object.__new__(class_of(tree, "/".join(path)))
    for field in dataclasses.fields(tree):  # pyrefly: ignore
        if field.name in vars(tree):
            value = vars(tree)[field.name]
            static = field.metadata.get("static", False)
            object.__setattr__(made, field.name, value if static else _rebuild(value, class_of, (*path, field.name)))
    return made


def _is_module(x: Any) -> bool:
    return isinstance(x, eqx.Module)


def _turned(tree: Any, which: int) -> Any:
    """A tree whose quantized modules have the class for outside (0) or for inside (1) of a call."""

    def class_of(module: Any, path: str) -> type:
        if not hasattr(module, "_octavo"):
            return type(module)
        family, cls, path = module._octavo
        return family.of(cls, path)[which]

    return _rebuild(tree, class_of)


def _entry(name: str, method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _module_call(name, args, kwargs).run({}, None, True)[0]

    return call


def _module_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> ModuleCall:
    family, _, _ = args[0]._octavo

    def run(tree: Any) -> Any:
        args, kwargs = _turned(tree, 1)
        return _turned(getattr(args[0], name)(*args[1:], **kwargs), 0)

    run.__name__ = run.__qualname__ = f"{type(args[0]).__name__}.{name}"
    tree = args, kwargs
    return ModuleCall(run, tree, _names(tree), _paths(tree), family.provider, family.cache, **options)


def _names(tree: Any) -> list[str | None]:
    """The names of parameters: floating-point leaves of quantized modules, from the root of the model."""
    names: list[str | None] = []
    for part in jax.tree.leaves(tree, is_leaf=lambda x: _is_module(x) or is_stored(x)):
        if not _is_module(part):
            names.append(None)
            continue
        root = part._octavo[2] if hasattr(part, "_octavo") else None
        for path, leaf in jax.tree_util.tree_leaves_with_path(part, is_leaf=is_stored):
            name = "/".join([*([root] if root else []), *map(key_name, path)])
            names.append(name if root is not None and _is_weight(leaf) else None)
    return names


def _paths(tree: Any) -> list[str]:
    """The paths of all quantized modules."""
    found: list[str] = []

    def note(module: Any, path: str) -> type:
        found.extend([module._octavo[2]] if hasattr(module, "_octavo") else [])
        return type(module)

    _rebuild(tree, note)
    return found


def _is_weight(leaf: Any) -> bool:
    return is_stored(leaf) or (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating))
