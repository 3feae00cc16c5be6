"""Parameters of NNX modules as nested dictionaries of arrays."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from octavo._tree import flatten_paths
from octavo._typing import PRNGKeyArray

type Params = dict[str, Any]
type Shapes = Mapping[str, tuple[int, ...]]


def init_module(cls: Callable[..., nnx.Module], config: Any, key: PRNGKeyArray) -> Params:
    """Random parameters of `cls(config)`."""
    return nnx.to_pure_dict(nnx.state(cls(config, rngs=nnx.Rngs(key)), nnx.Param))


@functools.lru_cache(maxsize=64)
def module_graph(cls: Callable[..., nnx.Module], config: Any) -> tuple[Any, Shapes]:
    """The graph of `cls(config)`, to be merged with parameters, and the shape of each parameter by its path."""
    graph, state = nnx.split(nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0))))
    return graph, _shapes(nnx.to_pure_dict(state))


def bind[M: nnx.Module](cls: Callable[..., M], config: Any, params: Params, hint: str = "") -> M:
    """The module `cls(config)` with these parameters, whose names and shapes are checked; errors end with `hint`."""
    graph, wanted = module_graph(cls, config)
    given = _shapes(params)
    if given != wanted:
        raise ValueError(_difference(given, wanted, hint))
    return nnx.merge(graph, nnx.State(params))


def _difference(given: Shapes, wanted: Shapes, hint: str) -> str:
    missing = [name for name in wanted if name not in given]
    extra = [name for name in given if name not in wanted]
    if missing or extra:
        text = "; ".join(f"{what} {names[0]!r}" for what, names in (("no", missing), ("an unexpected", extra)) if names)
        return f"the parameters are not those of this config: there is {text}{hint}"
    name = next(name for name in wanted if given[name] != wanted[name])
    return f"the parameter {name!r} has the shape {given[name]}, but the config makes it {wanted[name]}"


def _shapes(params: Params) -> Shapes:
    return {path: tuple(leaf.shape) for path, leaf in flatten_paths(params).items()}


def abstract_module(cls: Callable[..., nnx.Module], config: Any) -> Params:
    """Shapes and dtypes of the parameters."""
    return jax.eval_shape(functools.partial(init_module, cls, config), jax.random.key(0))
