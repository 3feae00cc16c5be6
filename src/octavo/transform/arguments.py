"""Which leaves of the arguments are weights, and their names."""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from octavo.qarray import QArray, is_qarray

PARAMETERS = (
    "params",
    "param",
    "parameters",
    "variables",
    "weights",
    "model",
    "module",
    "net",
    "network",
    "theta",
    "self",
)
"""Arguments with these names hold weights."""

type Weights = str | int | Sequence[str | int] | Callable[[str, Any], bool] | None


def key_name(entry: Any) -> str:
    """The name of one key of a pytree path."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """The names of positional arguments, from the signature where there is one."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}{i}" for i in range(count)]
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return (names + [f"arg{i}" for i in range(len(names), count)])[:count]


def leaf_paths(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, ...]]:
    """The path of every leaf of (args, kwargs), which begins with the name of its argument."""
    names = argument_names(fn, len(args))
    paths = []
    for path, _ in jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=is_qarray):
        parts = [key_name(entry) for entry in path[1:]]
        if key_name(path[0]) == "0":
            parts[0] = names[int(parts[0])]
        paths.append(tuple(parts))
    return paths


def weight_names(paths: Sequence[tuple[str, ...]], leaves: Sequence[Any], weights: Weights, args: Sequence[str]):
    """The name of each leaf that is a weight; None for the others.

    In an argument with a "params" collection only the leaves of that collection are weights, not batch statistics or
    optimizer state, and their names begin below it.
    """
    chosen = _chooser(weights, args)
    collections = {path[0] for path in paths if "params" in path[1:3]}
    names: list[str | None] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if not hasattr(leaf, "shape"):
            names.append(None)
            continue
        inside = path[: _params_at(path) + 1] if path[0] in collections else path[:1]
        own = path[len(inside) :]
        own = own[:-1] if own[-1:] in (("value",), ("raw_value",)) else own  # the content of boxes and NNX variables
        name = "/".join(own) or path[0]
        if chosen is not None:
            is_weight = chosen(path, name, leaf)
        elif path[0] in collections:
            is_weight = "params" in path[1:3]
        else:
            is_weight = path[0] in PARAMETERS or isinstance(leaf, QArray)
        names.append(name if is_weight else None)
    return names


def _params_at(path: tuple[str, ...]) -> int:
    return path.index("params", 1) if "params" in path[1:3] else 0


def _chooser(weights: Weights, args: Sequence[str]) -> Callable[[tuple[str, ...], str, Any], bool] | None:
    if weights is None:
        return None
    if callable(weights):
        return lambda path, name, leaf: bool(weights(name, leaf))
    given = [weights] if isinstance(weights, str | int) else list(weights)
    wanted = set()
    for argument in given:
        if isinstance(argument, int):
            if not -len(args) <= argument < len(args):
                raise ValueError(f"weights={argument} names no argument: there are {len(args)}")
            argument = args[argument]
        wanted.add(argument)
    return lambda path, name, leaf: path[0] in wanted


_STEP = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[(\d+)\]|\.?(\w+)")


def weights_of_arguments(arguments: Iterable[str], weights: Iterable[str]) -> dict[str, str]:
    """Which arguments of a compiled program are which weights, by name.

    All weights are below one argument, such as `state.params`: that with the most matches, so that the end of another
    name is not taken for a weight. The arrays of a QArray belong to one weight.

    >>> weights_of_arguments(["state.params['up']['w']", "state.params['down'].qvalue", "rows"], ["up/w", "down"])
    {"state.params['up']['w']": 'up/w', "state.params['down'].qvalue": 'down'}
    """
    wanted = {tuple(weight.split("/")): weight for weight in weights}
    roots: dict[tuple[str, ...], dict[str, str]] = {}
    for argument in arguments:
        steps = tuple("/".join(map("".join, _STEP.findall(argument))).split("/"))
        for path in (steps, steps[:-1]):
            for begin in range(len(path)):
                if path[begin:] in wanted:
                    roots.setdefault(path[:begin], {})[argument] = wanted[path[begin:]]
    return max(roots.values(), key=len, default={})
