"""An engine without a model: what it makes follows from the prompt, and delays and failures come when asked for."""

import collections
import dataclasses
import threading
import time
from types import SimpleNamespace

from octavo.serve.engine import Engine, Event


class Letters:
    """A tokenizer of bytes, with a template for conversations that knows two roles."""

    eos_ids, bos_id = (0,), None

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")

    def chat(self, messages):
        for message in messages:
            if message["role"] not in ("user", "assistant"):
                raise ValueError(f"the template knows no role {message['role']!r}")
        return self.encode("".join(f"{m['role'][0]}:{m['content']};" for m in messages))


def letter(prompt, seed, i):
    """The i-th token of an answer."""
    return 97 + (sum(prompt) + 3 * (seed or 0) + 7 * i) % 26


def answer(prompt, count, seed=0):
    """The text of an answer to a prompt."""
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return "".join(chr(letter(ids, seed, i)) for i in range(count))


class FakeEngine:
    """Makes a letter per step for each request. Those at temperature 0 have the seed 0."""

    def __init__(self, *, slots=2, max_length=64, delay=0.0):
        self.slots, self.max_length, self.delay = slots, max_length, delay
        self.tokenizer, self.config = Letters(), SimpleNamespace(vocab_size=256)
        self.gate = threading.Event()
        """Steps wait for it."""
        self.gate.set()
        self.failure = None
        """An exception that the next step raises."""
        self.refusal = None
        """An exception that adding a request raises."""
        self.ends = {}
        """By the number of a token how a text ends with it, whatever was asked for."""
        self.most_at_once = self.steps = self.reused = self.proposed = self.accepted = 0
        self.cancelled = []
        self._running, self._waiting = {}, collections.deque()

    @property
    def busy(self):
        return bool(self._running or self._waiting)

    @property
    def active(self):
        return len(self._running)

    @property
    def free_slots(self):
        return self.slots - self.active

    def check(self, prompt):
        Engine.check(self, prompt)

    def add(self, request):
        if self.refusal is not None:
            raise self.refusal
        assert len(request.prompt) + request.params.max_tokens <= self.max_length
        self._waiting.append(request)
        self._admit()

    def _admit(self):
        while self._waiting and self.free_slots:
            request = self._waiting.popleft()
            self._running[request.request_id] = (request, 0)
        self.most_at_once = max(self.most_at_once, self.active)

    def cancel(self, request_id):
        known = [*self._running, *(request.request_id for request in self._waiting)]
        if request_id in known:
            self.cancelled.append(request_id)
        self._running.pop(request_id, None)
        self._waiting = collections.deque(r for r in self._waiting if r.request_id != request_id)

    def step(self, most=1):
        self.gate.wait()
        time.sleep(self.delay)
        self.steps += 1
        if self.failure is not None:
            raise self.failure
        self._admit()
        events = []
        for request_id, (request, i) in list(self._running.items()):
            params = request.params
            token = letter(request.prompt, params.seed if params.temperature else 0, i)
            finish = self.ends.get(i) or ("length" if i + 1 == params.max_tokens else None)
            if chr(token) in params.stop:
                finish = "stop"
            text = "" if finish == "stop" else chr(token)
            top = tuple((97 + k, -1.0 - k) for k in range(params.logprobs))
            self._running[request_id] = (request, i + 1)
            if finish is not None:
                del self._running[request_id]
            made = Event(request_id=request_id, token=token, text=text, logprob=-0.5 - i, finish=finish)
            events.append(dataclasses.replace(made, top=top))
        return events
