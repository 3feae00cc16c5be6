"""What a request may say, and how it is told that it said something else."""

import json

import pytest

from octavo.serve.http.errors import ApiError
from octavo.serve.http.limits import Limits
from octavo.serve.http.parse import parse
from octavo.serve.http.requests import ChatCompletionRequest, CompletionRequest

LIMITS = Limits(choices=4, stops=2)
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def completion(body):
    return parse(CompletionRequest, body, LIMITS)


def asked(**fields):
    return completion(json.dumps({"prompt": "a", **fields}).encode())


def chatted(**fields):
    return parse(ChatCompletionRequest, json.dumps({"messages": HELLO, **fields}).encode(), LIMITS)


def test_a_request_is_understood():
    found = asked(n=2, max_tokens=5, temperature=1, top_k=3, stop="x", seed=-1, stream=True, logprobs=2, user="me")
    assert found.prompt == ("a",)
    assert (found.n, found.token_limit, found.stop, found.seed) == (2, 5, ("x",), -1)
    assert (found.stream, found.num_logprobs, found.include_usage) == (True, 2, False)
    assert found.sampling == {"temperature": 1.0, "top_k": 3}
    assert asked(stream=True, stream_options={"include_usage": True}).include_usage


def test_null_is_as_good_as_nothing():
    fields = ("n", "max_tokens", "temperature", "stop", "stream", "logprobs", "suffix", "best_of", "stream_options")
    assert asked(**dict.fromkeys(fields)) == asked()


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hi", ("hi",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_have_four_forms(given, prompts):
    assert asked(prompt=given).prompt == prompts


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"prompt": 3}, "prompt", "token ids, got a number"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"prompt": ["a", 1]}, "prompt", "mixed, empty or of another type"),
        ({"prompt": [[1], []]}, "prompt", "mixed, empty or of another type"),
        ({"prompt": [True]}, "prompt", "mixed, empty or of another type"),
        ({"prompt": ["a"] * 5}, "prompt", "5 prompts times n=1 is more than 4"),
        ({"prompt": ["a"] * 3, "n": 2}, "prompt", "3 prompts times n=2 is more than 4"),
        ({"n": 0}, "n", "n is at least 1, got 0"),
        ({"n": 5}, "n", "n is at most 4, got 5"),
        ({"n": 1.5}, "n", "n is a whole number, got a number"),
        ({"n": True}, "n", "n is a whole number, got a boolean"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens is a whole number, got a string"),
        ({"max_tokens": 0}, "max_tokens", "got 0"),
        ({"temperature": 2.5}, "temperature", "temperature is at most 2, got 2.5"),
        ({"temperature": 10**400}, "temperature", "got a huge number"),
        ({"temperature": []}, "temperature", "temperature is a number, got a list"),
        ({"temperature": True}, "temperature", "temperature is a number, got a boolean"),
        ({"n": 10**400}, "n", "n is at most 4, got a huge number"),
        ({"top_k": 10**400}, "top_k", "top_k is at most 1.07374e+09, got a huge number"),
        ({"prompt": {"a": 1}}, "prompt", "token ids, got an object"),
        ({"stream": 1}, "stream", "stream is a boolean, got a number"),
        ({"presence_penalty": False}, "presence_penalty", "presence_penalty is a number, got a boolean"),
        ({"tempature": None}, "tempature", "unknown field 'tempature': did you mean 'temperature'"),
        ({"top_p": 0}, "top_p", "top_p is above 0, got 0"),
        ({"min_p": -0.1}, "min_p", "min_p is at least 0, got -0.1"),
        ({"top_k": -1}, "top_k", "got -1"),
        ({"seed": 1 << 63}, "seed", "seed is below 9223372036854775808, got 9223372036854775808"),
        ({"stop": ["a", "b", "c"]}, "stop", "stop is at most 2 strings, got 3"),
        ({"stop": ""}, "stop", "stop has an empty string"),
        ({"stop": [1]}, "stop", "stop is a string, got a number"),
        ({"stop": {}}, "stop", "stop is a string or a list of strings, got an object"),
        ({"stream": "yes"}, "stream", "stream is a boolean, got a string"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options needs stream to be true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "stream_options.x is unknown"),
        ({"logprobs": 6}, "logprobs", "logprobs is at most 5, got 6"),
        ({"logprobs": True}, "logprobs", "logprobs is a whole number, got a boolean"),
        ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty is at most 2, got 2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty", "frequency_penalty is at least -2, got -3"),
        ({"logit_bias": {"1": 2}}, "logit_bias", "logit_bias is not supported"),
        ({"best_of": 2}, "best_of", "best_of is not supported"),
        ({"suffix": "x"}, "suffix", "suffix is not supported"),
        ({"max_token": 2}, "max_token", "unknown field 'max_token': did you mean 'max_tokens'"),
        ({"messages": HELLO}, "messages", "unknown field 'messages'"),
    ],
)
def test_what_is_wrong_is_named(fields, param, text):
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert text in caught.value.message
    assert caught.value.body()["error"]["type"] == "invalid_request_error"


def test_fields_that_ask_for_nothing_are_fine():
    assert asked(logit_bias={}, best_of=1, suffix="") == asked()
    assert chatted(tools=[], tool_choice="auto", response_format={"type": "text"}, store=False) == chatted()


def test_tools_and_formats_are_understood():
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
    assert [tool.to_dict() for tool in chatted(tools=tools).used_tools] == tools
    assert (chatted(tools=tools).required_tools, chatted(tools=tools, tool_choice="none").used_tools) == ({}, [])
    assert list(chatted(tools=tools, tool_choice="required").required_tools) == ["f", "g"]
    named = {"type": "function", "function": {"name": "g"}}
    assert chatted(tools=tools, tool_choice=named).required_tools == {"g": {"type": "object"}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    given = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    assert [message.to_dict() for message in chatted(messages=given, tools=tools).messages][1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": [1]}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}, "strict": True}}
    assert chatted(response_format=schema).response_format.json_schema.content == {"type": "null"}
    assert chatted(response_format={"type": "json_object"}).response_format.json_schema is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'"prompt"',
        b'{"prompt": "a",}',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a"}x',
        b"[" * 200_000,
        b'{"n": ' + b"1" * 5000 + b"}",
        '{"prompt": "a"}'.encode("utf-16"),
    ],
    ids=range(12),
)
def test_what_is_no_json_object_raises(body):
    with pytest.raises(ApiError, match="the body is") as caught:
        completion(body)
    assert caught.value.status == 400
    assert caught.value.code == "bad_json"


def test_half_a_character_is_no_text():
    for body in (b'{"prompt": "\\ud800"}', b'{"prompt": "a", "stop": "\\udc00"}'):
        with pytest.raises(ApiError, match="half of a surrogate pair"):
            completion(body)
    for content in ("\ud800", [{"type": "text", "text": "\udc00"}]):
        with pytest.raises(ApiError, match="half of a surrogate pair") as caught:
            chatted(messages=[{"role": "user", "content": content}])
        assert caught.value.param.startswith("messages[0].content")
    with pytest.raises(ApiError, match="unknown field"):
        completion(b'{"\\ud800": 1}')


def test_of_equal_keys_the_last_counts():
    assert completion(b'{"prompt": "a", "prompt": "b"}').prompt == ("b",)
    with pytest.raises(ApiError, match="prompt is a string"):
        completion(b'{"prompt": "a", "prompt": 3}')


def test_a_huge_literal_is_not_finite():
    with pytest.raises(ApiError, match="temperature should be a finite number"):
        completion(b'{"prompt": "a", "temperature": 1e999}')


def test_a_conversation_is_understood():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = chatted(
        messages=[{"role": "system", "content": "s", "name": "x"}, {"role": "user", "content": parts}],
        max_completion_tokens=7,
        logprobs=True,
        top_logprobs=3,
    )
    messages = [{"role": "system", "content": "s", "name": "x"}, {"role": "user", "content": "ab"}]
    assert [message.to_dict() for message in found.messages] == messages
    assert (found.token_limit, found.num_logprobs) == (7, 3)
    assert chatted(logprobs=True).num_logprobs == 0
    assert chatted(logprobs=False).num_logprobs is None
    assert chatted(messages=[{**HELLO[0], "tool_calls": [], "refusal": None}]) == chatted()


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"messages": None}, "messages", "messages is missing"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": "hi"}, "messages", "messages is a list, got a string"),
        ({"messages": ["hi"]}, "messages[0]", "messages[0] is an object, got a string"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content", "content is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "type is not supported: this server takes 'text'",
        ),
        ({"messages": [{**HELLO[0], "tool_calls": [1]}]}, "messages[0].tool_calls[0]", "is an object, got a number"),
        (
            {"messages": [{**HELLO[0], "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "3"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "arguments is the text of a JSON object",
        ),
        ({"tools": [{}]}, "tools[0].type", "tools[0].type is missing"),
        ({"tools": [TOOL, TOOL]}, "tools", "tools has two tools of one name"),
        ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools[0].function.name", "should match pattern"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", 'tool_choice is "auto", "none", "required" or'),
        ({"tool_choice": "required"}, "tool_choice", "requires a call, but there are no tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "names 'g', which tools has not",
        ),
        (
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
            "is not supported with a tool_choice that requires a call",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "takes 'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "has json_schema with the type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "schema is missing",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs to be true"),
        ({"logprobs": 2}, "logprobs", "logprobs is a boolean, got a number"),
        ({"max_tokens": 2, "max_completion_tokens": 2}, "max_tokens", "give one of them"),
        ({"prompt": "x"}, "prompt", "unknown field 'prompt'"),
        ({"echo": True}, "echo", "unknown field 'echo'"),
    ],
)
def test_what_is_wrong_in_a_conversation_is_named(fields, param, text):
    with pytest.raises(ApiError) as caught:
        chatted(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert text in caught.value.message


def test_limits_are_checked():
    assert Limits.from_json(LIMITS.to_json()) == LIMITS
    with pytest.raises(ValueError, match="choices is at least 1, got 0"):
        Limits(choices=0)
    with pytest.raises(ValueError, match="timeout is at least 0, got nan"):
        Limits(timeout=float("nan"))
