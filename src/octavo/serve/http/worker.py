"""The thread that runs the engine, and its connection to an event loop.

The event loop sends requests to the thread through a queue; the thread sends the events of each step back by one
callback into the loop. Only the thread touches the engine, and only the loop touches the jobs.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from octavo.serve.http.errors import ApiError

_log = logging.getLogger("octavo.serve")

_BURST = 4
"""The most tokens per call of the engine: new requests and cancellations wait for a few hundredths of a second."""


class Job:
    """The engine's requests of one HTTP request. Iterating gives `(index, event)` until all are finished.

    An error of the engine or the server is raised by the iteration.
    """

    def __init__(self, requests: Sequence[Any]):
        self.requests = tuple(requests)
        self.open = {request.request_id: i for i, request in enumerate(requests)}
        self._events: asyncio.Queue[tuple[int, Any] | Exception | None] = asyncio.Queue()

    def put(self, event: Any) -> None:
        """Add an event of one of the requests."""
        index = self.open[event.request_id]
        if event.finish is not None:
            del self.open[event.request_id]
        self._events.put_nowait((index, event))
        if not self.open:
            self._events.put_nowait(None)

    def fail(self, error: Exception) -> None:
        """End the iteration with an error."""
        self.open.clear()
        self._events.put_nowait(error)

    def __aiter__(self) -> "Job":
        return self

    async def __anext__(self) -> tuple[int, Any]:
        item = await self._events.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item


class Worker:
    """Runs an `octavo.serve.Engine` in a thread of its own, for one event loop.

    The engine queues requests beyond its slots; `queue_limit` bounds how many. `start`, `submit`, `cancel` and `abort`
    are called from the event loop.
    """

    def __init__(self, engine: Any, *, queue_limit: int):
        self.slots, self.queue_limit = engine.slots, queue_limit
        self.error: BaseException | None = None
        """The exception that ended the thread."""
        self._engine = engine
        self._inbox: queue.SimpleQueue[tuple[Callable[[Any], None] | None, Any]] = queue.SimpleQueue()
        self._jobs: dict[Any, Job] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)

    # In the event loop.

    def start(self) -> None:
        """Start the thread, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, seconds: float = 30.0) -> None:
        """End the thread after its current step."""
        self._inbox.put((None, None))
        if self._thread.ident is not None:
            self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self.error is None and self._thread.is_alive()

    @property
    def active(self) -> int:
        """Requests in slots."""
        return self._engine.active if self._jobs else 0

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return max(0, len(self._jobs) - self.active)

    @property
    def reused(self) -> int:
        """Tokens of prompts that were in the cache already."""
        return self._engine.reused

    @property
    def proposed(self) -> int:
        """Tokens that a draft proposed."""
        return self._engine.proposed

    @property
    def accepted(self) -> int:
        """Those of them that were generated."""
        return self._engine.accepted

    def submit(self, requests: Sequence[Any]) -> Job:
        """Queue all of the requests, or raise an error and queue none."""
        self.check()
        limit = self.slots + self.queue_limit
        if len(self._jobs) + len(requests) > limit:
            raise ApiError(
                429,
                f"{len(self._jobs)} texts are being generated or wait already, and no more than {limit} may: "
                "try again soon",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        job = Job(requests)
        for request in requests:
            self._jobs[request.request_id] = job
            self._inbox.put((self._add, request))
        return job

    def check(self) -> None:
        """Raise an error if the engine has failed."""
        if not self.alive:
            raise ApiError(503, "the engine has stopped; restart the server", code="engine_dead")

    def cancel(self, job: Job) -> None:
        """Cancel the unfinished requests of a job; their slots are free at the next step."""
        for request in job.requests:
            if request.request_id in self._jobs:
                self._inbox.put((self._cancel, request.request_id))

    def abort(self, error: Exception) -> None:
        """Cancel all requests, and fail their jobs."""
        for job in set(self._jobs.values()):
            self.cancel(job)
            job.fail(error)

    def _deliver(self, events: Sequence[Any]) -> None:
        for event in events:
            job = self._jobs.get(event.request_id)
            if job is None:
                continue
            if event.finish is not None:
                del self._jobs[event.request_id]
            if event.request_id in job.open:
                job.put(event)

    def _remove(self, request_id: Any, error: Exception | None = None) -> None:
        job = self._jobs.pop(request_id, None)
        if job is not None and error is not None and job.open:
            job.fail(error)

    def _fail_all(self) -> None:
        error = ApiError(500, "the engine failed while it generated this response", code="engine_dead")
        for request_id in list(self._jobs):
            self._remove(request_id, error)

    # In the thread.

    def _run(self) -> None:
        try:
            while self._receive():
                if not self._engine.busy:
                    continue
                if events := self._engine.step(_BURST):
                    self._call(self._deliver, events)
                elif self._engine.busy and not self._engine.active:
                    raise RuntimeError("requests wait, but the engine has no free slot and runs none of them")
        except BaseException as error:
            self.error = error
            _log.critical("the engine has failed; the server responds with 503 until it is restarted", exc_info=error)
            self._call(self._fail_all)

    def _receive(self) -> bool:
        """Handle messages from the loop; wait for one if the engine is idle. False when the thread is to end."""
        block = not self._engine.busy
        while True:
            try:
                handle, argument = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if handle is None:
                return False
            handle(argument)
            block = False

    def _add(self, request: Any) -> None:
        try:
            self._engine.add(request)
        except ValueError as error:
            self._call(self._remove, request.request_id, ApiError(400, str(error)))

    def _cancel(self, request_id: Any) -> None:
        self._engine.cancel(request_id)
        self._call(self._remove, request_id)

    def _call(self, fn: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(fn, *args)
