"""Clients that leave, and a server that is stopped: nothing is left to do, and nothing hangs."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from octavo.serve.http import Limits, bind, running, serve, url_of
from tests.serve.http.client import call, connection, metric, opened, post, stream, until
from tests.serve.http.fake import FakeEngine, answer

ROOT = Path(__file__).parents[3]


@pytest.fixture
def engine():
    found = FakeEngine(slots=2)
    yield found
    found.gate.set()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_frees_its_slots(engine, streaming):
    engine.delay, engine.max_length = 0.01, 10_000
    with running(engine) as url:
        with opened(url, prompt=["a", "b", "c"], max_tokens=9000, stream=streaming) as sock:
            if streaming:
                assert sock.recv(20).startswith(b"HTTP/1.1 200")
            until(lambda: metric(url, "octavo_active_slots") == 2)
            assert metric(url, "octavo_queue_depth") == 1
        until(lambda: metric(url, "octavo_active_slots") + metric(url, "octavo_queue_depth") == 0)
        until(lambda: metric(url, "octavo_disconnects_total") == 1)
        status = 200 if streaming else 499
        until(lambda: metric(url, f'octavo_requests_total{{path="/v1/completions",status="{status}"}}') == 1)
        assert len(engine.cancelled) == 3
        assert engine.free_slots == 2
        assert post(url, prompt="a", max_tokens=3, temperature=0)[1]["choices"][0]["text"] == answer("a", 3)


def test_a_client_that_leaves_before_its_turn(engine):
    engine.gate.clear()
    with running(engine) as url:
        with opened(url, prompt=["a", "b"]):
            until(lambda: metric(url, "octavo_active_slots") == 2)
            with opened(url, prompt="c"):
                until(lambda: metric(url, "octavo_queue_depth") == 1)
            until(lambda: metric(url, "octavo_disconnects_total") == 1)
            engine.gate.set()
        until(lambda: metric(url, "octavo_active_slots") + metric(url, "octavo_queue_depth") == 0)


def test_a_client_that_leaves_within_its_body(engine):
    with running(engine) as url:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port)) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            sock.sendall(b"Content-Length: 100\r\n\r\n{")
        until(lambda: metric(url, "octavo_disconnects_total") == 1)


def test_a_client_that_does_not_read_holds_no_slot(engine):
    engine.max_length = 200_000
    # Every event has the name, so that some megabytes are more than sockets buffer.
    with running(engine, name="m" * 5000) as url, opened(url, prompt="a", max_tokens=2000, stream=True):
        until(lambda: engine.steps == 2000, seconds=60)
        until(lambda: metric(url, "octavo_active_slots") + metric(url, "octavo_queue_depth") == 0)
        assert metric(url, "octavo_request_seconds_count") == 0, "it was sent whole: it was not enough to block"
        assert post(url, prompt="b", max_tokens=2)[0] == 200


def test_one_connection_serves_many_requests(engine):
    with running(engine) as url, connection(url) as conn:
        for prompt in "abc":
            body = json.dumps({"prompt": prompt, "max_tokens": 2, "temperature": 0})
            conn.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            assert json.load(conn.getresponse())["choices"][0]["text"] == answer(prompt, 2)


def served(engine, limits, during):
    """What the client got that runs while a server is stopped, and the seconds that stopping took."""
    found = []
    with running(engine, limits=limits) as url:
        thread = threading.Thread(target=lambda: found.append(during(url)))
        thread.start()
        until(lambda: engine.busy and engine.steps)
        began = time.monotonic()
    seconds = time.monotonic() - began
    thread.join()
    return found[0], seconds


def test_stopping_lets_answers_finish(engine):
    engine.delay = 0.02
    (status, found), _ = served(engine, Limits(), lambda url: post(url, prompt=["a", "b", "c"], temperature=0))
    assert status == 200
    assert [c["text"] for c in found["choices"]] == [answer(p, 16) for p in "abc"]


def test_stopping_gives_up_after_a_while(engine):
    engine.delay, engine.max_length = 0.02, 100_000
    limits = Limits(grace=0.4)
    (status, found), seconds = served(engine, limits, lambda url: post(url, prompt="a", max_tokens=90_000))
    assert status == 503
    assert found["error"]["message"] == "the server is being stopped"
    assert 0.3 < seconds < 5
    (events, done), _ = served(engine, limits, lambda url: stream(url, prompt="a", max_tokens=90_000))
    assert not done
    assert events[-1]["error"]["code"] == "stopping"


def test_no_threads_are_left(engine):
    before = threading.active_count()
    for _ in range(3):
        with running(engine) as url:
            post(url, prompt="a")
        assert threading.active_count() == before


def test_a_port_that_is_taken():
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on port {port} of '127.0.0.1': .*choose another by --port"):
            bind("127.0.0.1", port)
    with pytest.raises(OSError, match=r"cannot listen on 'no\.such\.host\.invalid': "):
        bind("no.such.host.invalid", 0)


def test_addresses_are_urls():
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    with contextlib.suppress(OSError), bind("::1", 0) as sock:
        assert url_of(sock).startswith("http://[::1]:")


def main():
    """A server in a process of its own."""
    engine = FakeEngine(delay=0.02, max_length=100_000)
    sock = bind("127.0.0.1", 0)
    serve(engine, sock, name="fake", limits=Limits(grace=1.0), ready=lambda: print(url_of(sock), flush=True))
    print("ended", engine.busy, flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_server_in_good_order(number):
    code = "from tests.serve.http.test_leaving import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            found = []
            short = threading.Thread(target=lambda: found.append(post(url, prompt="a", max_tokens=20)))
            short.start()
            with opened(url, prompt="b", max_tokens=90_000, stream=True) as sock:
                until(lambda: metric(url, "octavo_active_slots") == 2)
                process.send_signal(number)
                short.join()
                content = b""
                while data := sock.recv(1 << 16):
                    content += data
            assert process.wait(10) == 0
        finally:
            process.kill()
        assert process.stdout.read() == "ended False\n"
    assert found[0][0] == 200
    assert found[0][1]["usage"]["completion_tokens"] == 20
    assert b'"code":"stopping"' in content
    with pytest.raises(ConnectionRefusedError):
        call(url, "/health")


def test_a_keep_alive_connection_does_not_hold_a_server_up(engine):
    with running(engine) as url:
        parts = urlsplit(url)
        conn = http.client.HTTPConnection(parts.hostname, parts.port)
        conn.request("GET", "/health")
        assert conn.getresponse().read() == b'{"status":"ok"}'
        began = time.monotonic()
    assert time.monotonic() - began < 3
    conn.close()
