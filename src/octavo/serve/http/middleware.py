"""Middleware around all endpoints: request ids, the API key, counters, and a response to every exception."""

import hmac
import logging
import secrets
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.serve.http.errors import ApiError
from octavo.serve.http.metrics import Metrics

_log = logging.getLogger("octavo.serve")


class RequestMiddleware:
    """Adds a request id, checks the API key, counts requests by path (one of `paths`), and converts errors to JSON."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, api_keys: Sequence[str], paths: frozenset[str]):
        self.app, self.metrics, self.paths = app, metrics, paths
        self.keys = [f"Bearer {key}".encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = scope["request_id"] = secrets.token_hex(12)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            self._check_key(scope)
            await self.app(scope, receive, send_with_id)
        except ApiError as error:
            await error_response(error)(scope, receive, send_with_id)
        except Exception:
            _log.exception("request %s failed", request_id)
            if status:
                raise  # too late for another status: the connection is closed
            error = ApiError(500, f"something went wrong in the server; its log tells more of request {request_id}")
            await error_response(error)(scope, receive, send_with_id)
        finally:
            path = scope["path"]
            # Without a status, the client has disconnected.
            self.metrics.requests.labels(path if path in self.paths else "other", status or 499).inc()

    def _check_key(self, scope: Scope) -> None:
        if not self.keys or scope["path"] == "/health":
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        # All of them, so that the time does not depend on which is right.
        if not sum(hmac.compare_digest(given, key) for key in self.keys):
            problem = "a wrong key" if given else "no key"
            raise ApiError(
                401,
                f"the request has {problem}: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def error_response(error: ApiError) -> JSONResponse:
    """The response of an error."""
    return JSONResponse(error.body(), error.status, error.headers)
