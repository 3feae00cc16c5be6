"""The shapes of answers, over HTTP, from an engine whose answers are known."""

import pytest

from octavo.serve.http import Limits, running
from tests.serve.http.client import call, metric, post, stream
from tests.serve.http.fake import FakeEngine, answer

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def url():
    with running(FakeEngine(slots=3), name="fake", limits=Limits(choices=8)) as found:
        yield found


def test_a_completion(url):
    status, found = post(url, model="fake", prompt="ab", max_tokens=5, temperature=0)
    assert status == 200
    assert found.pop("id").startswith("cmpl-")
    assert found.pop("created") > 1_700_000_000
    assert found == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": answer("ab", 5), "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7},
    }


def test_prompts_and_n_are_choices_in_order(url):
    _, found = post(url, prompt=["ab", "xyz"], n=2, max_tokens=3, seed=5)
    texts = [choice["text"] for choice in found["choices"]]
    assert texts == [answer("ab", 3, 5), answer("ab", 3, 6), answer("xyz", 3, 5), answer("xyz", 3, 6)]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}


def test_token_ids_are_prompts_too(url):
    _, found = post(url, prompt=[[97, 98], [99]], max_tokens=2, temperature=0, echo=True)
    assert [c["text"] for c in found["choices"]] == ["ab" + answer("ab", 2), "c" + answer("c", 2)]


def test_a_text_has_sixteen_tokens_unless_it_is_said(url):
    assert post(url, prompt="ab", temperature=0)[1]["choices"][0]["text"] == answer("ab", 16)
    # Or as many as there is room for: the limit is 64.
    assert post(url, prompt="a" * 60, temperature=0)[1]["usage"]["completion_tokens"] == 4


def test_without_a_seed_answers_differ(url):
    texts = {post(url, prompt="ab", max_tokens=8)[1]["choices"][0]["text"] for _ in range(20)}
    assert len(texts) > 1


def test_a_stop_text_ends_a_text(url):
    third = answer("ab", 3)[2]
    _, found = post(url, prompt="ab", max_tokens=9, temperature=0, stop=[third, "!"])
    assert found["choices"][0]["text"] == answer("ab", 2)
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == 3


def test_logprobs_of_a_completion(url):
    _, found = post(url, prompt="ab", max_tokens=2, temperature=0, logprobs=2)
    assert found["choices"][0]["logprobs"] == {
        "tokens": list(answer("ab", 2)),
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"a": -1.0, "b": -2.0}] * 2,
        "text_offset": [0, 1],
    }


def test_a_stream_of_completions(url):
    events, done = stream(url, prompt=["ab", "cd"], max_tokens=4, temperature=0, echo=True)
    assert done
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "text_completion" and "usage" not in event for event in events)
    texts, ends = ["", ""], {}
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    assert texts == ["ab" + answer("ab", 4), "cd" + answer("cd", 4)]
    assert ends == {0: "length", 1: "length"}


def test_a_stream_may_end_with_usage(url):
    events, done = stream(url, prompt="ab", max_tokens=2, stream_options={"include_usage": True}, logprobs=0)
    assert done
    assert [event["usage"] for event in events[:-1]] == [None, None]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 4
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events[:-1]] == [[0], [1]]


def test_a_chat(url):
    messages = [{"role": "user", "content": "hi"}]
    status, found = post(url, CHAT, messages=messages, max_completion_tokens=3, temperature=0, logprobs=True)
    text = answer("u:hi;", 3)
    assert status == 200
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == "length"
    first = {"token": text[0], "logprob": -0.5, "bytes": [ord(text[0])], "top_logprobs": []}
    assert choice["logprobs"]["content"][0] == first


def test_a_chat_may_fill_what_room_there_is(url):
    _, found = post(url, CHAT, messages=[{"role": "user", "content": "hi"}])
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 59, "total_tokens": 64}


def test_a_stream_of_a_chat(url):
    events, done = stream(url, CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=3, temperature=0)
    text = answer("u:hi;", 3)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert done
    assert deltas == [{"role": "assistant", "content": text[0]}, {"content": text[1]}, {"content": text[2]}]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "length"]


def test_models_and_health(url):
    assert call(url, "/health")[::2] == (200, {"status": "ok"})
    _, _, found = call(url, "/v1/models")
    (model,) = found["data"]
    assert (found["object"], model["id"], model["object"], model["max_model_len"]) == ("list", "fake", "model", 64)
    assert call(url, "/v1/models/fake")[2] == model


def test_metrics_count(url):
    names = ("octavo_prompt_tokens_total", "octavo_generated_tokens_total", "octavo_request_seconds_count")
    requests = 'octavo_requests_total{path="/v1/completions",status="200"}'
    before = [metric(url, name) for name in (*names, requests)]
    post(url, prompt="abc", max_tokens=7)
    after = [metric(url, name) for name in (*names, requests)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 7, 1, 1]
    assert (metric(url, "octavo_slots"), metric(url, "octavo_active_slots"), metric(url, "octavo_engine_up")) == (
        3,
        0,
        1,
    )
    assert (metric(url, "octavo_draft_proposed_tokens"), metric(url, "octavo_draft_accepted_tokens")) == (0, 0)
    call(url, "/some/path/that/varies")
    _, headers, text = call(url, "/metrics", raw=True)
    assert b"varies" not in text
    assert b'path="other",status="404"' in text
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in text.decode().splitlines():
        assert line.startswith("# ") or (len(line.split(" ")) == 2 and float(line.split(" ")[1]) >= 0)


def test_texts_share_the_slots():
    engine = FakeEngine(slots=3, delay=0.005)
    with running(engine) as url:
        _, found = post(url, prompt=["a", "b", "c", "d", "e"], max_tokens=8, temperature=0)
    assert [c["text"] for c in found["choices"]] == [answer(p, 8) for p in "abcde"]
    assert engine.most_at_once == 3
    assert engine.steps <= 17


def test_a_text_that_the_engine_could_not_finish_is_an_error():
    engine = FakeEngine()
    engine.ends[2] = "error"
    with running(engine) as url:
        status, found = post(url, prompt="a", max_tokens=8)
        assert status == 500
        assert found["error"]["code"] == "engine_error"
        events, done = stream(url, prompt="a", max_tokens=8)
        assert not done
        assert len(events) == 3
        assert events[-1]["error"]["message"] == "the engine could not finish this response"
        engine.ends.clear()
        assert post(url, prompt="a", max_tokens=8)[0] == 200
