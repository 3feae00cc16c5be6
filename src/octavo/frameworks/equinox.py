"""Equinox models: the same pytree, whose methods are quantized when they are called."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from octavo._tree import path_str
from octavo.frameworks.module_call import ModuleCall, method_classes, public_methods, unmatched_policy
from octavo.frameworks.params import is_stored
from octavo.qarray import QArray, Quantizer
from octavo.transform.frame import Programs
from octavo.transform.provider import QuantizationProvider
from octavo.transform.site import Site


class Family:
    """The state that the modules of one quantized model share: the provider and their classes."""

    def __init__(self, provider: QuantizationProvider, methods: Collection[str]):
        self.provider, self.methods = provider, tuple(methods)
        self.cache = Programs()
        self.classes: dict[tuple[type, str], tuple[type, type]] = {}

    def of(self, cls: type, path: str) -> tuple[type, type]:
        """The classes of a module at one path for outside and inside of a call, see `method_classes`."""
        if (cls, path) not in self.classes:
            shared = {"_octavo": property(lambda _: (self, cls, path))}
            # A class without public methods, such as Equinox's own index, is kept.
            own = any(public_methods(cls, eqx.Module, self.methods))
            made = method_classes(cls, eqx.Module, self.methods, shared, _entry, lambda _: path) if own else (cls, cls)
            self.classes[cls, path] = made
        return self.classes[cls, path]


def quantize_equinox[M](
    model: M, provider: QuantizationProvider, *inputs: Any, methods: Collection[str] | None = None, **kwargs: Any
) -> M:
    """Quantize an Equinox model: the same fields, leaves and arrays, with quantized methods.

    Rules that keep state need a function that takes and returns it:
    `octavo.quantized(lambda model, x: model(x), rules)`.

    Args:
      model: The model. Every public method of the model and of its submodules is quantized.
      provider: The provider of the rules. A `PtqProvider` replaces the parameters that its rules quantize by QArrays.
      *inputs: Example inputs of the model (or of each of the `methods`), of which only the shapes matter; a
        `PtqProvider` needs them.
      methods: Private methods that are quantized, too.
      **kwargs: Example inputs by keyword.

    Returns:
      The quantized model.

    >>> import octavo
    >>> from octavo.transform import QtProvider
    >>> model = eqx.nn.Linear(4, 2, key=jax.random.key(0))
    >>> low = quantize_equinox(model, QtProvider(octavo.rules.QtRule(weight_qtype="int8", act_qtype="int8")))
    >>> jax.jit(lambda x: low(x))(jnp.ones(4)).shape, low.weight is model.weight
    ((2,), True)
    """
    if not isinstance(model, eqx.Module):
        raise TypeError(f"quantize_equinox takes an eqx.Module, got {type(model).__name__}")
    if provider.stateful and not provider.overrides:
        raise ValueError(
            "these rules keep state (static ranges or delayed scaling), which an Equinox module cannot hold: use "
            "q = octavo.quantized(lambda model, x: model(x), rules), then state = q.init(model, x) and "
            "out, state = q.stateful(state)(model, x)"
        )
    family = Family(provider, methods or ())
    result = _converted(model, family)
    if not provider.quantizes_params:
        return result
    if not inputs and not kwargs:
        raise ValueError(
            "quantized parameters have the granularity of the matmuls that use them, so the model has to be traced: "
            "quantize_model(model, provider, *example_inputs), where only the shapes of the inputs matter"
        )
    quantizers: dict[str, Quantizer] = {}
    for name in methods or ("__call__",):
        quantizers |= _module_call(name, (result, *inputs), kwargs, on_unmatched="error").stored_quantizers()
    return _quantize(result, quantizers)


def equinox_sites(model: eqx.Module, provider: QuantizationProvider, *args: Any, **kwargs: Any) -> list[Site]:
    """Every matmul of a model on arguments like these, with the rule that applies to it."""
    return _module_call("__call__", (_converted(model, Family(provider, ())), *args), kwargs).sites()


def _converted(model: Any, family: Family) -> Any:
    return _rebuild(model, lambda module, path: family.of(_original(module), path)[0])


def _original(module: Any) -> type:
    return module._octavo[1] if hasattr(module, "_octavo") else type(module)


def _quantize(model: Any, quantizers: dict[str, Quantizer]) -> Any:
    """A model whose named parameters are quantized."""

    def convert(path: tuple[Any, ...], leaf: Any) -> Any:
        quantizer = quantizers.get(path_str(path))
        if quantizer is None or isinstance(leaf, QArray):
            return leaf
        abstract = isinstance(leaf, jax.ShapeDtypeStruct)
        return jax.eval_shape(quantizer.quantize, leaf) if abstract else quantizer.quantize(leaf)

    return jax.tree_util.tree_map_with_path(convert, model, is_leaf=is_stored)


def _rebuild(tree: Any, class_of: Callable[[Any, str], type], path: tuple[str, ...] = ()) -> Any:
    """A tree with other classes for its modules; everything else is shared."""
    if not isinstance(tree, eqx.Module):
        convert = lambda keys, x: _rebuild(x, class_of, (*path, path_str(keys))) if _is_module(x) else x  # noqa: E731
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


def _with_classes(tree: Any, which: int) -> Any:
    """A tree whose quantized modules have the class for outside (0) or inside (1) of a call."""

    def class_of(module: Any, path: str) -> type:
        if not hasattr(module, "_octavo"):
            return type(module)
        family, cls, path = module._octavo
        return family.of(cls, path)[which]

    return _rebuild(tree, class_of)


def _entry(name: str, method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        provider = module._octavo[0].provider
        module, args, kwargs = provider.process_model_inputs(module, args, kwargs)
        on_unmatched = unmatched_policy(name, provider, is_root=not module._octavo[2])
        out, _ = _module_call(name, (module, *args), kwargs, on_unmatched=on_unmatched).run({}, None, True)
        return provider.process_model_output(name, out)

    return call


def _module_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> ModuleCall:
    family, _, _ = args[0]._octavo

    def run(tree: Any) -> Any:
        args, kwargs = _with_classes(tree, 1)
        return _with_classes(family.provider.trace_model(name, getattr(args[0], name), *args[1:], **kwargs), 0)

    run.__name__ = run.__qualname__ = f"{type(args[0]).__name__}.{name}"
    tree = args, kwargs
    return ModuleCall(run, tree, _names(tree), _paths(tree), family.provider, family.cache, **options)


def _names(tree: Any) -> list[str | None]:
    """The paths of parameters (floating-point leaves of quantized modules) from the root of the model."""
    names: list[str | None] = []
    for part in jax.tree.leaves(tree, is_leaf=lambda x: _is_module(x) or is_stored(x)):
        if not _is_module(part):
            names.append(None)
            continue
        root = part._octavo[2] if hasattr(part, "_octavo") else None
        for path, leaf in jax.tree_util.tree_leaves_with_path(part, is_leaf=is_stored):
            name = "/".join(filter(None, (root, path_str(path))))
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
