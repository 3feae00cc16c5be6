"""The thread that owns the engine, and what stands between it and an event loop.

Requests go to the thread by a queue; what it makes comes back by one call into the loop for each step. The loop's side
keeps the account of who waits for what, so that all of it is done by one thread, and so is all that touches the engine.
"""

import asyncio
import collections
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from octavo.serve.http.errors import ApiError

_log = logging.getLogger("octavo.serve")

_BURST = 4
"""Tokens that the engine may make before it listens again: a few hundredths of a second."""


@runtime_checkable
class Engine(Protocol):
    """What the thread needs of an engine; see `octavo.serve.Engine`."""

    def add(self, request: Any) -> None: ...
    def cancel(self, request_id: Any) -> None: ...
    def step(self, most: int = 1) -> Sequence[Any]: ...
    @property
    def busy(self) -> bool: ...
    @property
    def free_slots(self) -> int: ...


class Job:
    """What one HTTP request asked of the engine: several texts, whose events come in the order they are made.

    Iterating gives `(index, event)` until all texts are complete, or raises what went wrong.
    """

    def __init__(self, requests: Sequence[Any]):
        self.requests = tuple(requests)
        self.open = {request.request_id: i for i, request in enumerate(requests)}
        self._events: asyncio.Queue[tuple[int, Any] | Exception | None] = asyncio.Queue()

    def put(self, event: Any) -> None:
        """An event of one of the texts."""
        index = self.open[event.request_id]
        if event.finish is not None:
            del self.open[event.request_id]
        self._events.put_nowait((index, event))
        if not self.open:
            self._events.put_nowait(None)

    def fail(self, error: Exception) -> None:
        """Nothing more will come, for this reason."""
        self.open.clear()
        self._events.put_nowait(error)

    def __aiter__(self) -> "Job":
        return self

    async def __anext__(self) -> tuple[int, Any]:
        found = await self._events.get()
        if found is None:
            raise StopAsyncIteration
        if isinstance(found, Exception):
            raise found
        return found


class Worker:
    """Runs an engine in a thread of its own, for one event loop.

    At most `slots` texts run and `waiting` more may wait. `start`, `submit`, `cancel` and `abort` are called by the
    loop's thread.
    """

    def __init__(self, engine: Engine, *, slots: int, waiting: int):
        self.slots, self.waiting_limit = slots, waiting
        self.active = 0
        """Texts that are in the engine."""
        self.error: BaseException | None = None
        """What the thread died of."""
        self._engine = engine
        self._inbox: queue.SimpleQueue[tuple[Callable[[Any], None] | None, Any]] = queue.SimpleQueue()
        self._jobs: dict[Any, Job] = {}
        self._waiting: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self._running: set[Any] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)

    # On the loop's side.

    def start(self) -> None:
        """Begin to work for the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, seconds: float = 30.0) -> None:
        """End the thread, after the step that it is at."""
        self._inbox.put((None, None))
        if self._thread.ident is not None:
            self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether requests would be worked on."""
        return self.error is None and self._thread.is_alive()

    @property
    def pending(self) -> int:
        """Texts that wait or run."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Texts that wait for a slot."""
        return max(0, len(self._jobs) - self.active)

    def submit(self, requests: Sequence[Any]) -> Job:
        """Queue requests, all of them or none."""
        self.check()
        if self.pending + len(requests) > self.slots + self.waiting_limit:
            raise ApiError(
                429,
                f"{self.pending} texts are being made or wait already, and no more than "
                f"{self.slots + self.waiting_limit} may: try again soon",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        job = Job(requests)
        for request in requests:
            self._jobs[request.request_id] = job
            self._inbox.put((self._accept, request))
        return job

    def check(self) -> None:
        """Raise if the engine is gone."""
        if not self.alive:
            raise ApiError(503, "the engine has stopped; restart the server", code="engine_dead")

    def cancel(self, job: Job) -> None:
        """Give up what is left of a job; its slots become free with the next step."""
        for request in job.requests:
            if request.request_id in self._jobs:
                self._inbox.put((self._drop, request.request_id))

    def abort(self, error: Exception) -> None:
        """Fail everything that waits or runs."""
        for job in set(self._jobs.values()):
            self.cancel(job)
            job.fail(error)

    def _deliver(self, events: Sequence[Any], gone: Sequence[Any]) -> None:
        for event in events:
            job = self._jobs.get(event.request_id)
            if job is None:
                continue
            if event.finish is not None:
                del self._jobs[event.request_id]
            if event.request_id in job.open:
                job.put(event)
        for request_id, error in gone:
            job = self._jobs.pop(request_id, None)
            if job is not None and error is not None and job.open:
                job.fail(error)

    def _died(self) -> None:
        jobs = set(self._jobs.values())
        self._jobs.clear()
        self.active = 0
        for job in jobs:
            if job.open:
                job.fail(ApiError(500, "the engine failed while it made this answer", code="engine_dead"))

    # On the engine's side.

    def _run(self) -> None:
        try:
            while self._listen():
                self._admit()
                if self._engine.busy:
                    self._send(self._engine.step(_BURST))
                elif self._waiting:
                    raise RuntimeError(f"the engine is idle, but none of its {self.slots} slots is free")
        except BaseException as error:
            self.error = error
            _log.critical("the engine has failed; this server answers 503 until it is restarted", exc_info=error)
            self._call(self._died)

    def _listen(self) -> bool:
        """Take what came in; wait for it if there is nothing else to do. False when there is no more to come."""
        wait = not self._engine.busy and not self._waiting
        while True:
            try:
                todo, what = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if todo is None:
                return False
            todo(what)
            wait = False

    def _accept(self, request: Any) -> None:
        self._waiting[request.request_id] = request

    def _drop(self, request_id: Any) -> None:
        if request_id in self._running:
            self._engine.cancel(request_id)
            self._running.discard(request_id)
        elif self._waiting.pop(request_id, None) is None:
            return
        self._send((), [(request_id, None)])

    def _admit(self) -> None:
        while self._waiting and self._engine.free_slots > 0:
            request_id, request = self._waiting.popitem(last=False)
            try:
                self._engine.add(request)
            except ValueError as error:
                self._send((), [(request_id, ApiError(400, str(error)))])
            else:
                self._running.add(request_id)
        self.active = len(self._running)

    def _send(self, events: Sequence[Any], gone: Sequence[Any] = ()) -> None:
        events = [event for event in events if event.request_id in self._running]
        for event in events:
            if event.finish is not None:
                self._running.discard(event.request_id)
        self.active = len(self._running)
        if events or gone:
            self._call(self._deliver, events, gone)

    def _call(self, fn: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(fn, *args)
