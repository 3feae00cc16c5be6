"""The context of an evaluation: rules, names, counters and state."""

import contextvars
import dataclasses
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from octavo._typing import PRNGKeyArray
from octavo.transform.site import Site
from octavo.transform.weights import Origin


class Programs(weakref.WeakKeyDictionary[Any, dict[Any, Any]]):
    """The jitted forms of nested jits by their bodies; a copy or a pickle is empty.

    A function that makes a jit in each call has a new body each time, so that bodies must not be kept.
    """

    def __reduce__(self) -> tuple[type["Programs"], tuple[()]]:
        return Programs, ()

    def __deepcopy__(self, memo: Any) -> "Programs":
        return Programs()


class Value(NamedTuple):
    """An array or QArray during evaluation, and its origin."""

    data: Any
    origin: Origin


class Key(NamedTuple):
    """The key of a piece of state: its collection, the path of its module, and its name there."""

    collection: str
    path: str
    name: str

    @property
    def parts(self) -> tuple[str, ...]:
        """Its path in nested dictionaries of state."""
        return (self.collection, *filter(None, self.path.split("/")), self.name)


class Operation(NamedTuple):
    """The operation that a method of a provider replaces."""

    site: Site
    frame: "Frame"


current_operation: contextvars.ContextVar[Operation | None] = contextvars.ContextVar("octavo_operation", default=None)

type Host = Callable[["Frame", Site, Callable[[], Any]], Any]
"""Runs an overridden operation where a framework keeps state for it."""


@dataclasses.dataclass
class Context:
    """What is the same for all frames of one call."""

    provider: Any
    """The `QuantizationProvider`."""
    evaluate: Callable[[Any, list[Value], "Frame"], list[Value]]
    """Evaluates a jaxpr, and the bodies of loops and calls."""
    strict_paths: bool = False
    """Whether rules match the path of a module only, and not the name of a weight."""
    root: str | None = None
    """The outermost scope, if it is the name of the model."""
    modules: frozenset[str] | None = None
    """The paths of all modules, if known; other scopes are ignored then."""
    init: bool = False
    """Whether state is being initialized."""
    update: bool | frozenset[str] = True
    """Whether statistics are updated; a set names the modules in which they are frozen."""
    host: Host | None = None
    shardings: Mapping[str | None, Any] = dataclasses.field(default_factory=dict)
    """The shardings of weights by name, as far as they are known."""
    dtypes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The dtypes of parameters by name."""
    sites: dict[Any, Site] = dataclasses.field(default_factory=dict)
    residuals: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """What the operations between matmuls store for their gradients, by segment, once it is differentiated."""
    cache: Programs = dataclasses.field(default_factory=Programs)

    def updates(self, path: str) -> bool:
        """Whether the statistics of a module are updated."""
        if isinstance(self.update, bool):
            return self.update
        return not any(f"{path}/".startswith(f"{frozen}/") for frozen in self.update)


@dataclasses.dataclass
class Frame:
    """One jaxpr under evaluation."""

    context: Context
    scope: str = ""
    counters: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """The number of operations of each kind in each module so far, by which operations are named."""
    state: Mapping[Key, Any] = dataclasses.field(default_factory=dict)
    key: PRNGKeyArray | None = None
    manual_axes: tuple[str, ...] = ()
    trips: int = 1
    opaque: str | None = None
    """Why the matmuls of an opaque call stay in float, while they are only listed."""
    new: dict[Key, Any] = dataclasses.field(default_factory=dict)

    def inner(self, scope: str, **changes: Any) -> "Frame":
        """The frame of a body within this scope."""
        joined = "/".join(s for s in (self.scope, scope) if s)
        return dataclasses.replace(self, scope=joined, **{"new": {}, **changes})

    def key_of(self, *names: str) -> PRNGKeyArray | None:
        """The random key of one operation."""
        return None if self.key is None else jax.random.fold_in(self.key, zlib.crc32("/".join(names).encode()))

    def read(self, key: Key, init: Callable[[], Any]) -> Any:
        """A piece of state as last written, or its initial value while state is being initialized."""
        if key in self.new:
            return self.new[key]
        if self.context.init:
            self.new[key] = init()
            return self.new[key]
        if key not in self.state:
            raise ValueError(
                f"there is no state {key.name!r} for the module {key.path!r} ({key.collection}): it was initialized "
                "with other rules, inputs or another model. Initialize it again with the rules that are used now"
            )
        return self.state[key]

    def write(self, key: Key, value: Any) -> None:
        """Replace a piece of state."""
        self.new[key] = value
