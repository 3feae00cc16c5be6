"""Parameters of NNX modules as nested dictionaries of arrays."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from octavo._tree import flatten_paths
from octavo._typing import Array, PRNGKeyArray

type Params = dict[str, Any]
type Shapes = Mapping[str, tuple[int, ...]]


def init_module(cls: Callable[..., nnx.Module], config: Any, key: PRNGKeyArray) -> Params:
    """Random parameters of `cls(config)`."""
    return nnx.to_pure_dict(nnx.state(cls(config, rngs=nnx.Rngs(key)), nnx.Param))


@functools.lru_cache(maxsize=64)
def module_graph(cls: Callable[..., nnx.Module], config: Any) -> tuple[Any, Shapes]:
    """The graph of `cls(config)`, to be merged with parameters, and the shape of each parameter by its path."""
    graph, state = nnx.split(nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0))))
    return graph, param_shapes(nnx.to_pure_dict(state))


def bind[M: nnx.Module](cls: Callable[..., M], config: Any, params: Params, hint: str = "") -> M:
    """The module `cls(config)` with these parameters: see `check_shapes`."""
    graph, wanted = module_graph(cls, config)
    check_shapes(param_shapes(params), wanted, hint)
    return nnx.merge(graph, nnx.State(params))


def check_shapes(given: Shapes, wanted: Shapes, hint: str = "") -> None:
    """Raise unless parameters have the names and shapes of those of a config; a wrong name's error ends with `hint`."""
    missing = [name for name in wanted if name not in given]
    extra = [name for name in given if name not in wanted]
    if missing or extra:
        text = "; ".join(f"{what} {names[0]!r}" for what, names in (("no", missing), ("an unexpected", extra)) if names)
        raise ValueError(f"the parameters are not those of this config: there is {text}{hint}")
    for name, shape in wanted.items():
        if given[name] != shape:
            raise ValueError(f"the parameter {name!r} has the shape {given[name]}, but the config makes it {shape}")


def param_shapes(params: Params) -> Shapes:
    """The shape of each parameter by its path."""
    return {path: tuple(leaf.shape) for path, leaf in flatten_paths(params).items()}


def check_token_arrays(arrays: Mapping[str, Array]) -> None:
    """Raise unless arrays are integers of one shape `[batch, length]`, that of `arrays["tokens"]`."""
    for name, x in arrays.items():
        if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} are integers of shape [batch, length], got {x.dtype} of shape {x.shape}")
        if x.shape != arrays["tokens"].shape:
            raise ValueError(f"{name} have the shape of tokens, {arrays['tokens'].shape}, got {x.shape}")


def abstract_module(cls: Callable[..., nnx.Module], config: Any) -> Params:
    """Shapes and dtypes of the parameters."""
    return jax.eval_shape(functools.partial(init_module, cls, config), jax.random.key(0))
