"""OpenAI's own Python client against every endpoint: what it parses and raises is what it does with OpenAI's server."""

import json

import numpy as np
import pytest

from octavo.serve.http import Limits, running
from tests.serve.http.test_embeddings import Lengths
from tests.serve.http.test_formats import HELLO, SCHEMA, TOOLS, engine, is_valid

openai = pytest.importorskip("openai", reason="the oracles group is not installed: pip install openai")

__all__ = ["engine"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(engine):
    with (
        running(engine, name="tiny", api_key="secret", limits=Limits(queue=4)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as found,
    ):
        yield found


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("other")


def test_completions(client):
    fields = {"model": "tiny", "prompt": ["ab", "c"], "max_tokens": 6, "seed": 3, "logprobs": 2, "echo": True}
    extra = {"min_p": 0.01, "repetition_penalty": 1.1, "top_k": 40}
    found = client.completions.create(**fields, presence_penalty=0.5, extra_body=extra)
    assert [choice.index for choice in found.choices] == [0, 1]
    assert [choice.text[: len(p)] for choice, p in zip(found.choices, ("ab", "c"), strict=True)] == ["ab", "c"]
    for choice, count in zip(found.choices, (2, 1), strict=True):
        scores = choice.logprobs
        assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.text_offset) <= 1 + count + 6  # 1 is BOS
        assert scores.token_logprobs[0] is None
        assert all(score <= 0 for score in scores.token_logprobs[1:])
        assert all(len(top) >= 2 for top in scores.top_logprobs[1:])
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_a_stream_of_completions(client):
    fields = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**fields)
    *pieces, last = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (last.choices, last.usage) == ([], whole.usage)


def test_chats(client):
    fields = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 6, "seed": 1}
    whole = client.chat.completions.create(**fields, n=2, logprobs=True, top_logprobs=3, frequency_penalty=0.1)
    assert [choice.message.role for choice in whole.choices] == ["assistant"] * 2
    for choice in whole.choices:
        assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in choice.logprobs.content)
    plain = client.chat.completions.create(**fields)
    pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    assert "".join(piece.delta.content or "" for piece in pieces) == plain.choices[0].message.content
    assert pieces[-1].finish_reason == plain.choices[0].finish_reason


def test_answers_in_a_schema(client):
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    fields = {"model": "tiny", "messages": HELLO, "n": 4, "seed": 1, "max_tokens": 400}
    found = client.chat.completions.create(**fields, response_format=asked)
    whole = [choice for choice in found.choices if choice.finish_reason == "stop"]
    assert whole
    assert all(is_valid(json.loads(choice.message.content)) for choice in whole)


def test_calls_of_tools(client):
    fields = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "n": 4, "seed": 1, "max_tokens": 400}
    found = client.chat.completions.create(**fields, tool_choice={"type": "function", "function": {"name": "get"}})
    calls = [call for choice in found.choices for call in choice.message.tool_calls or ()]
    assert calls
    for call in calls:
        assert (call.type, call.function.name) == ("function", "get")
        assert is_valid(json.loads(call.function.arguments))
    # What the model called and what the tool said are messages of the next request.
    said = {"role": "assistant", "tool_calls": [calls[0].model_dump()]}
    answer = {"role": "tool", "tool_call_id": calls[0].id, "content": "42"}
    more = client.chat.completions.create(model="tiny", messages=[*HELLO, said, answer], tools=TOOLS, max_tokens=4)
    assert more.choices[0].finish_reason in ("length", "stop", "tool_calls")


def test_errors_are_those_of_the_client(client):
    ask = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="max_tokens") as raised:
        ask(model="tiny", messages=HELLO, max_tokens=0)
    assert raised.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError, match="other"):
        ask(model="other", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny", prompt=["a"] * 32, max_tokens=400)


def test_embeddings():
    with running(Lengths(), name="lengths") as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        texts = ["ab", "xyz"]
        for form in ({}, {"encoding_format": "float"}):  # the client asks for base64 where nothing is said
            found = client.embeddings.create(model="lengths", input=texts, **form)
            vectors = np.asarray([one.embedding for one in found.data], np.float32)
            np.testing.assert_array_equal(vectors, Lengths().embed(texts))
        assert found.usage.prompt_tokens == 5
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="lengths", input=[])
