"""The keys of a configuration: types, ranges, choices, and how texts are parsed.

Every source (YAML, environment, command line) has its values as text, and there is one parser per type, so that a
value means the same in all sources.
"""

import dataclasses
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from octavo._names import did_you_mean
from octavo.train.config.maxtext import replacement

_TRUE, _FALSE, _NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null", "~", "")


class Problem(NamedTuple):
    """An error in a configuration, and the keys that it is about."""

    keys: tuple[str, ...]
    text: str


class ConfigError(ValueError):
    """A configuration that cannot be run; the message lists all of its problems.

    >>> print(ConfigError([Problem(("steps",), "steps=0: must be >= 1")]))
    the configuration has a problem:
      - steps=0: must be >= 1
    """

    def __init__(self, problems: Sequence[Problem | str]):
        self.problems = tuple(p if isinstance(p, Problem) else Problem((), p) for p in problems)
        head = "a problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = ["  - " + p.text.replace("\n", "\n    ") for p in self.problems]
        super().__init__("\n".join([f"the configuration has {head}:", *lines]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """The metadata of a field of the configuration: group, help and allowed values.

    Args:
      group: One of `GROUPS`.
      help: One line for `--help` and the documentation.
      choices: The only values, or of a tuple the only items.
      low: Smallest value.
      high: Largest value.
      above: Exclusive lower bound.
      below: Exclusive upper bound.
      check: Raises a ValueError for a value that is not allowed.
      hint: What `check` allows, in a few words.
    """

    group: str
    help: str
    choices: tuple[Any, ...] = ()
    low: int | float | None = None
    high: int | float | None = None
    above: int | float | None = None
    below: int | float | None = None
    check: Callable[[Any], Any] | None = None
    hint: str = ""

    @property
    def allowed(self) -> str:
        """The allowed values in short; empty if every value of the type is.

        >>> Key(group="run", help="", low=0, below=1).allowed, Key(group="run", help="", choices=("", "a")).allowed
        ('>= 0, < 1', '"" | a')
        """
        if self.choices:
            return " | ".join('""' if choice == "" else str(choice) for choice in self.choices)
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        limits = {">=": self.low, ">": self.above, "<=": self.high, "<": self.below}
        return ", ".join(f"{sign} {limit:g}" for sign, limit in limits.items() if limit is not None) or self.hint

    @property
    def text(self) -> str:
        """The help with the allowed values in brackets."""
        return f"{self.help}  [{self.allowed}]" if self.allowed else self.help

    def check_value(self, value: Any) -> None:
        """Raise a ValueError for a value of the right type that is not allowed."""
        for item in value if isinstance(value, tuple) else (value,):
            if self.choices and item not in self.choices:
                raise ValueError(f"{did_you_mean(item, [c for c in self.choices if c])}Allowed: {self.allowed}")
        if isinstance(value, int | float) and not (
            (self.low is None or self.low <= value)
            and (self.high is None or value <= self.high)
            and (self.above is None or self.above < value)
            and (self.below is None or value < self.below)
        ):
            raise ValueError(f"must be {self.allowed}")
        if self.check is not None:
            self.check(value)


def key(default: Any, help: str, *, group: str, **limits: Any) -> Any:
    """A field of the configuration."""
    return dataclasses.field(default=default, metadata={"key": Key(group=group, help=help, **limits)})


def unknown_key(name: str, known: Collection[str], source: str = "") -> str:
    """The message for an unknown key, with the nearest known one.

    >>> unknown_key("stepz", ["steps", "dtype"])
    "unknown key 'stepz': did you mean 'steps'?"
    """
    hint = replacement(name) or did_you_mean(name, known).strip() or "`octavo train --help` lists the keys"
    return f"unknown key {name!r}{f' ({source})' if source else ''}: {hint}"


def format_value(value: Any) -> str:
    """A value as it is written on the command line.

    >>> format_value(("silu", "linear")), format_value(True), format_value(None), format_value(0.0003)
    ('silu,linear', 'true', 'null', '0.0003')
    """
    if isinstance(value, tuple | list):
        return ",".join(format_value(item) for item in value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def parse(field: dataclasses.Field, text: str | list[str]) -> Any:
    """Parse a text, or a list of texts, as the value of a field.

    >>> import dataclasses
    >>> from octavo.train.config import Config
    >>> field = {field.name: field for field in dataclasses.fields(Config)}
    >>> parse(field["learning_rate"], "3e-4"), parse(field["steps"], "1e3"), parse(field["packing"], "False")
    (0.0003, 1000, False)
    """
    kind = field.type
    if isinstance(text, list):
        if kind not in _LISTS:
            raise ValueError(f"{_KINDS[kind]}, got a list")
        text = ",".join(text)
    text = _unquote(text)
    # "none" and "null" mean "" for names and paths that are empty by default; elsewhere they are values.
    if kind is str:
        return "" if field.default == "" and text.lower() in _NONE else text
    if kind is bool:
        return check_type(field, {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}.get(text.lower()))
    if kind in _LISTS:
        text = text.removeprefix("[").removeprefix("(").removesuffix("]").removesuffix(")").strip()
        items = [_unquote(item) for item in text.split(",")] if text else []
        return check_type(field, items if kind == tuple[str, ...] else [_number(item) for item in items])
    return check_type(field, None if text.lower() in _NONE else _number(text))


def check_type(field: dataclasses.Field, value: Any) -> Any:
    """A Python value as it is stored; raises a ValueError that names the type."""
    kind = field.type
    if kind in (bool, str) and isinstance(value, kind):
        return value
    if kind in _LISTS and isinstance(value, tuple | list):
        if kind == tuple[str, ...] and all(isinstance(item, str) for item in value):
            return tuple(value)
        if kind == tuple[float, ...] and all(map(_is_finite, value)):
            return tuple(map(float, value))
    if kind == int | None and value is None:
        return None
    if kind in _NUMBERS and _is_finite(value):
        if kind is float:
            return float(value)
        if isinstance(value, int) or value.is_integer():
            return int(value)
        if kind == int | float:
            return value
    raise ValueError(_KINDS[kind])


_KINDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    int | float: "a number",
    bool: "true or false",
    str: "a text",
    int | None: "an integer or null",
    tuple[str, ...]: "a list such as [a,b] or a,b",
    tuple[float, ...]: "numbers such as 1,2.5",
}
_LISTS = (tuple[str, ...], tuple[float, ...])
_NUMBERS = (int, float, int | float, int | None)


def _unquote(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _number(text: str) -> int | float | str:
    """The number of a text, or the text if it has none."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _is_finite(value: Any) -> bool:
    # An integer beyond the range of floats is as little a setting as infinity.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
