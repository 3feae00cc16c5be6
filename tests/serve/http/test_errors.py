"""Requests that get no answer get a status and a reason, and the server goes on."""

import json
import socket
import threading
from urllib.parse import urlsplit

import pytest

from octavo.serve.http import Limits, running
from tests.serve.http.client import call, connection, metric, post, stream, until
from tests.serve.http.fake import FakeEngine, answer

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def url():
    with running(FakeEngine(), name="fake", limits=Limits(body=2000, choices=4, body_timeout=0.3)) as found:
        yield found


@pytest.fixture
def engine():
    """One that is open again at the end, so that its server can stop."""
    found = FakeEngine(slots=1)
    yield found
    found.gate.set()


def refused(status, found):
    assert set(found["error"]) == {"message", "type", "param", "code"}
    return status, found["error"]["param"], found["error"]["message"]


def test_unknown_paths_methods_and_models(url):
    status, _, found = call(url, "/v1/nothing")
    assert refused(status, found)[0] == 404
    assert "there is no GET /v1/nothing: known are POST /v1/comp" in str(found)
    status, headers, found = call(url, "/v1/completions")
    assert refused(status, found)[0] == 405
    assert headers["allow"] == "POST"
    assert call(url, "/v1/completions/", {"prompt": "a"})[0] == 404
    assert refused(*post(url, prompt="a", model="gpt")) == (
        404,
        "model",
        "there is no model 'gpt' here: this server has 'fake'",
    )
    assert call(url, "/v1/models/gpt")[0] == 404


def test_a_body_that_is_no_json(url):
    status, headers, found = call(url, "/v1/completions", b'{"prompt": ')
    assert refused(status, found)[0] == 400
    assert "the body is no JSON" in found["error"]["message"]
    assert len(headers["x-request-id"]) == 24
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, _, found = call(url, "/v1/completions", b"{}", headers={"Content-Type": kind})
        assert status == 415
        assert "send the header Content-Type: application/json" in found["error"]["message"]
    kinds = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert call(url, "/v1/completions", b'{"prompt": "a"}', headers=kinds)[0] == 200


def test_unknown_fields(url):
    assert refused(*post(url, prompt="a", temprature=1))[:2] == (400, "temprature")


def test_prompts_that_do_not_fit(url):
    assert refused(*post(url, prompt="a" * 64)) == (
        400,
        "prompt",
        "the prompt has 64 tokens, and with max_length=64 there is no room for an answer: shorten it, or use a larger "
        "max_length",
    )
    assert refused(*post(url, prompt="a" * 60, max_tokens=5)) == (
        400,
        "max_tokens",
        "max_tokens is too large: 60 tokens of the prompt and 5 of the answer are more than the server's limit of 64",
    )
    assert post(url, prompt="a" * 60, max_tokens=4)[0] == 200
    assert refused(*post(url, prompt=""))[1:] == (
        "prompt",
        "the prompt is empty: give it at least one token, such as the tokenizer's bos_id",
    )
    for ids in ([256], [-1], [1 << 70]):
        message = refused(*post(url, prompt=ids))[2]
        assert message == "the prompt has a token id outside of the vocabulary: ids are from 0 to 255"


def test_a_conversation_that_the_template_rejects(url):
    status, found = post(url, "/v1/chat/completions", messages=[{"role": "alien", "content": "a"}])
    assert refused(status, found) == (400, "messages", "the template knows no role 'alien'")


def test_bodies_that_are_too_long(url):
    body = json.dumps({"prompt": "a" * 2000}).encode()
    status, headers, found = call(url, "/v1/completions", body)
    assert refused(status, found) == (413, None, "the body is longer than 2000 bytes")
    assert headers["connection"] == "close"
    # Without a length there is nothing to go by but what arrives.
    with connection(url) as conn:
        conn.request("POST", "/v1/completions", (b"x" * 500 for _ in range(8)), JSON, encode_chunked=True)
        assert conn.getresponse().status == 413
    with connection(url) as conn:
        conn.putrequest("POST", "/v1/completions")
        conn.putheader("Content-Type", "application/json")
        conn.putheader("Content-Length", str(10**15))
        conn.endheaders(b"{")
        assert conn.getresponse().status == 413


def test_a_body_that_never_comes(url):
    with connection(url) as conn:
        conn.request("POST", "/v1/completions", b"{", {**JSON, "Content-Length": "100"})
        response = conn.getresponse()
        assert response.status == 408
        assert b"did not arrive within 0.3 seconds" in response.read()


def test_what_is_no_http_breaks_nothing(url):
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as sock:
        sock.sendall(b"\x00\x01 not http\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 400")
    assert call(url, "/health")[0] == 200


def test_the_key():
    with running(FakeEngine(), api_key="secret") as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/models", None), ("/metrics", None)):
                status, sent, found = call(url, path, body, headers=headers)
                assert refused(status, found)[0] == 401
                assert found["error"]["code"] == "invalid_api_key"
                assert sent["www-authenticate"] == "Bearer"
        assert "a wrong key" in str(found)
        good = {"Authorization": "Bearer secret"}
        assert post(url, prompt="a", headers=good)[0] == 200
    with running(FakeEngine(), api_key=["one", "two"]) as url:
        statuses = [
            post(url, prompt="a", headers={"Authorization": f"Bearer {k}"})[0] for k in ("one", "two", "on", "")
        ]
        assert statuses == [200, 200, 401, 401]
        assert call(url, "/health")[0] == 200


def test_a_full_queue(engine):
    engine.gate.clear()
    results = []
    with running(engine, limits=Limits(queue=2)) as url:
        threads = [
            threading.Thread(target=lambda p=p: results.append((p, post(url, prompt=p, max_tokens=3, temperature=0))))
            for p in "abc"
        ]
        for thread in threads:
            thread.start()
        until(lambda: metric(url, "octavo_active_slots") == 1 and metric(url, "octavo_queue_depth") == 2)
        status, headers, found = call(url, "/v1/completions", {"prompt": "d"})
        assert refused(status, found)[0] == 429
        assert headers["retry-after"] == "1"
        assert "3 texts are being generated or wait already, and no more than 3 may" in found["error"]["message"]
        assert found["error"]["type"] == "rate_limit_error"
        engine.gate.set()
        for thread in threads:
            thread.join()
        assert sorted((p, status, found["choices"][0]["text"]) for p, (status, found) in results) == [
            (p, 200, answer(p, 3)) for p in "abc"
        ]
        # What could never fit is refused as a whole, and leaves nothing behind.
        assert post(url, prompt=["a", "b", "c", "d"])[0] == 429
        assert metric(url, "octavo_queue_depth") == 0
        assert post(url, prompt=["a", "b", "c"])[0] == 200


def test_an_answer_that_takes_too_long(engine):
    engine.delay = 0.05
    with running(engine, limits=Limits(timeout=0.3)) as url:
        status, found = post(url, prompt="a", max_tokens=50)
        assert refused(status, found)[0] == 504
        assert found["error"]["message"] == "the response was not complete after 0.3 seconds: ask for less"
        events, done = stream(url, prompt="a", max_tokens=50)
        assert not done
        assert events[0]["choices"]
        assert events[-1]["error"]["code"] == "timeout"
        until(lambda: metric(url, "octavo_active_slots") == 0)
        assert len(engine.cancelled) == 2
        engine.gate.clear()
        assert call(url, "/v1/completions", {"prompt": "a", "stream": True})[0] == 504
        engine.gate.set()
        assert post(url, prompt="a", max_tokens=2)[0] == 200


def test_invalid_requests_of_the_engine_raise(engine):
    engine.refusal = ValueError("the engine wants none of it")
    with running(engine) as url:
        assert refused(*post(url, prompt=["a", "b"])) == (400, None, "the engine wants none of it")
        assert call(url, "/v1/completions", {"prompt": "a", "stream": True})[0] == 400
        engine.refusal = None
        assert post(url, prompt="a", max_tokens=2)[0] == 200
        assert metric(url, "octavo_queue_depth") == 0


def test_a_fault_in_the_server_tells_its_number_and_no_more(engine, caplog):
    engine.tokenizer.encode = lambda text: 1 // 0
    with running(engine) as url:
        status, headers, found = call(url, "/v1/completions", {"prompt": "a"})
        assert refused(status, found)[0] == 500
        assert found["error"]["type"] == "server_error"
        number = headers["x-request-id"]
        message = f"something went wrong in the server; its log tells more of request {number}"
        assert found["error"]["message"] == message
        assert "ZeroDivisionError" in caplog.text
        assert number in caplog.text
        assert call(url, "/health")[0] == 200


def test_a_failed_engine_ends_every_request(engine, caplog):
    engine.gate.clear()
    results = []
    with running(engine) as url:
        bodies = [{"prompt": "a"}, {"prompt": ["b", "c"], "stream": True}, {"prompt": "d", "n": 2}]
        threads = [threading.Thread(target=lambda b=b: results.append(call(url, "/v1/completions", b))) for b in bodies]
        for thread in threads:
            thread.start()
        until(lambda: metric(url, "octavo_queue_depth") == 4)
        engine.failure = RuntimeError("out of memory")
        engine.gate.set()
        for thread in threads:
            thread.join(10)
        assert [status for status, _, _ in results] == [500] * 3
        assert {found["error"]["code"] for _, _, found in results} == {"engine_dead"}
        assert call(url, "/health")[::2] == (503, {"status": "dead"})
        assert refused(*post(url, prompt="a")) == (503, None, "the engine has stopped; restart the server")
        assert metric(url, "octavo_engine_up") == 0
        assert metric(url, "octavo_queue_depth") == 0
    assert "out of memory" in caplog.text


def test_an_engine_that_loses_slots_is_noticed(engine, monkeypatch, caplog):
    monkeypatch.setattr(type(engine), "free_slots", 0)
    with running(engine) as url:
        assert post(url, prompt="a")[0] == 500
        assert call(url, "/health")[0] == 503
    assert "requests wait, but the engine has no free slot" in caplog.text


def test_headers_that_do_not_arrive_close_the_connection():
    """Also where bytes keep coming, and after an answered request."""
    with running(FakeEngine(), name="fake", limits=Limits(header_timeout=0.3)) as url:
        parts = urlsplit(url)
        for sent in (b"", b"GET /health HTTP/1.1\r\nHost", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea"):
            with socket.create_connection((parts.hostname, parts.port), timeout=20) as sock:
                sock.sendall(sent)
                received = b""
                while chunk := sock.recv(4096):
                    received += chunk
                assert (b"200 OK" in received) == sent.endswith(b"GET /hea")
        assert call(url, "/health")[0] == 200
