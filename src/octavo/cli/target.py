"""The target of `octavo plan` and `octavo verify`, its inputs and its rules, from the command line."""

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import octavo
from octavo._names import unknown_name
from octavo._text import format_table
from octavo.frameworks.model import framework_of
from octavo.rules import QuantizationRule, as_rules, get_recipe, recipes
from octavo.transform.api import argument_names

EXAMPLES = "example_inputs"
"""The attribute of a target's module with default inputs."""

_SHAPE = re.compile(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]")
_SHORT = {"f": "float", "bf": "bfloat", "i": "int", "s": "int", "u": "uint"}


class UsageError(Exception):
    """An error in the command line; the message is for the user."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A function or a model, by the name that it has on the command line."""

    name: str
    value: Any
    framework: str | None
    module: types.ModuleType


@dataclasses.dataclass(frozen=True)
class TargetCall:
    """A target with its inputs, which of them holds the weights, and rules, if any."""

    target: Target
    rules: tuple[QuantizationRule, ...] | None
    inputs: tuple[Any, ...]
    weights: str | int | None


def run_on_target(
    command: Callable[[TargetCall, argparse.Namespace], int],
    args: argparse.Namespace,
    *,
    needs_rules: str | None = None,
) -> int:
    """Run a command on the target of the command line; a `UsageError` is a line on stderr.

    Args:
      command: Takes the target call and the arguments, and returns the exit status.
      args: The parsed arguments. With `--rules list` the recipes are printed instead.
      needs_rules: If the command needs rules, the end of the error message for missing rules.

    Returns:
      The exit status, 2 after a `UsageError`.
    """
    try:
        with _on_sys_path(os.getcwd()), _warnings_as_lines():
            if args.rules == "list":
                return print_recipes()
            return command(_target_call(args, needs_rules), args)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2


def _target_call(args: argparse.Namespace, needs_rules: str | None) -> TargetCall:
    target = find_target(args.target, args.weights)
    if args.rules is None and needs_rules is not None:
        raise UsageError(f"--rules is missing: a recipe's name or a file; {needs_rules}")
    rules = None if args.rules is None else find_rules(args.rules)
    inputs = find_inputs(target, args.inputs)
    return TargetCall(target, rules, inputs, find_weights(target, inputs, args.weights))


def print_recipes() -> int:
    """Print all recipes with their summaries."""
    print("\n".join(format_table([(name, get_recipe(name).summary) for name in recipes(aliases=True)])))
    return 0


# Targets.


def find_target(name: str | None, weights: str | None = None) -> Target:
    """The function or model that `module:attribute` names, called if it is a class or factory without arguments."""
    if name is None:
        raise UsageError("TARGET is missing: module:function, or module:attribute for a model")
    value, module = _find(name, "TARGET")
    if framework_of(value) is None and _needs_no_arguments(value):
        with usage_errors(f"{name} was called for the model that it makes, and failed: "):
            made = value()
        value = value if framework_of(made) is None and not isinstance(value, type) else made
    if isinstance(value, type):
        raise UsageError(f"{name} is a class that needs arguments: name a function without any that makes the model")
    if not callable(value) and framework_of(value) is None:
        raise UsageError(
            f"{name} is neither a function nor a model of Flax or Equinox but of type {type(value).__name__}"
        )
    if weights is not None and framework_of(value) is not None:
        raise UsageError(f"--weights is for functions: the weights of the model {name} are its parameters")
    return Target(name, value, framework_of(value), module)


def _find(name: str, what: str) -> tuple[Any, types.ModuleType]:
    """The attribute that `module:attribute` names, and its module."""
    path, colon, attributes = name.partition(":")
    if not (path and colon and attributes):
        raise UsageError(f"{what} is module:function, got {name!r}")
    module = value = _import(path, attributes)
    parent = path
    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            known = [n for n in dir(value) if not n.startswith("_") and callable(getattr(value, n, None))]
            raise UsageError(f"{parent} has no attribute {attribute!r}: {unknown_name(attribute, known)}")
        value, parent = getattr(value, attribute), f"{parent}.{attribute}"
    return value, module


def _import(path: str, attributes: str) -> types.ModuleType:
    try:
        return importlib.import_module(path)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{path}.".startswith(f"{error.name}."):
            dotted = path.removesuffix(".py").strip("./").replace("/", ".")
            hint = f"; did you mean {f'{dotted}:{attributes}'!r}?" if dotted != path else ""
            place = f"in {os.getcwd()} or among the installed packages"
            raise UsageError(f"there is no module {path!r} {place}{hint}") from None
        raise UsageError(
            f"{path} cannot be imported: {type(error).__name__}: {_line(error)}{_user_line(error)}"
        ) from error


def _needs_no_arguments(value: Any) -> bool:
    """Whether a class or function can be called without arguments."""
    if not isinstance(value, type | types.FunctionType):
        return False
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return False
    return all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in parameters)


# Inputs and rules.


def find_inputs(target: Target, words: Sequence[str] | None) -> tuple[Any, ...]:
    """The arguments of a target: from a callable, from shapes, or from its module's example_inputs."""
    if words is None:
        name = f"{EXAMPLES} of {target.module.__name__}"
        given = getattr(target.module, EXAMPLES, None)
        if given is None:
            raise UsageError(
                f"the inputs of {target.name} are unknown: give --inputs, as shapes such as 'f32[8,128]' or as "
                f"module:callable, or define {EXAMPLES} in {target.module.__name__}"
            )
    elif len(words) == 1 and ":" in words[0]:
        name, given = words[0], _find(words[0], "--inputs")[0]
    else:
        return tuple(read_shape(shape) for word in words for shape in word.split())
    if callable(given):
        with usage_errors(f"{name} failed: "):
            given = given()
    if not isinstance(given, tuple | list):
        raise UsageError(f"{name} gives {type(given).__name__}, not the tuple of arguments")
    return tuple(given)


def read_shape(text: str) -> jax.ShapeDtypeStruct:
    """The shape and dtype in a text such as f32[8,128].

    >>> read_shape("bf16[8,128]")
    ShapeDtypeStruct(shape=(8, 128), dtype=bfloat16)
    """
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--inputs: {text!r} is no shape: a type and sizes such as 'f32[8,128]', or 'i32[]' for a scalar"
        )
    name = re.sub(r"^(bf|[fisu])(\d+)$", lambda short: _SHORT[short[1]] + short[2], match[1])
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        raise UsageError(
            f"--inputs: {text!r} has the unknown type {match[1]!r}: f32, bf16, i32, u8, bool and so on"
        ) from None
    return jax.ShapeDtypeStruct(tuple(map(int, match[2].split(","))) if match[2] else (), dtype)


def find_rules(text: str) -> tuple[QuantizationRule, ...]:
    """The rules of a recipe or of a file."""
    is_file = "." in text or os.sep in text
    try:
        return as_rules(Path(text) if is_file else text)
    except OSError as error:
        raise UsageError(f"--rules: {text}: {error.strerror}") from None
    except Exception as error:  # YAML's errors have a class of their own.
        prefix = f"{text}: " if is_file and text not in str(error) else ""
        raise UsageError(f"--rules: {prefix}{' '.join(str(error).split())}") from error


def find_weights(target: Target, inputs: Sequence[Any], text: str | None) -> str | int | None:
    """The argument that holds the weights, by its name or number; None if the command line does not say."""
    names = argument_names(target.value, len(inputs)) if target.framework is None else []
    weights = int(text) if text is not None and text.isdigit() else text
    if weights is None or weights in names or (isinstance(weights, int) and weights < len(inputs)):
        return weights
    raise UsageError(f"--weights: {target.name} has no argument {text!r}; it has {', '.join(names)}")


# Errors and warnings.


@contextlib.contextmanager
def usage_errors(what: str = "") -> Iterator[None]:
    """Convert errors that Octavo raises on purpose, and errors in the user's code, to `UsageError`s."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        innermost = _frames(error)[-1].filename
        if isinstance(error, ValueError | TypeError) and innermost.startswith(_octavo()):
            raise UsageError(f"{what}{error}") from error
        if not _user_line(error):
            raise
        raise UsageError(f"{what}{type(error).__name__}: {_line(error)}{_user_line(error)}") from error


def _frames(error: Exception) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]


def _octavo() -> tuple[str, ...]:
    return tuple(path + os.sep for path in octavo.__path__)


def _line(error: Exception) -> str:
    return (str(error).strip() or "no reason given").splitlines()[0]


def _user_line(error: Exception) -> str:
    """The innermost line of the user's code in a traceback, if there is one."""
    libraries = (*_octavo(), *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")))
    own = [frame for frame in _frames(error) if not frame.filename.startswith(libraries)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


@contextlib.contextmanager
def _on_sys_path(directory: str) -> Iterator[None]:
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(directory)


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print warnings as lines on stderr, without their source line."""

    def show(message: Any, *_: Any, **__: Any) -> None:
        print(f"warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=UserWarning)
        warnings.showwarning = show
        yield
