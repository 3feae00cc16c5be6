"""What a key of the configuration is: a type, a group, a sentence, and which values are allowed.

Every source (YAML, environment, command line) gives texts, and one parser per type reads them all, so that a value
means the same wherever it is written.
"""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any

from octavo._names import did_you_mean
from octavo.train.maxtext import instead

_TRUE, _FALSE, _NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null", "~", "")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is wrong, and the keys that it is about."""

    keys: tuple[str, ...]
    text: str


class ConfigError(ValueError):
    """A configuration that cannot be run; the message lists everything that was found wrong with it.

    >>> print(ConfigError([Problem(("steps",), "steps=0: must be >= 1")]))
    the configuration has a problem:
      - steps=0: must be >= 1
    """

    def __init__(self, problems: Sequence[Problem | str]):
        self.problems = tuple(p if isinstance(p, Problem) else Problem((), p) for p in problems)
        head = "a problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = ["  - " + p.text.replace("\n", "\n    ") for p in self.problems]
        super().__init__("\n".join([f"the configuration has {head}:", *lines]))


@dataclasses.dataclass(frozen=True)
class Kind:
    """A type of value: in words, from a text, and from a Python value."""

    words: str
    parse: Callable[[str], Any]
    accept: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """What a field of the configuration carries besides its type and default.

    `choices` are the only values; otherwise `low` and `high` are included and `above` and `below` are not. `check`
    raises a ValueError for a value it refuses, and `hint` says in a few words what it takes.
    """

    group: str
    help: str
    choices: tuple[Any, ...] = ()
    low: int | float | None = None
    high: int | float | None = None
    above: int | float | None = None
    below: int | float | None = None
    check: Callable[[Any], None] | None = None
    hint: str = ""

    @property
    def allowed(self) -> str:
        """The allowed values in a few signs; nothing if every value of the type is.

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
        """The sentence, with what is allowed in brackets."""
        return f"{self.help}  [{self.allowed}]" if self.allowed else self.help

    def refusal(self, value: Any) -> str | None:
        """Why a value is not allowed, or None."""
        for item in value if isinstance(value, tuple) else (value,):
            if self.choices and item not in self.choices:
                return f"{did_you_mean(item, [c for c in self.choices if c])}Allowed: {self.allowed}"
        if value is not None and not isinstance(value, tuple) and not self._within(value):
            return f"must be {self.allowed}"
        try:
            if self.check is not None:
                self.check(value)
        except ValueError as error:
            return str(error)
        return None

    def _within(self, value: Any) -> bool:
        return not (
            (self.low is not None and value < self.low)
            or (self.high is not None and value > self.high)
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        )


def key(default: Any, help: str, *, group: str, **limits: Any) -> Any:
    """A field of the configuration."""
    return dataclasses.field(default=default, metadata={"key": Key(group=group, help=help, **limits)})


def kind_of(field: dataclasses.Field) -> Kind:
    """The kind of values that a field holds."""
    return _KINDS[field.type]


def parse(field: dataclasses.Field, text: str | list[str]) -> Any:
    """The value that a text, or a list of texts, stands for.

    >>> import dataclasses
    >>> from octavo.train.config import Config
    >>> field = {field.name: field for field in dataclasses.fields(Config)}
    >>> parse(field["learning_rate"], "3e-4"), parse(field["steps"], "1e3"), parse(field["packing"], "False")
    (0.0003, 1000, False)
    """
    kind = kind_of(field)
    if isinstance(text, list):
        if kind not in (_TEXTS, _NUMBERS):
            raise ValueError(f"{kind.words}, got a list")
        text = ",".join(text)
    text = _unquoted(text)
    # A name or a path that is empty by default is also emptied by the words for nothing; elsewhere they are values.
    if kind is _TEXT and field.default == "" and text.lower() in _NONE:
        return ""
    try:
        return kind.parse(text)
    except ValueError:
        raise ValueError(kind.words) from None


def unknown_key(name: str, known: Collection[str], place: str = "") -> str:
    """What to say of a key that is none.

    >>> unknown_key("stepz", ["steps", "dtype"])
    "unknown key 'stepz': did you mean 'steps'?"
    """
    hint = instead(name) or did_you_mean(name, known).strip() or "`octavo train --help` lists the keys"
    return f"unknown key {name!r}{f' ({place})' if place else ''}: {hint}"


def shown(value: Any) -> str:
    """A value as one writes it on the command line.

    >>> shown(("silu", "linear")), shown(True), shown(None), shown(0.0003)
    ('silu,linear', 'true', 'null', '0.0003')
    """
    if isinstance(value, tuple | list):
        return ",".join(shown(item) for item in value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def wrap(text: str, width: int) -> list[str]:
    """A text in lines; what is allowed, in brackets, goes to a line of its own before it is broken."""
    if len(text) <= width:
        return [text]
    first, bracket, rest = text.partition("  [")
    return [line for piece in (first, bracket.strip() + rest) for line in textwrap.wrap(piece, width)]


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return _whole(_number(text))


def _whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, float) or not value.is_integer():
        raise ValueError
    return int(value)


def _short(value: float) -> int | float:
    return int(value) if value.is_integer() else value


def _number(text: str) -> float:
    return _finite(float(text))


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _flag(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError
    return text.lower() in _TRUE


def _items(text: str) -> list[str]:
    text = text.removeprefix("[").removeprefix("(").removesuffix("]").removesuffix(")").strip()
    return [_unquoted(item) for item in text.split(",")] if text else []


def _of(*types: type) -> Callable[[Any], Any]:
    def accept(value: Any) -> Any:
        if not isinstance(value, types):
            raise ValueError
        return value

    return accept


def _each(accept: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def accept_all(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, tuple | list):
            raise ValueError
        return tuple(accept(value) for value in values)

    return accept_all


_TEXT = Kind("a text", str, _of(str))
_TEXTS = Kind("a list such as [a,b] or a,b", lambda text: tuple(_items(text)), _each(_of(str)))
_NUMBERS = Kind("numbers such as 1,2.5", lambda text: tuple(_number(t) for t in _items(text)), _each(_finite))
_KINDS: dict[Any, Kind] = {
    int: Kind("an integer", _integer, _whole),
    float: Kind("a number", _number, _finite),
    int | float: Kind("a number", lambda text: _short(_number(text)), lambda value: _short(_finite(value))),
    bool: Kind("true or false", _flag, _of(bool)),
    str: _TEXT,
    int | None: Kind(
        "an integer or null",
        lambda text: None if text.lower() in _NONE else _integer(text),
        lambda value: None if value is None else _whole(value),
    ),
    tuple[str, ...]: _TEXTS,
    tuple[float, ...]: _NUMBERS,
}
