"""Running the application on uvicorn: the socket, signals, and graceful shutdown."""

import asyncio
import contextlib
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.serve.http.app import Api
from octavo.serve.http.limits import DEFAULT, Limits

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Port 0 takes a free port."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise OSError(f"cannot listen on {host!r}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(
            f"cannot listen on port {port} of {host!r}: {error.strerror or error}; choose another by --port, or 0 for "
            "any that is free"
        ) from None
    return sock


def url_of(sock: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"


class _Protocol(H11Protocol):
    """HTTP/1.1 that closes connections whose headers do not arrive in time, which uvicorn does not."""

    seconds = DEFAULT.header_timeout
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._restart()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._restart()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._restart()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _restart(self) -> None:
        """Start the timer when headers are awaited; bytes of unfinished headers do not prolong it."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    """Calls `ready` when it listens, and lets running requests finish when it stops."""

    def __init__(self, api: Api, ready: Callable[[], None]):
        grace = api.limits.grace
        # Explicit where the defaults depend on which packages are installed.
        config = uvicorn.Config(
            api.app,
            http=type("_Protocol", (_Protocol,), {"seconds": api.limits.header_timeout}),
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(grace) + 5,
        )
        super().__init__(config)
        self._api, self._ready = api, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._api.close(self._api.limits.grace))
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)


def serve(
    engine: Any,
    sock: socket.socket,
    *,
    name: str,
    limits: Limits = DEFAULT,
    api_key: str | Sequence[str] | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve an engine until SIGINT or SIGTERM, then let running requests finish and return.

    Args:
        engine: An `octavo.serve.Engine`, or an `octavo.pretrained.encoder.Encoder`, with a tokenizer.
        sock: A bound socket; see `bind`.
        name: The name of the model in requests.
        limits: Bounds on requests.
        api_key: If set, requests need the header `Authorization: Bearer KEY`. May be several keys.
        ready: Called when the server listens.
    """
    api = Api(engine, name=name, limits=limits, api_key=api_key)
    # uvicorn raises the signal that ended it again for the previous handler.
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    try:
        _Server(api, ready).run([sock])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        api.worker.stop()
        sock.close()


@contextlib.contextmanager
def running(
    engine: Any,
    *,
    name: str = "model",
    host: str = "127.0.0.1",
    port: int = 0,
    limits: Limits = DEFAULT,
    api_key: str | Sequence[str] | None = None,
) -> Iterator[str]:
    """Run a server in a thread for the duration of a `with` block, which gets its URL."""
    with bind(host, port) as sock:
        listening = threading.Event()
        server = _Server(Api(engine, name=name, limits=limits, api_key=api_key), listening.set)
        thread = threading.Thread(target=server.run, args=([sock],), name="octavo-http")
        thread.start()
        try:
            while not listening.wait(0.05):
                if not thread.is_alive():
                    raise RuntimeError("the server ended before it listened; its log tells why")
            yield url_of(sock)
        finally:
            server.should_exit = True
            thread.join()
