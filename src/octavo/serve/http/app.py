"""The ASGI application: OpenAI's endpoints, health and metrics."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from octavo.serve.http.body import read_body, while_connected
from octavo.serve.http.embeddings import Embeddings, IdleEngine
from octavo.serve.http.errors import ApiError
from octavo.serve.http.limits import DEFAULT, Limits
from octavo.serve.http.metrics import CONTENT_TYPE, Metrics
from octavo.serve.http.middleware import RequestMiddleware, error_response
from octavo.serve.http.parse import parse
from octavo.serve.http.prompts import AnyRequest, Prompts, has_echo
from octavo.serve.http.requests import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from octavo.serve.http.responses import ChatFormat, CompletionFormat, ResponseBuilder, ResponseFormat
from octavo.serve.http.worker import Job, Worker

_SSE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_ERROR_EVENT_SECONDS = 5.0


class Api:
    """The ASGI application `app` around an engine, which nothing else may use while it runs.

    Args:
        engine: An `octavo.serve.Engine`, or an `octavo.pretrained.encoder.Encoder`, with a tokenizer.
        name: The name of the model in requests.
        limits: Bounds on requests.
        api_key: If set, requests need the header `Authorization: Bearer KEY`. May be several keys.
    """

    def __init__(self, engine: Any, *, name: str, limits: Limits = DEFAULT, api_key: str | Sequence[str] | None = None):
        api_keys = [api_key] if isinstance(api_key, str) else api_key or ()
        self.name, self.limits, self.metrics = name, limits, Metrics()
        self.embeddings = Embeddings(engine, limits) if hasattr(engine, "embed") else None
        engine = engine if self.embeddings is None else IdleEngine(engine)
        self.worker = Worker(engine, queue_limit=limits.queue)
        self.prompts = Prompts(engine)
        self.started = int(time.time())
        self._closing = False
        self.metrics.add_gauge("slots", "Texts that can be generated at a time.", lambda: self.worker.slots)
        self.metrics.add_gauge("active_slots", "Texts that are being generated.", lambda: self.worker.active)
        self.metrics.add_gauge("queue_depth", "Texts that wait for a slot.", lambda: self.worker.waiting)
        self.metrics.add_gauge(
            "reused_prompt_tokens", "Tokens of prompts that were in the cache already.", lambda: self.worker.reused
        )
        self.metrics.add_gauge("draft_proposed_tokens", "Tokens that a draft proposed.", lambda: self.worker.proposed)
        self.metrics.add_gauge(
            "draft_accepted_tokens", "Those of the draft's tokens that were generated.", lambda: self.worker.accepted
        )
        self.metrics.add_gauge("engine_up", "1 while the engine runs.", lambda: self.worker.alive)
        complete = functools.partial(self._respond, CompletionRequest, CompletionFormat())
        chat = functools.partial(self._respond, ChatCompletionRequest, ChatFormat())
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.show_metrics, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.one_model, methods=["GET"]),
        ]
        if self.embeddings is None:
            routes.append(Route("/v1/completions", complete, methods=["POST"]))
            routes.append(Route("/v1/chat/completions", chat, methods=["POST"]))
        else:
            routes.append(Route("/v1/embeddings", self.embed, methods=["POST"]))
        paths = frozenset(route.path for route in routes)
        self.app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            middleware=[Middleware(RequestMiddleware, metrics=self.metrics, api_keys=api_keys, paths=paths)],
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
        """Reject new requests; cancel those that still run after `grace` seconds."""
        self._closing = True
        await asyncio.sleep(grace)
        self.worker.abort(_stopping())

    async def health(self, request: HttpRequest) -> Response:
        """200 while requests are processed."""
        state = "ok" if self.worker.alive and not self._closing else "stopping" if self._closing else "dead"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def show_metrics(self, request: HttpRequest) -> Response:
        """Metrics for Prometheus."""
        return Response(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: HttpRequest) -> Response:
        """The list of models, which has one."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: HttpRequest) -> Response:
        """A model by its name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def embed(self, request: HttpRequest) -> Response:
        """The embeddings of texts."""
        assert self.embeddings is not None
        if self._closing:
            raise _stopping()
        started = time.monotonic()
        try:
            asked = parse(EmbeddingRequest, await read_body(request, self.limits), self.limits)
            self._check_model(asked.model)
            found = await while_connected(request.receive, self.embeddings.respond(asked, self.name))
        except ClientDisconnect:
            self.metrics.disconnects.inc()
            return Response(status_code=499)
        finally:
            self.metrics.seconds.observe(time.monotonic() - started)
        self.metrics.prompt_tokens.inc(found["usage"]["prompt_tokens"])
        return JSONResponse(found)

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

    async def _respond(self, cls: type[AnyRequest], fmt: ResponseFormat, request: HttpRequest) -> Response:
        if self._closing:
            raise _stopping()
        self.worker.check()
        started = time.monotonic()
        try:
            asked = parse(cls, await read_body(request, self.limits), self.limits)
            self._check_model(asked.model)
            # In a thread: tokenizing a long text or compiling a schema would block the event loop.
            prompts, constraint = await asyncio.to_thread(self.prompts.read, asked)
            requests = self.prompts.requests(asked, prompts, request.scope["request_id"], constraint)
            builder = ResponseBuilder(
                fmt,
                self.name,
                request.scope["request_id"],
                echoes=self.prompts.echoes(asked, prompts),
                logprobs=asked.num_logprobs is not None,
                prompt_tokens=sum(map(len, prompts)),
                tokenizer=self.prompts.tokenizer,
                echoed=[one.prompt for one in requests] if has_echo(asked) else (),
                parser=self.prompts.tool_parser(asked),
            )
            pending = PendingResponse(self, self.worker.submit(requests), builder, started)
            self.metrics.prompt_tokens.inc(builder.prompt_tokens)
            if asked.stream:
                return EventStream(pending, asked.include_usage)
            with contextlib.closing(pending):
                return JSONResponse(await while_connected(request.receive, pending.complete()))
        except ClientDisconnect:
            self.metrics.disconnects.inc()
            return Response(status_code=499)  # the client has disconnected


@dataclasses.dataclass
class PendingResponse:
    """A response that is being generated."""

    api: Api
    job: Job
    builder: ResponseBuilder
    started: float

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The chunks, as they are generated."""
        metrics, builder = self.api.metrics, self.builder
        async for index, event in self.job:
            if not builder.generated:
                metrics.first_token.observe(time.monotonic() - self.started)
            before = builder.generated
            chunk = builder.add(index, event)
            metrics.generated_tokens.inc(builder.generated - before)
            if chunk is not None:
                yield chunk

    async def complete(self) -> dict[str, Any]:
        """The complete response."""
        async with self.deadline(), contextlib.aclosing(self.chunks()) as chunks:
            async for _ in chunks:
                pass
        return self.builder.complete()

    def close(self) -> None:
        """Cancel what the engine has not finished."""
        self.api.worker.cancel(self.job)
        self.api.metrics.seconds.observe(time.monotonic() - self.started)

    @contextlib.asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """A context that raises an error when the request's time is up."""
        left = self.started + self.api.limits.timeout - time.monotonic()
        try:
            async with asyncio.timeout(left):
                yield
        except TimeoutError:
            message = f"the response was not complete after {self.api.limits.timeout:g} seconds: ask for less"
            raise ApiError(504, message, code="timeout") from None


class EventStream(Response):
    """Server-sent events. The status is sent with the first event, so that an early error has its own status."""

    def __init__(self, pending: PendingResponse, include_usage: bool):
        super().__init__(headers=_SSE, media_type="text/event-stream")
        del self.headers["content-length"]
        self.pending, self.include_usage = pending, include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self.pending):
            try:
                await while_connected(receive, self._send(send))
            except ClientDisconnect:
                self.pending.api.metrics.disconnects.inc()

    async def _send(self, send: Send) -> None:
        started = False
        try:
            async with self.pending.deadline(), contextlib.aclosing(self.pending.chunks()) as chunks:
                async for chunk in chunks:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        started = True
                    await self._event(send, {**chunk, "usage": None} if self.include_usage else chunk)
                    # Neither a queued event nor a write yields to the loop, which must see a disconnect.
                    await asyncio.sleep(0)
                if self.include_usage:
                    await self._event(send, self.pending.builder.usage_chunk())
                await self._body(send, b"data: [DONE]\n\n")
                await self._body(send, b"", more=False)
        except ApiError as error:
            if not started:
                raise
            # A client that does not read would block this for ever; without an end, the connection is closed.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ERROR_EVENT_SECONDS):
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
    texts = "POST /v1/completions, POST /v1/chat/completions, or of an encoder POST /v1/embeddings"
    known = f"{texts}, GET /v1/models, GET /health, GET /metrics"
    message = f"there is no {path}: known are {known}" if error.status_code in (404, 405) else str(error.detail)
    return error_response(ApiError(error.status_code, message, headers=error.headers))
