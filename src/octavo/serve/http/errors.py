"""Errors in the form that clients of OpenAI's API expect: a status, and JSON that names the field at fault."""

from collections.abc import Mapping
from typing import Any

_KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error", 504: "timeout_error"}


class ApiError(Exception):
    """An error response.

    Args:
        status: The HTTP status.
        message: What is wrong and what to try.
        param: The field at fault.
        code: The reason as a word, for programs.
        headers: Further headers of the response.

    >>> ApiError(400, "n is at least 1, got 0", param="n").body()["error"]["type"]
    'invalid_request_error'
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def field_error(name: str, message: str, *, code: str | None = None) -> ApiError:
    """An error of one field of a request."""
    return ApiError(400, f"{name} {message}", param=name, code=code)


def wrong_type(name: str, expected: str, value: Any) -> ApiError:
    """An error of a field whose value has another type."""
    return field_error(name, f"is {expected}, got {_KINDS.get(type(value), 'null')}", code="wrong_type")


def format_number(value: int | float) -> str:
    """A number of any size, in short."""
    return f"{value:g}" if isinstance(value, float) else str(value) if abs(value) < 10**20 else "a huge number"
