"""Reading the body of a request, and noticing when the client disconnects."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from octavo.serve.http.errors import ApiError
from octavo.serve.http.limits import Limits

_CLOSE = {"Connection": "close"}
_DISCARD, _DISCARD_SECONDS = 4, 1.0


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request, bounded in size and time.

    The required Content-Type also keeps web pages of other origins from using a server on the same machine: browsers
    do not let them send it.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the body is JSON: send the header Content-Type: application/json", code="not_json")
    declared = request.headers.get("content-length", "")
    chunks = request.stream()
    if not (declared.isdecimal() and len(declared) < 20 and int(declared) > limits.body):
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_timeout):
                async for chunk in chunks:
                    body += chunk
                    if len(body) > limits.body:
                        break
                else:
                    return bytes(body)
        except TimeoutError:
            message = f"the body did not arrive within {limits.body_timeout:g} seconds"
            raise ApiError(408, message, code="slow_body", headers=_CLOSE) from None
    # Read and discard a little more: a client that still writes may not see the response otherwise.
    left = _DISCARD * limits.body
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_DISCARD_SECONDS):
            async for chunk in chunks:
                left -= len(chunk)
                if left <= 0:
                    break
    # The rest of the body is not read, so the connection cannot be reused.
    raise ApiError(413, f"the body is longer than {limits.body} bytes", code="body_too_long", headers=_CLOSE)


async def while_connected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; if the client disconnects first, cancel it and raise ClientDisconnect."""
    working = asyncio.create_task(work)
    tasks = (working, asyncio.create_task(_wait_for_disconnect(receive)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
