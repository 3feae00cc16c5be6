"""Flax Linen models, quantized by a lifted transformation like `nn.remat`.

The quantized model is an instance of a subclass in which every public method is lifted through `octavo.quantized`.
Parameters, collections and PRNG streams are those of the float model.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen import transforms

from octavo._tree import unflatten_paths
from octavo.frameworks.linen_state import PARAMS, companions, host, leaf_names, plain, replace_leaf, static_scales
from octavo.frameworks.module_call import unmatched_policy
from octavo.frameworks.params import scale_params
from octavo.qarray import Quantizer
from octavo.transform import QuantizationProvider, Quantized, Site
from octavo.transform.frame import Key
from octavo.transform.provider import module_path, tracing
from octavo.transform.schedule import StageProvider, union_state
from octavo.transform.state import (
    GRADIENT_STATE,
    QUANT_STATS,
    find_state,
    flatten_state,
    keep_as_gradient,
    merge_state,
    nest_state,
    static_quantizers,
    static_scale,
)

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("octavo_linen", default=False)
_STREAM = "stochastic_rounding"


def quantize_linen(
    model: nn.Module, provider: QuantizationProvider, *, methods: Sequence[str] | None = None
) -> nn.Module:
    """Quantize a Linen model; `methods` are the methods to quantize, by default all public ones."""
    cls = type(model)
    names = _public_methods(cls) if methods is None else list(methods)
    for name in names:
        if not callable(getattr(cls, name, None)):
            raise ValueError(f"{cls.__name__} has no method {name!r}; it has {', '.join(_public_methods(cls))}")
    body: dict[str, Any] = {name: _quantized_method(getattr(cls, name), provider, name) for name in names}
    body |= {"apply": _apply(cls, provider)}
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    subclass = type(cls)(cls.__name__, (cls,), body)
    fields = {f.name: getattr(model, f.name) for f in cls.__dataclass_fields__.values() if f.init}
    return subclass(**fields)


def linen_sites(model: nn.Module, provider: QuantizationProvider, *args: Any, **kwargs: Any) -> list[Site]:
    """The matmuls of `model.apply(variables, *args)`, with variables as `model.init` makes them."""
    variables = jax.eval_shape(lambda args, kwargs: model.init(_streams(), *args, **kwargs), args, kwargs)
    return _whole(model, provider).sites(plain(variables), args, kwargs)


def linen_quantizers(
    model: nn.Module, provider: QuantizationProvider, variables: Any, *args: Any, **kwargs: Any
) -> dict[str, Quantizer]:
    """The quantizer of each parameter that is quantized, by path."""
    return _whole(model, provider, unmatched_policy("__call__", provider)).stored_quantizers(
        plain(variables), args, kwargs
    )


def linen_ranges(
    model: nn.Module, provider: QuantizationProvider, variables: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """The range by which training quantized each parameter, by path, where the variables remember it."""
    variables = plain(variables)
    return _whole(model, provider).stored_ranges(variables, variables, args, kwargs)


def _streams() -> dict[str, Any]:
    return {name: jax.random.key(0) for name in ("params", "dropout", _STREAM)}


def _whole(model: nn.Module, provider: QuantizationProvider, on_unmatched: str = "ignore") -> Quantized:
    """`model.apply` as a function of variables, arguments and keyword arguments."""

    def run(variables, args, kwargs):
        with _entered():
            return model.apply(variables, *args, **kwargs, rngs=_streams(), mutable=True)

    run.__name__ = root = type(model).__name__
    return Quantized(run, provider, None, on_unmatched, strict_paths=True, root=root, host=host, names=leaf_names)


@contextlib.contextmanager
def _entered() -> Iterator[None]:
    """Within this context methods run unchanged: the outermost call is already quantized."""
    token = _inside.set(True)
    try:
        with nn.intercept_methods(_in_module):
            yield
    finally:
        _inside.reset(token)


def _in_module(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
    """Run a method with the path of its module set for `get_current_rule`."""
    if context.module.scope is None:
        return method(*args, **kwargs)
    provider, token = tracing.get(), module_path.set("/".join(map(str, context.module.path)))
    try:
        if provider is not None:
            return provider.trace_method(context.module, context.method_name, method, args, kwargs)
        return method(*args, **kwargs)
    finally:
        module_path.reset(token)


def _public_methods(cls: type) -> list[str]:
    """The public methods that a class adds to `nn.Module`, and `__call__`."""
    names = []
    for name, value in inspect.getmembers(cls, inspect.isfunction):
        public = name == "__call__" or not (name.startswith("_") or hasattr(nn.Module, name))
        if public and name != "setup" and not isinstance(inspect.getattr_static(cls, name), staticmethod):
            names.append(value.__name__ if value.__name__ == name else name)
    return names


def _apply(cls: type, provider: QuantizationProvider) -> Callable[..., Any]:
    """`apply` that also quantizes a method given as a function of the module, such as `lambda m, x: m.encoder(x)`."""

    def apply(self, variables, *args, method=None, **kwargs):
        if callable(method) and getattr(cls, getattr(method, "__name__", ""), None) is None:
            method = _quantized_method(method, provider, getattr(method, "__name__", "__call__"))
        elif callable(method):
            method = method.__name__
        return cls.apply(self, variables, *args, method=method, **kwargs)  # pyrefly: ignore

    return apply


def _quantized_method(method: Callable[..., Any], provider: QuantizationProvider, name: str) -> Callable[..., Any]:
    """A method of a module, quantized when it is the outermost call of a bound module."""

    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _inside.get() or self.scope is None:
            return method(self, *args, **kwargs)
        module, args, kwargs = provider.process_model_inputs(self, args, kwargs)
        return provider.process_model_output(name, _Call(module, provider, name).run(method, tuple(args), kwargs))

    # Linen's compact and scope handling is that of the wrapped method.
    for mark in ("compact", "method_handler_wrapped", "nowrap"):
        call.__dict__.pop(mark, None)
    return nn.nowrap(call)


class _Call:
    """One outermost call of a quantized method."""

    def __init__(self, module: nn.Module, provider: QuantizationProvider, name: str):
        self.module, self.provider, self.name = module, provider, name
        self.prefix = "/".join(map(str, module.path))

    def run(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.module
        new: dict[str, Any] = {}

        def lifted(fn: Callable[..., Any]) -> Callable[..., Any]:
            def inner(scope_fn, repack_fn, variables, rngs, *args, **kwargs):
                def pure(variables, rngs, *args, **kwargs):
                    with _entered():
                        scope = scope_fn(variables, rngs)
                        run = functools.partial(fn, scope)
                        out = self.provider.trace_model(self.name, run, *args, **kwargs)
                        return out, repack_fn(scope)

                if module.is_initializing():
                    return self._init(pure, (variables, rngs, *args), kwargs, new)
                low = self._quantized(pure)
                # Of parameters, only those that the provider has added are state.
                used = {c: v for c, v in module.variables.items() if c != PARAMS or self.provider.overrides}
                state = {c: self._nest(plain(v)) for c, v in used.items()}
                stored = module.variables.get(PARAMS, {})
                state = merge_state(state, {QUANT_STATS: self._nest(static_scales(stored))})
                inputs = plain(variables), rngs, *args
                if getattr(self.provider, "creates_state", False):
                    state = merge_state(nest_state(low._initial(inputs, kwargs)), state)
                    state = merge_state(state, {PARAMS: self._nest(companions(stored))})
                out, after = low._run(low._trace(inputs, kwargs), state, self._key(), self._updates())
                new.update(after)
                return keep_as_gradient(out, self._unused(pure, inputs, kwargs, state))

            return lift.pack(inner, (True,), (True,), (True,), name="quantized", enable_kwargs=True)

        out = transforms.decorator_lift_transform(lifted, method)(module, *args, **kwargs)
        self._put(new)
        return out

    def _quantized(self, pure: Callable[..., Any], provider: QuantizationProvider | None = None) -> Quantized:
        provider = self.provider if provider is None else provider
        root = self.module.name or type(self.module).__name__
        names = functools.partial(leaf_names, prefix=self.prefix)
        pure.__name__ = f"{type(self.module).__name__}.{self.name}"
        on_unmatched = unmatched_policy(self.name, provider)
        return Quantized(pure, provider, None, on_unmatched, strict_paths=True, root=root, host=host, names=names)

    def _others(self) -> list[QuantizationProvider]:
        """The other stages of a schedule that keep state."""
        return [p for p in self.provider.others if p.stateful] if isinstance(self.provider, StageProvider) else []

    def _unused(self, pure: Callable[..., Any], args: Any, kwargs: Any, state: Mapping[str, Any]) -> Any:
        """The state of delayed scaling that only other stages use."""
        if not (others := self._others()) or GRADIENT_STATE not in state:
            return {}
        lows = [self._quantized(pure, p) for p in (self.provider, *others)]
        own, *rest = (low._discover(low._trace(args, kwargs))[1] for low in lows)
        keys = {key: None for known in rest for key in known if key.collection == GRADIENT_STATE and key not in own}
        return list(flatten_state(state, keys).values())

    def _nest(self, tree: Any) -> Any:
        """A tree nested under the path of the module."""
        return unflatten_paths({self.prefix: tree}) if self.prefix else tree

    def _key(self) -> Any:
        stream = self.provider.rng_stream
        return self.module.make_rng(stream) if self.module.has_rng(stream) else None

    def _updates(self) -> bool:
        frozen = isinstance(self.provider, StageProvider) and not self.provider.updates
        return self.module.is_mutable_collection(QUANT_STATS) and not frozen

    def _init(self, pure: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any], new: dict[str, Any]):
        """The output and the variables of an initialization; adds the initial state of the operations to `new`.

        A first pass makes the parameters in float. The second is quantized, with the same random numbers: rules match
        and its output is that of `apply`.
        """
        provider, (variables, rngs, *args) = self.provider, inputs
        counters: Any = self.module.scope.rng_counters  # pyrefly: ignore
        before, token = dict(counters), tracing.set(provider)
        try:
            _, made = pure(*inputs, **kwargs)
        finally:
            tracing.reset(token)
        counters.update(before)
        low = self._quantized(pure)
        given = _with_params(variables, made)
        inputs = (plain(given), rngs, *args)
        if provider.quantizes_params:
            made = _map_params(made, lambda tree: self._codes(tree, low.stored_quantizers(*inputs, **kwargs)))
        stateful = [p for p in (provider, *self._others()) if p.stateful]
        made_by = self.module.make_rng(PARAMS) if provider.overrides and self.module.has_rng(PARAMS) else None
        state = nest_state(union_state(self._quantized(pure, p)._initial(inputs, kwargs, made_by) for p in stateful))
        key = jax.random.key(0) if (key := self._key()) is None else key
        traced = low._trace((plain(_with_params(variables, made)), rngs, *args), kwargs)
        (out, _), after = low._run(traced, state, key, True)
        if provider.quantizes_params and QUANT_STATS in state:  # its ranges are fixed, as parameters
            found = static_quantizers(low.sites(*inputs, **kwargs))
            made = _map_params(made, lambda tree: self._with_scales(tree, found, after))
            del state[QUANT_STATS]
        new.update(state)
        return out, made

    def _put(self, state: Mapping[str, Any]) -> None:
        """Write state into the collections of this module and its submodules."""
        module = self.module
        for collection, tree in state.items():
            for part in self.prefix.split("/") if self.prefix else ():
                tree = tree.get(part, {})
            if not module.is_mutable_collection(collection):
                continue
            for name, value in tree.items():
                old = module.get_variable(collection, name, {})
                module.put_variable(collection, name, merge_state(old, value))

    def _with_scales(self, params: Any, found: Mapping[Key, tuple[Quantizer, str]], state: Mapping[str, Any]) -> Any:
        """The parameters of the module, and with them the scales of static ranges with these statistics."""
        for key, (quantizer, dtype) in found.items():
            scale = static_scale(quantizer, find_state(state, key), dtype)
            path = f"{key.path[len(self.prefix) :]}/{key.name}".strip("/")
            params = merge_state(params, unflatten_paths(scale_params(tuple(path.split("/")), quantizer, scale)))
        return params

    def _codes(self, params: Any, quantizers: Mapping[str, Any]) -> Any:
        """The parameters of the module, with those that have a quantizer quantized."""
        for path, quantizer in quantizers.items():
            params = replace_leaf(params, path[len(self.prefix) :].lstrip("/").split("/"), quantizer)
        return params


def _map_params(groups: Any, fn: Callable[[Any], Any]) -> Any:
    """Flax's groups of variables, with the parameters of the first scope replaced."""
    ((first, *scopes), *rest) = groups
    changed = {**first, PARAMS: fn(first[PARAMS])} if PARAMS in first else first
    return ((changed, *scopes), *rest)


def _with_params(groups: Any, made: Any) -> Any:
    """Flax's groups of variables with the parameters of other groups."""
    params = [{PARAMS: scope[PARAMS]} if PARAMS in scope else {} for scope in made[0]]
    first = tuple({**old, **new} for old, new in zip(groups[0], params, strict=True))
    return (first, *groups[1:])
