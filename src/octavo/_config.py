"""The base of all frozen configs: they print as the code that makes them, and convert to and from JSON."""

import dataclasses
import html
import json
from collections.abc import Iterable
from typing import Any, ClassVar

from octavo._names import did_you_mean, unknown_name


class Config:
    """Base of the frozen dataclasses of formats, calibrations, quantizers, rules and others.

    The JSON text holds the name of the class: the bare name of a class of Octavo, the name with its module of any
    other, so that a user's class never replaces a built-in one. `Config.from_json(c.to_json()) == c` for all of them.
    """

    _classes: ClassVar[dict[str, type["Config"]]] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Config._classes[_class_name(cls)] = cls

    def replace[T: "Config"](self: T, **changes: Any) -> T:
        """A copy with some fields changed, validated like a new one."""
        return dataclasses.replace(self, **changes)  # pyrefly: ignore

    def to_json(self) -> str:
        """This config as JSON text."""
        return json.dumps(_encode(self))

    @staticmethod
    def from_json(text: str) -> Any:
        """The config of a JSON text that `to_json` made."""
        return _decode(json.loads(text))

    def __repr__(self) -> str:
        shown = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)  # pyrefly: ignore
            if f.repr and getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_html_(self) -> str:
        """For notebooks: the fields that differ from their defaults."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{f.name}</th>"
            f"<td style='text-align:left'><code>{html.escape(repr(getattr(self, f.name)))}</code></td></tr>"
            for f in dataclasses.fields(self)  # pyrefly: ignore
            if f.repr and getattr(self, f.name) != f.default
        )
        return f"<div><b>{type(self).__name__}</b>{f'<table>{rows}</table>' if rows else ''}</div>"


def check_choices(config: Any, **known: Iterable[str]) -> None:
    """Raise unless each of these fields has one of its known values."""
    for name, choices in known.items():
        value = getattr(config, name)
        if value not in choices:
            raise ValueError(f"unknown {name} {value!r}: {unknown_name(value, choices)}")


def check_least(config: Any, least: int, *names: str) -> None:
    """Raise unless each of these fields is at least a number."""
    for name in names:
        if not getattr(config, name) >= least:
            raise ValueError(f"{name} is at least {least}, got {getattr(config, name)}")


def _class_name(cls: type) -> str:
    return cls.__name__ if cls.__module__.startswith("octavo.") else f"{cls.__module__}.{cls.__qualname__}"


def _encode(value: Any) -> Any:
    if isinstance(value, Config):
        fields = [f.name for f in dataclasses.fields(value) if f.init]  # pyrefly: ignore
        return {"class": _class_name(type(value)), **{name: _encode(getattr(value, name)) for name in fields}}
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(v) for v in value)
    if isinstance(value, dict):
        fields = {k: _decode(v) for k, v in value.items()}
        name = fields.pop("class", None)
        if not isinstance(name, str):
            raise ValueError(f"a config in JSON has the name of its class under 'class', got the keys {list(fields)}")
        if name not in Config._classes:
            hint = did_you_mean(name, Config._classes)
            raise ValueError(f"unknown config class {name!r}: {hint}import the module that defines it first")
        return Config._classes[name](**fields)
    return value
