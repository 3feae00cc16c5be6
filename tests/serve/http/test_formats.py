"""Formats of answers over HTTP, from a small model with random parameters: JSON, schemas, calls of tools, echoes."""

import functools
import json

import numpy as np
import pytest

from octavo.data import ByteTokenizer
from octavo.models import ModelConfig, abstract_params
from octavo.serve import Engine
from octavo.serve.http import running
from tests.arrays import random_params
from tests.serve.http.client import metric, post, stream

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("find", "get")]


@pytest.fixture(scope="module")
def engine():
    tokenizer = ByteTokenizer()
    tokenizer.template = TEMPLATE
    sizes = {"emb_dim": 16, "num_layers": 1, "num_query_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_dim": 32}
    config = ModelConfig(vocab_size=tokenizer.vocab_size, scan_layers=False, **sizes)
    params = random_params(abstract_params(config))
    return Engine(config, params, slots=4, max_length=1024, chunk=32, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def url(engine):
    with running(engine, name="tiny") as found:
        yield found


def is_valid(found):
    return found["a"] in ("x", "y") and list(found) in (["a"], ["a", "b"]) and type(found.get("b", True)) is bool


def test_answers_in_a_schema(url):
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    status, found = post(url, CHAT, messages=HELLO, response_format=asked, n=4, seed=1, max_tokens=400)
    assert status == 200
    ends = [choice["finish_reason"] for choice in found["choices"]]
    assert ends.count("stop") >= 2  # a random model may write whitespace to the end
    for choice, end in zip(found["choices"], ends, strict=True):
        assert end == "length" or is_valid(json.loads(choice["message"]["content"]))


def test_answers_in_json(url):
    options = {"response_format": {"type": "json_object"}, "n": 4, "seed": 3, "max_tokens": 60}
    _, found = post(url, CHAT, messages=HELLO, **options)
    texts = [choice["message"]["content"] for choice in found["choices"]]
    assert all(text.lstrip().startswith("{") for text in texts)
    for choice in found["choices"]:
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_a_call_that_is_required(url):
    options = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 500}
    for seed in range(5):
        _, found = post(url, CHAT, messages=HELLO, seed=seed, **options)
        (choice,) = found["choices"]
        if choice["finish_reason"] == "tool_calls":
            break
    (called,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert called["function"]["name"] in ("find", "get")
    assert is_valid(json.loads(called["function"]["arguments"]))
    events, done = stream(url, CHAT, messages=HELLO, seed=seed, **options)
    assert done
    last = events[-1]["choices"][0]
    assert last["delta"]["tool_calls"][0]["function"] == called["function"]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == ""
    history = [*HELLO, choice["message"], {"role": "tool", "tool_call_id": called["id"], "content": "3"}]
    assert post(url, CHAT, messages=history, tools=TOOLS, max_tokens=2)[0] == 200


def test_echo_with_logprobs(url, engine):
    prompt = "Once upon a time"
    asked = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0}
    _, found = post(url, **asked)
    (choice,) = found["choices"]
    logprobs = choice["logprobs"]
    ids = engine.tokenizer.encode(prompt)
    assert [len(part) for part in logprobs.values()] == [len(ids) + 3] * 4
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert "".join(logprobs["tokens"][: len(ids)]) == prompt
    assert logprobs["text_offset"][: len(ids)] == [0, *range(len(prompt))]
    want = engine.logprobs([ids])[0]
    np.testing.assert_allclose(logprobs["token_logprobs"][1 : len(ids)], want, atol=1e-4)
    assert all(len(top) in (1, 2) for top in logprobs["top_logprobs"][1:])
    # As without the prompt, whose answer is the same.
    assert choice["text"] == prompt + post(url, **{**asked, "echo": False})[1]["choices"][0]["text"]
    events, _ = stream(url, **asked)
    assert [x for event in events for x in event["choices"][0]["logprobs"]["token_logprobs"]] == logprobs[
        "token_logprobs"
    ]


def test_a_prefix_is_reused(url):
    asked = {"prompt": "a" * 80, "temperature": 0, "max_tokens": 4, "frequency_penalty": 0.5, "presence_penalty": -1}
    first, before = post(url, **asked), metric(url, "octavo_reused_prompt_tokens")
    assert first[0] == 200
    assert post(url, **asked)[1]["choices"] == first[1]["choices"]
    assert metric(url, "octavo_reused_prompt_tokens") == before + 64


def test_what_is_not_supported_is_named(url, engine):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "\ud800+"}}}
    asked = {"type": "json_schema", "json_schema": {"schema": schema}}
    status, found = post(url, CHAT, messages=HELLO, response_format=asked)
    assert (status, found["error"]["param"]) == (400, "response_format.json_schema.schema")
    assert "cannot be used: the keyword 'pattern' at #/properties/a is not supported" in found["error"]["message"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "minProperties": 1}}}]
    status, found = post(url, CHAT, messages=HELLO, tools=tools, tool_choice="required")
    assert (status, found["error"]["param"]) == (400, "tools")
    assert "the keyword 'minProperties' at #" in found["error"]["message"]
    nested = {"type": "object", "default": functools.reduce(lambda inner, _: [inner], range(300), [])}
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested}}]
    assert post(url, CHAT, messages=HELLO, tools=tools, max_tokens=1)[0] == 200
    for template, text in (
        ("{{ messages[0].content }}", "chat template knows no tools"),
        ("{{ messages[0].content + tools[0] }}", "the model's chat template cannot write these messages"),
    ):
        engine.tokenizer.template = template
        try:
            status, found = post(url, CHAT, messages=HELLO, tools=TOOLS)
        finally:
            engine.tokenizer.template = TEMPLATE
        assert (status, found["error"]["param"]) == (400, "tools")
        assert text in found["error"]["message"]
