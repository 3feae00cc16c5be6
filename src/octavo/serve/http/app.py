"""The endpoints: what OpenAI's clients call, health and metrics."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from octavo.serve.http import fields
from octavo.serve.http.answers import Answer, ChatShape, CompletionShape, Shape
from octavo.serve.http.errors import ApiError
from octavo.serve.http.fields import Ask
from octavo.serve.http.guard import Guard, error_response
from octavo.serve.http.incoming import read_body, while_connected
from octavo.serve.http.limits import DEFAULT, Limits
from octavo.serve.http.metrics import Metrics
from octavo.serve.http.prompts import Prompts
from octavo.serve.http.worker import Job, Worker

_SSE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_LAST_WORDS = 5.0


class Api:
    """A model behind HTTP: `app` is an ASGI application, which any server of those can run.

    The engine belongs to it from its start to its end, and to nobody else.
    """

    def __init__(self, engine: Any, *, name: str, limits: Limits = DEFAULT, api_key: str | None = None):
        self.name, self.limits, self.metrics = name, limits, Metrics()
        self.worker = Worker(engine, slots=engine.slots, waiting=limits.queue)
        self.prompts = Prompts(engine)
        self.started = int(time.time())
        self._closing = False
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.show_metrics, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.one_model, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        paths = frozenset(route.path for route in routes)
        self.app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            middleware=[Middleware(Guard, metrics=self.metrics, api_key=api_key, paths=paths)],
            exception_handlers={HTTPException: _http_error},
        )
        self.app.router.redirect_slashes = False

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.worker.stop)

    async def close(self, grace: float) -> None:
        """Refuse new requests; give those that run some seconds, then give them up."""
        self._closing = True
        await asyncio.sleep(grace)
        self.worker.abort(_stopping())

    # What is not text.

    async def health(self, request: HttpRequest) -> Response:
        """200 while requests are worked on."""
        state = "ok" if self.worker.alive and not self._closing else "stopping" if self._closing else "dead"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def show_metrics(self, request: HttpRequest) -> Response:
        """Prometheus text."""
        gauges = {
            "slots": (self.worker.slots, "Texts that can be made at a time."),
            "active_slots": (self.worker.active, "Texts that are being made."),
            "queue_depth": (self.worker.waiting, "Texts that wait for a slot."),
            "engine_up": (self.worker.alive, "1 while the engine works."),
        }
        return PlainTextResponse(self.metrics.text(gauges), media_type="text/plain; version=0.0.4")

    async def models(self, request: HttpRequest) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: HttpRequest) -> Response:
        """The one model, by its name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        facts = {"object": "model", "created": self.started, "owned_by": "octavo"}
        return {"id": self.name, **facts, "max_model_len": self.prompts.max_length}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"there is no model {name[:100]!r} here: this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    # What is text.

    async def completions(self, request: HttpRequest) -> Response:
        """POST /v1/completions."""
        return await self._respond(request, fields.completion, CompletionShape())

    async def chat(self, request: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        return await self._respond(request, fields.chat, ChatShape())

    async def _respond(self, request: HttpRequest, parse: Callable[[bytes, Limits], Ask], shape: Shape) -> Response:
        if self._closing:
            raise _stopping()
        self.worker.check()
        began = time.monotonic()
        try:
            ask = parse(await read_body(request, self.limits), self.limits)
            self._check_model(ask.model)
            # Tokenizing a long text takes a while, in which others want to be served.
            prompts = await asyncio.to_thread(self.prompts.encode, ask)
            requests = self.prompts.requests(ask, prompts, request.scope["request_id"])
            answer = Answer(
                shape,
                self.name,
                request.scope["request_id"],
                echoes=self.prompts.echoes(ask, prompts),
                logprobs=ask.logprobs is not None,
                prompt_tokens=sum(map(len, prompts)),
                tokenizer=self.prompts.tokenizer,
            )
            making = Making(self, self.worker.submit(requests), answer, began)
            self.metrics.prompt_tokens += answer.prompt_tokens
            if ask.stream:
                return EventStream(making, ask.include_usage)
            with contextlib.closing(making):
                return JSONResponse(await while_connected(request.receive, making.whole()))
        except ClientDisconnect:
            self.metrics.disconnects += 1
            return Response(status_code=499)  # nobody will read it


@dataclasses.dataclass
class Making:
    """An answer, while it is made."""

    api: Api
    job: Job
    answer: Answer
    began: float

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """Its pieces."""
        metrics, answer = self.api.metrics, self.answer
        async for index, event in self.job:
            if not answer.generated:
                metrics.first_token.observe(time.monotonic() - self.began)
            before = answer.generated
            chunk = answer.add(index, event)
            metrics.generated_tokens += answer.generated - before
            if chunk is not None:
                yield chunk

    async def whole(self) -> dict[str, Any]:
        """All of it."""
        async with self.in_time(), contextlib.aclosing(self.chunks()) as chunks:
            async for _ in chunks:
                pass
        return self.answer.whole()

    def close(self) -> None:
        """However it ended, the engine is left with nothing to do for it."""
        self.api.worker.cancel(self.job)
        self.api.metrics.seconds.observe(time.monotonic() - self.began)

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """What is done within ends when the request's time is up."""
        left = self.began + self.api.limits.timeout - time.monotonic()
        try:
            async with asyncio.timeout(left):
                yield
        except TimeoutError:
            seconds = f"{self.api.limits.timeout:g} seconds"
            raise ApiError(504, f"the answer was not complete after {seconds}: ask for less", code="timeout") from None


class EventStream(Response):
    """Server-sent events. The status is sent with the first of them, so that an early failure has one of its own."""

    def __init__(self, making: Making, include_usage: bool):
        super().__init__(headers=_SSE, media_type="text/event-stream")
        del self.headers["content-length"]
        self.making, self.include_usage = making, include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self.making):
            try:
                await while_connected(receive, self._send(send))
            except ClientDisconnect:
                self.making.api.metrics.disconnects += 1

    async def _send(self, send: Send) -> None:
        started = False
        try:
            async with self.making.in_time(), contextlib.aclosing(self.making.chunks()) as chunks:
                async for chunk in chunks:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        started = True
                    await self._event(send, {**chunk, "usage": None} if self.include_usage else chunk)
                    # Neither a waiting event nor a write lets others run, and whether the client is gone be seen.
                    await asyncio.sleep(0)
                if self.include_usage:
                    await self._event(send, self.making.answer.usage_chunk())
                await self._body(send, b"data: [DONE]\n\n")
                await self._body(send, b"", more=False)
        except ApiError as error:
            if not started:
                raise
            # A client that reads no more would block this for ever; without an end, the connection is closed.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    await self._event(send, error.body())
                    await self._body(send, b"", more=False)

    async def _event(self, send: Send, content: dict[str, Any]) -> None:
        line = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        await self._body(send, f"data: {line}\n\n".encode())

    async def _body(self, send: Send, body: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})


def _stopping() -> ApiError:
    return ApiError(503, "the server is being stopped", code="stopping", headers={"Retry-After": "5"})


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path[:100]}"
    known = "POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /health, GET /metrics"
    message = f"there is no {path}: known are {known}" if error.status_code in (404, 405) else str(error.detail)
    return error_response(ApiError(error.status_code, message, headers=error.headers))
