"""JSON and YAML that people write: a key stands once, depth and size are bounded, and what is wrong is a ValueError."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo._optional import import_optional

_LARGEST = 100_000
"""The number of values that a YAML text may have once its aliases are expanded."""

_DEEPEST = 500
"""The number of brackets of a YAML text that may be open at once, those in quotes included."""


def read_document(path: Path) -> Any:
    """The contents of a JSON or YAML file, by its suffix."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it is not UTF-8 text ({error.reason} at byte {error.start})") from None
    try:
        return (parse_json if path.suffix == ".json" else parse_yaml)(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_json(text: str) -> Any:
    """The value of a JSON text."""
    return _bounded(lambda: json.loads(text, object_pairs_hook=_unique))


def parse_yaml(text: str) -> Any:
    """The value of a YAML text."""
    yaml = import_optional("yaml", "YAML", "pyyaml")

    check_depth(text)

    def parse() -> Any:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_node(node, {})
            return loader.construct_document(node)
        finally:
            loader.dispose()

    try:
        return _bounded(parse)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def check_depth(text: str) -> None:
    """Raise for YAML with more open brackets than sensible texts have: parsing takes quadratic time in their depth."""
    if max(itertools.accumulate((1 if c in "[{" else -1 for c in text if c in "[]{}"), initial=0)) > _DEEPEST:
        raise ValueError("it is nested too deeply")


def _bounded(parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} is there twice")
    return found


def _check_node(node: Any, sizes: dict[int, int]) -> int:
    """The number of values in a YAML node; raises for keys that are no text, keys that repeat, cycles and bombs."""
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise ValueError(f"an alias in line {node.start_mark.line + 1} contains itself")
        return sizes[id(node)]
    sizes[id(node)] = 0
    children = node.value if node.id != "scalar" else []
    if node.id == "mapping":
        keys = [key for key, _ in children]
        for key in keys:
            line = key.start_mark.line + 1
            if key.id != "scalar":
                raise ValueError(f"a key in line {line} is a {key.id}, not text")
            if key.value != "<<" and sum(other.value == key.value for other in keys) > 1:
                raise ValueError(f"the key {key.value!r} is there twice, in line {line}")
        children = [value for _, value in children]
    sizes[id(node)] = 1 + sum(_check_node(child, sizes) for child in children)
    if sizes[id(node)] > _LARGEST:
        raise ValueError(f"its aliases expand to more than {_LARGEST:,} values")
    return sizes[id(node)]
