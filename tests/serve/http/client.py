"""Plain HTTP for tests: calls that give status, headers and JSON, and the events of a stream."""

import contextlib
import http.client
import json
import socket
import time
from urllib.parse import urlsplit


@contextlib.contextmanager
def connection(url, timeout=120):
    parts = urlsplit(url)
    found = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    try:
        yield found
    finally:
        found.close()


def call(url, path, body=None, *, method=None, headers=None, raw=False):
    """Status, headers and the JSON of an answer; the body is sent as JSON unless it is bytes."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    sent = {} if data is None else {"Content-Type": "application/json"}
    with connection(url) as conn:
        conn.request(method or ("GET" if data is None else "POST"), path, data, {**sent, **(headers or {})})
        response = conn.getresponse()
        content = response.read()
        return response.status, dict(response.headers), content if raw else json.loads(content)


def post(url, path="/v1/completions", headers=None, **body):
    """The status and JSON of an answer to fields."""
    status, _, content = call(url, path, body, headers=headers)
    return status, content


def stream(url, path="/v1/completions", **body):
    """The events of a stream, and whether it ended as it should."""
    status, headers, content = call(url, path, {**body, "stream": True}, raw=True)
    assert status == 200, content
    assert {k.lower(): v for k, v in headers.items()}["content-type"].startswith("text/event-stream")
    lines = content.decode().split("\n\n")
    assert lines.pop() == ""
    done = lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[: len(lines) - done]], done


def opened(url, **body):
    """A connection on which a request was sent and nothing read."""
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(10)
    sock.connect((parts.hostname, parts.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    sock.sendall(f"{head}\r\n\r\n".encode() + data)
    return sock


def metric(url, name):
    """A number of /metrics."""
    _, _, text = call(url, "/metrics", raw=True)
    lines = (line.split(" ") for line in text.decode().splitlines() if not line.startswith("#"))
    return {key: float(value) for key, value in lines}.get(name, 0.0)


def until(condition, seconds=10):
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.01)
