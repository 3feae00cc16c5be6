"""Calling a method of a module through the transformation, which takes and returns arrays only."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from octavo.frameworks.params import is_stored, unwrap
from octavo.qarray import Quantizer
from octavo.transform import QuantizationProvider, Quantized, Site
from octavo.transform.frame import Programs
from octavo.transform.jaxpr import FROM_ROOT
from octavo.transform.provider import module_path, tracing
from octavo.transform.state import GRADIENT_STATE, keep_as_gradient, unused_state


def unmatched_policy(name: str, provider: QuantizationProvider, *, is_root: bool = True) -> str:
    """What to do if no rule matches a call of this method: other methods of the model, and its submodules, may have all
    the matmuls that rules match, so only `__call__` of the model raises.
    """
    if not is_root or not provider.rules:
        return "ignore"
    return "error" if name == "__call__" else "warn"


class ModuleCall:
    """One quantized call of `fn(tree)`.

    Leaves of the tree may be quantized parameters; `fn` sees arrays in their place. Its result may hold anything: only
    arrays that it computes are outputs of the trace. Inputs that it passes on, and leaves other than arrays, are
    returned as they are.

    Args:
      fn: The method, as a function of one tree.
      tree: Its arguments.
      names: The name of each leaf that is a parameter, else None.
      modules: The paths of the modules in the tree; every matmul belongs to one of them.
      provider: The provider whose rules apply.
      cache: Traced programs, shared by the calls of one model.
      on_unmatched: What to do about rules that match nothing: "error", "warn" or "ignore".
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        tree: Any,
        names: Sequence[str | None],
        modules: Iterable[str],
        provider: QuantizationProvider,
        cache: Programs,
        on_unmatched: str = "ignore",
    ):
        self.fn, self.inputs = fn, unwrap(tree)
        self.leaves = jax.tree.leaves(tree, is_leaf=is_stored)
        self.passed: list[tuple[bool, Any]] = []
        self.out_tree: Any = None

        @functools.wraps(fn)
        def traced(tree: Any) -> list[Any]:
            return self._arrays(tree)

        self.quantized = Quantized(
            traced,
            provider,
            None,
            on_unmatched,
            strict_paths=True,
            modules=frozenset(_prefixes(modules)),
            names=lambda args, kwargs: list(names),
        )
        self.quantized._cache = cache

    def run(self, state: Mapping[str, Any], key: Any, update: bool | frozenset[str]) -> tuple[Any, dict[str, Any]]:
        """The result and the new state. State that the call does not use is its own gradient, so that it is kept."""
        arrays, new = self.quantized._run(self.quantized._trace((self.inputs,), {}), state, key, update)
        computed = iter(
            keep_as_gradient(arrays, unused_state(state.get(GRADIENT_STATE, {}), new.get(GRADIENT_STATE, {})))
        )
        leaves = [leaf if passed else next(computed) for passed, leaf in self.passed]
        return jax.tree.unflatten(self.out_tree, leaves), new

    def initial(self, key: Any = None) -> dict[Any, Any]:
        """The initial state of the operations, by key; `key` is a PRNG key for random state."""
        return self.quantized._initial((self.inputs,), {}, key)

    def stored_quantizers(self) -> dict[str, Quantizer]:
        """The quantizer of each parameter that a rule quantizes."""
        return self.quantized.stored_quantizers(self.inputs)

    def sites(self) -> list[Site]:
        """Every matmul of the call."""
        return self.quantized.sites(self.inputs)

    def _arrays(self, tree: Any) -> list[Any]:
        given = {id(x): i for i, x in enumerate(jax.tree.leaves(tree)) if isinstance(x, jax.core.Tracer)}
        token = module_path.set("")
        try:
            leaves, self.out_tree = jax.tree.flatten(self.fn(tree))
        finally:
            module_path.reset(token)
        self.passed, computed = [], []
        for leaf in leaves:
            if id(leaf) in given:
                self.passed.append((True, self.leaves[given[id(leaf)]]))
            elif isinstance(leaf, jax.Array | np.ndarray):
                self.passed.append((False, None))
                computed.append(leaf)
            else:
                self.passed.append((True, leaf))
        return computed


def _prefixes(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        parts = path.split("/")
        yield from ("/".join(parts[: i + 1]) for i in range(len(parts)))


@contextlib.contextmanager
def module_scope(path: str) -> Iterator[None]:
    """A named scope for the path of a module, relative to the scopes around it."""
    here = module_path.get()
    if not here or f"{path}/".startswith(f"{here}/"):
        name = path[len(here) :].removeprefix("/")
    else:
        name = f"{FROM_ROOT}/{path}".removesuffix("/")
    token = module_path.set(path)
    try:
        with jax.named_scope(name) if name else contextlib.nullcontext():
            yield
    finally:
        module_path.reset(token)


def scoped(method: Callable[..., Any], path_of: Callable[[Any], str]) -> Callable[..., Any]:
    """A method that runs in the named scope of its module."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with module_scope(path_of(args[0])):
            if (provider := tracing.get()) is None:
                return method(*args, **kwargs)
            bound = functools.partial(method, args[0])
            return provider.trace_method(args[0], getattr(method, "__name__", ""), bound, args[1:], kwargs)

    return run


def method_classes(
    cls: type,
    base: type,
    named: Collection[str],
    shared: Mapping[str, Any],
    entry: Callable[[str, Any], Any],
    path_of: Callable[[Any], str],
) -> tuple[type, type]:
    """Two subclasses of a module's class: one whose methods are quantized when they are called, by `entry`, and one
    for within such a call, whose methods only enter a named scope. As different classes, they never share a compiled
    function of a framework or of JAX.
    """
    kind: Any = type(cls)
    methods = dict(public_methods(cls, base, named))
    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, **shared}
    outer = {name: entry(name, method) for name, method in methods.items()}
    inner = {name: scoped(method, path_of) for name, method in methods.items()}
    return kind(cls.__name__, (cls,), same | outer), kind(cls.__name__, (cls,), same | inner)


def public_methods(cls: type, base: type, named: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The public methods that a class adds to a framework's base class, and the private ones in `named`."""
    for name in dir(cls):
        public = name == "__call__" or not (name.startswith("_") or hasattr(base, name))
        method = inspect.getattr_static(cls, name)
        # A method that a framework has wrapped, for example by its jit, is not a function but can be bound like one.
        bound = callable(method) and hasattr(method, "__get__") and not isinstance(method, type)
        if (public or name in named) and bound and not isinstance(method, staticmethod | classmethod):
            yield name, method
