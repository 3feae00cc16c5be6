"""Checks of single fields of a request. Each takes a field's name and value, and returns the value as we use it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from octavo.serve.http.errors import ApiError

Check = Callable[[str, Any], Any]

_KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}


def refuse(name: str, message: str, *, code: str | None = None) -> ApiError:
    """An error of a field."""
    return ApiError(400, f"{name} {message}", param=name, code=code)


def wrong_type(name: str, wanted: str, value: Any) -> ApiError:
    """An error of a field whose value is of another kind than it should be."""
    return refuse(name, f"is {wanted}, got {_KINDS.get(type(value), 'null')}", code="wrong_type")


def number(low: int, high: int, *, above: bool = False) -> Check:
    """A finite number from `low`, or with `above` only beyond it, to `high`."""

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(name, "a number", value)
        # An integer may be too large for a float, and a literal such as 1e999 is infinite.
        if isinstance(value, float) and not math.isfinite(value):
            raise refuse(name, "is a finite number")
        if not low <= value <= high or (above and value == low):
            bounds = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
            raise refuse(name, f"is {bounds}, got {_short(value)}", code="out_of_range")
        return float(value)

    return check


def integer(low: int, high: int) -> Check:
    """A whole number from `low` to `high`."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(name, "a whole number", value)
        if not low <= value <= high:
            raise refuse(name, f"is from {low} to {high}, got {_short(value)}", code="out_of_range")
        return value

    return check


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise wrong_type(name, "a boolean", value)
    return value


def text(name: str, value: Any) -> str:
    """A string that is text: JSON may hold halves of characters."""
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise refuse(name, "holds half of a surrogate pair, which is no character") from None
    return value


def texts(limit: int) -> Check:
    """A string or several, none of them empty."""

    def check(name: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, str | list):
            raise wrong_type(name, "a string or a list of strings", value)
        found = tuple(text(name, one) for one in ([value] if isinstance(value, str) else value))
        if len(found) > limit:
            raise refuse(name, f"is at most {limit} strings, got {len(found)}", code="out_of_range")
        if "" in found:
            raise refuse(name, "has an empty string, which would stop every text at once")
        return found

    return check


def prompt(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, token ids, or a list of either: one or more prompts."""
    if isinstance(value, str):
        return (text(name, value),)
    if not isinstance(value, list):
        raise wrong_type(name, "a string, a list of strings, token ids or a list of lists of token ids", value)
    if not value:
        raise refuse(name, "is empty: give at least one prompt")
    if _are_ids(value):
        return (tuple(value),)
    if all(isinstance(one, str) for one in value):
        return tuple(text(name, one) for one in value)
    if all(isinstance(one, list) and one and _are_ids(one) for one in value):
        return tuple(map(tuple, value))
    raise refuse(
        name,
        "is a string, a list of strings, token ids or a list of lists of token ids; these are mixed, empty or of "
        "another type",
        code="wrong_type",
    )


def _are_ids(value: Sequence[Any]) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def messages(name: str, value: Any) -> tuple[dict[str, str], ...]:
    """A conversation: objects with a role and a content, which is a string or a list of parts that are text."""
    if not isinstance(value, list):
        raise wrong_type(name, "a list of messages", value)
    if not value:
        raise refuse(name, "is empty: give at least one message")
    return tuple(_message(f"{name}[{i}]", one) for i, one in enumerate(value))


def _message(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object with role and content", value)
    for key in value:
        if key not in ("role", "content", "name") and value[key] not in (None, []):
            raise refuse(f"{name}.{key}", "is not supported: a message has a role, a content and a name")
    role = text(f"{name}.role", value.get("role"))
    content = value.get("content")
    if isinstance(content, list):
        content = "".join(_part(f"{name}.content[{i}]", part) for i, part in enumerate(content))
    made = {"role": role, "content": text(f"{name}.content", content)}
    return made if value.get("name") is None else {**made, "name": text(f"{name}.name", value["name"])}


def _part(name: str, value: Any) -> str:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object with type and text", value)
    if value.get("type") != "text":
        raise refuse(f"{name}.type", "is not supported: this server reads parts of the type 'text'")
    return text(f"{name}.text", value.get("text"))


def stream_options(name: str, value: Any) -> bool:
    """Whether a stream ends with what was used."""
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    for key in value:
        if key not in ("include_usage", "include_obfuscation"):
            raise refuse(f"{name}.{key}", "is unknown; known is include_usage")
    if value.get("include_obfuscation"):
        raise refuse(f"{name}.include_obfuscation", "is not supported by this server")
    given = value.get("include_usage")
    return given is not None and flag(f"{name}.include_usage", given)


def only(*neutral: Any) -> Check:
    """Nothing but values that ask for nothing: a field of OpenAI's that this server does not do."""

    def check(name: str, value: Any) -> None:
        # Compared with its type: to Python, 0 is False.
        if not any(type(value) is type(one) and value == one for one in neutral):
            raise refuse(name, "is not supported by this server: leave it out", code="unsupported")

    return check


def ignored(name: str, value: Any) -> None:
    """Anything: a field that changes no answer."""


def _short(value: Any) -> str:
    shown = f"{value:g}" if isinstance(value, float) else str(value) if abs(value) < 10**20 else "a huge number"
    return shown
