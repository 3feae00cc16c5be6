"""Random HTTP requests to a server on loopback: an answer, or an error that says what is wrong; and nothing is left.

A defect is a status of 500 or more, an answer that is not what its endpoint answers, a stream that does not end as it
should, a text that still runs when all answers have arrived, or memory that grows from request to request.
"""

import atexit
import functools
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import numpy as np

from octavo.models import ModelConfig, init_params
from octavo.serve import Engine
from octavo.serve.http import Limits, running
from tests.fuzz.configs import mutated
from tests.fuzz.runner import Case, DefectError, Fuzzer
from tests.serve.common import Bytes
from tests.serve.http.client import metric, until

PATHS = ("/v1/completions", "/v1/chat/completions")
OTHERS = (
    "/health",
    "/metrics",
    "/v1/models",
    "/v1/models/model",
    "/v1/models/%00",
    "/v1/embeddings",
    "/",
    "/v1/é",
    "*",
)
TEXTS = ("a", "Once upon a time", "", "été 水 \U0001f600", "\x00", "\ud800", "x" * 90, "x" * 5000, "\n\n", '{"a": 1}')
NUMBERS = (0, 1, 2, -1, 0.5, 1.0, 1e-9, 1e308, -0.0, 2**31, 2**63, 10**400, True, None, "1", [], {})
SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "string", "maxLength": 3}, {"enum": ["a", 1, None]}, {"$ref": "#/nowhere"}, {"type": "what"}, {}, True, [],
    {"$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}}, "$ref": "#/$defs/n"},
)  # fmt: skip
FIELDS: dict[str, tuple[Any, ...]] = {
    "model": ("model", None, "other", 1),
    "max_tokens": (3, 8, 0, 200, *NUMBERS),
    "temperature": (0, 0.7, 2, *NUMBERS),
    "top_p": (0.1, 0.9, *NUMBERS),
    "top_k": (1, 5, 10**6, *NUMBERS),
    "min_p": (0.1, 0.5, *NUMBERS),
    "repetition_penalty": (1.1, 1.5, *NUMBERS),
    "presence_penalty": (1.5, -1, *NUMBERS),
    "frequency_penalty": (-2, 1, *NUMBERS),
    "n": (1, 2, 3, *NUMBERS),
    "seed": NUMBERS,
    "stop": ("a", ["a", "bc"], ["x"] * 20, [1], "", [""], None, {}),
    "stream": (True, False, True, False, 1, "yes"),
    "stream_options": ({"include_usage": True}, {"include_usage": 1}, {}, [], None),
    "logprobs": (True, False, 0, 1, 5, 6, -1),
    "top_logprobs": (0, 3, 20, 21, "1"),
    "echo": (True, False, 1),
    "logit_bias": ({}, None, {"1": 5}),
    "user": ("me", 1, None),
    "unknown": (1, None),
    "prompt": (
        [1, 2, 3], ["a", "b"], *TEXTS, [[1], [2, 3]], [], [-1], [300], [1.5], ["a", 1], {"a": 1}, None, ["a"] * 40,
    ),
    "response_format": (
        {"type": "json_object"}, *({"type": "json_schema", "json_schema": {"schema": schema}} for schema in SCHEMAS),
        {"type": "text"}, {"type": "xml"}, {"type": "json_schema"}, "json",
    ),
    "tools": (
        [{"type": "function", "function": {"name": "f", "parameters": SCHEMAS[0]}}], [], [{}], "f",
        *([{"type": "function", "function": {"name": name}}] for name in ("f", "", "a b", "x" * 99)),
    ),
    "tool_choice": ("auto", "none", "required", {"type": "function", "function": {"name": "f"}}, "f", 1),
    "max_completion_tokens": (1, 4, 0, -1, 10**9),
}  # fmt: skip
OF_CHAT = ("response_format", "tools", "tool_choice", "max_completion_tokens", "top_logprobs")
HEADERS = ("text/plain", "application/json; charset=utf-16", "APPLICATION/JSON", "", "application/json")
MOST_GROWTH = 96 << 20
"""Bytes by which the process may grow after the first thousand requests."""


def draw(rng: np.random.Generator) -> Case:
    def pick(values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    if rng.random() < 0.05:
        return {"method": pick(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS")), "path": pick(OTHERS), "body": ""}
    path, most = pick(PATHS), None if rng.random() < 0.5 else 2  # the first values of a field are good ones
    body: dict[str, Any] = {"max_tokens": pick((1, 2, 4))}
    if path == PATHS[0]:
        body["prompt"] = pick((TEXTS if rng.random() < 0.7 else FIELDS["prompt"])[:most])
    else:
        count = pick((1, 2, 0)[:most])
        body["messages"] = [
            {"role": pick(("user", "assistant", "x")), "content": pick(TEXTS[:most])} for _ in range(count)
        ]
    known = [name for name in FIELDS if (name in OF_CHAT) <= (path == PATHS[1]) and name != "prompt"]
    for name in rng.choice(known, rng.integers(0, 4), replace=False):
        body[str(name)] = pick(FIELDS[str(name)][:most])
    if rng.random() < 0.05:
        body[pick(list(FIELDS))] = pick(TEXTS)
    text = json.dumps(body)
    for _ in range(int(rng.integers(1, 4)) if most is None and rng.random() < 0.5 else 0):
        text = mutated(rng, text)
    case: Case = {"method": "POST", "path": path, "body": text}
    if rng.random() < 0.05:
        case["type"] = pick(HEADERS)
    if rng.random() < 0.04:
        case["leaves"] = pick(("at once", "in the body", "in the headers"))
    return case


class _Tokenizer(Bytes):
    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        return self.encode(f"{json.dumps(tools)[:20] if tools else ''}") + super().chat(messages)


def serve() -> None:
    """Serve a small model, and print the URL, until standard input ends."""
    sizes = {"emb_dim": 16, "num_layers": 1, "num_query_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_dim": 32}
    config = ModelConfig(vocab_size=257, scan_layers=False, **sizes)
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))
    engine = Engine(config, params, slots=4, max_length=96, chunk=32, tokenizer=_Tokenizer())
    engine.warm_up()
    with running(engine, limits=Limits(body=1 << 16, choices=8, header_timeout=5, body_timeout=5)) as url:
        print(url, flush=True)
        sys.stdin.read()


class _Server:
    """A server in a process of its own, and what it may not leave behind."""

    def __init__(self):
        command = [sys.executable, "-c", "from tests.fuzz.requests import serve; serve()"]
        # The allocator of users: that of the tests keeps what is freed.
        environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self.close)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise RuntimeError("the server did not start")
        self.requests, self.bytes = 0, 0
        parts = urlsplit(self.url)
        self.address = (str(parts.hostname), int(parts.port or 0))
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """End the server, which lets running requests finish."""
        self.process.communicate(timeout=60)

    def send(self, case: Case) -> tuple[int, str, bytes]:
        """The status, content type and body of an answer; connections are kept alive as long as they can be."""
        connection = self._connection or http.client.HTTPConnection(*self.address, timeout=60)
        self._connection = None
        headers = {"Content-Type": case.get("type", "application/json")} if case["method"] == "POST" else {}
        connection.request(
            case["method"], case["path"].replace("é", "%C3%A9"), case["body"].encode("utf-8", "surrogatepass"), headers
        )
        response = connection.getresponse()
        content = response.read()
        if response.will_close:
            connection.close()
        else:
            self._connection = connection
        return response.status, response.headers.get("content-type", ""), content

    def leave(self, case: Case) -> None:
        """Send a part of a request, or all of it, and close the connection."""
        body = case["body"].encode("utf-8", "surrogatepass")
        head = (
            f"POST {case['path']} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        data = f"{head}\r\n\r\n".encode() + body
        part = {"at once": len(data), "in the body": len(data) - len(body) // 2, "in the headers": len(head) // 2}
        with socket.create_connection(self.address, timeout=10) as sock:
            sock.sendall(data[: part[case["leaves"]]])

    def check_left(self) -> None:
        """Raise if a text still runs, or memory grew, every few hundred requests."""
        self.requests += 1
        if self.requests % 500:
            return
        until(lambda: metric(self.url, "octavo_active_slots") == metric(self.url, "octavo_queue_depth") == 0, 30)
        memory = Path(f"/proc/{self.process.pid}/statm")
        pages = int(memory.read_text().split()[1]) if memory.exists() else 0
        if self.requests == 1000:
            self.bytes = pages * 4096
        if self.requests > 1000 and pages * 4096 - self.bytes > MOST_GROWTH:
            raise DefectError(f"{self.requests} requests took {(pages * 4096 - self.bytes) >> 20} MiB")


server = functools.cache(_Server)


def check(case: Case) -> str:
    found = server()
    if "leaves" in case:
        found.leave(case)
        found.check_left()
        return "left"
    status, kind, content = found.send(case)
    found.check_left()
    if status >= 500 or status == 429:
        raise DefectError(f"status {status}: {content[:2000]!r}")
    if case["method"] == "HEAD":
        return f"HEAD {status}"
    if status >= 400:
        _check_error(status, content)
    elif kind.startswith("text/event-stream"):
        _check_stream(content)
        return "stream"
    elif case["path"] in PATHS:
        _check_answer(_json(content), case["path"])
    return str(status)


def _json(data: bytes | str) -> Any:
    def reject(name: str) -> Any:
        raise DefectError(f"{name} is no JSON")

    try:
        return json.loads(data, parse_constant=reject)
    except ValueError:
        raise DefectError(f"no JSON: {data[:500]!r}") from None


def _check_error(status: int, content: bytes) -> None:
    error = _json(content).get("error", {})
    if not (isinstance(error.get("message"), str) and error["message"] and isinstance(error.get("type"), str)):
        raise DefectError(f"{status} without a message: {content[:500]!r}")


def _check_stream(content: bytes) -> None:
    events = content.decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        raise DefectError(f"the stream ends with {content[-300:]!r}")
    for event in events[:-2]:
        if not event.startswith("data: ") or "error" in _json(event[6:]):
            raise DefectError(f"an event of the stream is {event[:500]!r}")


def _check_answer(answer: Any, path: str) -> None:
    usage, choices = answer["usage"], answer["choices"]
    if usage["prompt_tokens"] + usage["completion_tokens"] != usage["total_tokens"]:
        raise DefectError(f"usage does not add up: {usage}")
    for i, choice in enumerate(choices):
        text = choice["text"] if path == PATHS[0] else choice["message"]["content"]
        if choice["index"] != i or choice["finish_reason"] not in ("stop", "length", "tool_calls"):
            raise DefectError(f"choice {i} is {choice}")
        if not isinstance(text, str) and not choice.get("message", {}).get("tool_calls"):
            raise DefectError(f"choice {i} has no text: {choice}")


def shrink(case: Case) -> Iterator[Case]:
    try:
        body = json.loads(case["body"])
    except ValueError:
        body = None
    if isinstance(body, dict):
        for name in body:
            yield case | {"body": json.dumps({k: v for k, v in body.items() if k != name})}
    for extra in ("leaves", "type"):
        if extra in case:
            yield {k: v for k, v in case.items() if k != extra}


REQUESTS = Fuzzer("requests", draw, check, shrink)
