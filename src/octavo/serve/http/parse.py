"""From the bodies of requests to their models, and from pydantic's errors to the API's."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from octavo._names import unknown_name
from octavo.serve.http.errors import ApiError, field_error, format_number, wrong_type
from octavo.serve.http.limits import Limits
from octavo.serve.http.requests import EmbeddingRequest, GenerationRequest

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "a boolean",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
_BOUNDS = {"greater_than": "above", "greater_than_equal": "at least", "less_than_equal": "at most"}


def parse[T: GenerationRequest | EmbeddingRequest](cls: type[T], body: bytes, limits: Limits) -> T:
    """The request that a body holds.

    Args:
        cls: The model of the endpoint's requests.
        body: JSON in UTF-8.
        limits: Bounds on what one request may ask for.

    Raises:
        ApiError: With status 400, and the name of the field that is at fault.
    """
    fields = _load(body)
    for name in fields:
        if name not in cls.model_fields:
            shown = name[:60].encode(errors="replace").decode()
            raise ApiError(400, f"unknown field {shown!r}: {unknown_name(shown, cls.model_fields)}", param=shown)
    try:
        return cls.model_validate({k: v for k, v in fields.items() if v is not None}, context=limits)
    except ValidationError as error:
        raise _api_error(error.errors(include_url=False)[0]) from None


def _load(body: bytes) -> dict[str, Any]:
    def reject(name: str) -> None:
        raise json.JSONDecodeError(f"{name} is no number of JSON", name, 0)

    try:
        found = json.loads(body.decode(), parse_constant=reject)
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, of numbers with thousands of digits
        known = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        reason = str(error) if known else "it is nested too deeply, or has a number of too many digits"
        raise ApiError(400, f"the body is no JSON in UTF-8: {reason}", code="bad_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, 'the body is JSON, but no object: it looks like {"prompt": ...}', code="bad_json")
    return found


def _api_error(error: Mapping[str, Any]) -> ApiError:
    """pydantic's error as an API error: field, expected, given."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in error["loc"] if str(key)[:1] != "<")[1:]
    if kind == "missing":
        return field_error(name, "is missing")
    if kind == "float_type" and type(value) is int:  # beyond the range of a float
        return field_error(name, "is out of range: got a huge number", code="out_of_range")
    if kind in _EXPECTED:
        return wrong_type(name, _EXPECTED[kind], value)
    if kind in _BOUNDS or kind == "less_than":
        ((_, bound),) = context.items()
        limit = f"{_BOUNDS[kind]} {bound:g}" if kind in _BOUNDS else f"below {bound}"
        return field_error(name, f"is {limit}, got {format_number(value)}", code="out_of_range")
    if kind == "extra_forbidden":
        return field_error(name, "is unknown, or is not supported by this server: leave it out", code="unsupported")
    if kind == "literal_error":
        return field_error(name, f"is not supported: this server takes {context['expected']}", code="unsupported")
    if kind == "too_short":
        return field_error(name, "is empty: give at least one")
    return field_error(name, str(context["error"]) if "error" in context else error["msg"].removeprefix("Input "))
