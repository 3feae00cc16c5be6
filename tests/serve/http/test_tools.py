"""Calls of tools in the texts of models, whole or in pieces."""

import json

import pytest

from octavo.serve.engine import Event
from octavo.serve.http.responses import ChatFormat, ResponseBuilder
from octavo.serve.http.tools import ToolParser

CALL = {"name": "add", "arguments": {"a": 1, "b": "é"}}
HERMES, MISTRAL, BARE = "<tool_call> in a template", "[TOOL_CALLS]", ""


def parsed(text, template, size=3, **options):
    parser = ToolParser(["add", "sub"], template, **options)
    shown = "".join(parser.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = parser.finish()
    return shown + rest, [(call.name, json.loads(call.arguments)) for call in calls]


ADD, SUB = ("add", CALL["arguments"]), ("sub", {})


@pytest.mark.parametrize(
    ("template", "text", "shown", "calls"),
    [
        (HERMES, f"Well. <tool_call>\n{json.dumps(CALL)}\n</tool_call>", "Well. ", [ADD]),
        (HERMES, f'<tool_call>{json.dumps(CALL)}</tool_call>\n<tool_call>{{"name": "sub"}}', "", [ADD, SUB]),
        (HERMES, "a < b <tool", "a < b <tool", []),
        (HERMES, json.dumps(CALL), json.dumps(CALL), []),
        (HERMES, '<tool_call>{"name": "add"', '<tool_call>{"name": "add"', []),
        (HERMES, '<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', []),
        (MISTRAL, f"[TOOL_CALLS] [{json.dumps(CALL)}]", "", [ADD]),
        (BARE, f" {json.dumps(CALL)}", "", [ADD]),
        (BARE, '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "é"}}; {"name": "sub"}', "", [ADD, SUB]),
        (BARE, f"Use {json.dumps(CALL)}", f"Use {json.dumps(CALL)}", []),
        (BARE, '{"name": ["add"]}', '{"name": ["add"]}', []),
        (BARE, '{"name": "add", "arguments": 3}', '{"name": "add", "arguments": 3}', []),
        (BARE, '{"answer": 3}', '{"answer": 3}', []),
        (BARE, "", "", []),
    ],
)  # fmt: skip
def test_calls(template, text, shown, calls):
    for size in (1, 5, 1000):
        assert parsed(text, template, size) == (shown, calls)


def test_text_before_a_call_is_not_held_back():
    parser = ToolParser(["add"], HERMES)
    assert [parser.push(text) for text in ("Let me", " see <", "b <tool_", "call>{")] == ["Let me", " see ", "<b ", ""]


def test_a_single_call():
    text = f"{json.dumps(CALL)} {json.dumps(CALL)}"
    assert parsed(text, BARE)[1] == [ADD, ADD]
    assert parsed(text, BARE, parallel=False)[1] == [ADD]


def test_responses_with_calls():
    def build(texts, finish="stop"):
        parser = ToolParser(["add"], HERMES)
        options = {"echoes": [""], "logprobs": False, "prompt_tokens": 1, "tokenizer": None, "parser": parser}
        builder = ResponseBuilder(ChatFormat(), "m", "id", **options)
        ends = [None] * (len(texts) - 1) + [finish]
        return builder, [builder.add(0, Event(0, 1, t, finish=end)) for t, end in zip(texts, ends, strict=True)]

    builder, chunks = build(["Well. ", "<tool_call>" + json.dumps(CALL), "</tool_call>"])
    (choice,) = builder.complete()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Well. ")
    assert call["function"] == {"name": "add", "arguments": json.dumps(CALL["arguments"], ensure_ascii=False)}
    assert call["id"].startswith("call_")
    assert chunks[1] is None  # held back
    last = chunks[2]["choices"][0]
    assert last["delta"] == {"tool_calls": [{"index": 0, **call}]}
    assert last["finish_reason"] == "tool_calls"
    # What was cut off is text.
    builder, _ = build(["<tool_call>{", '"name"'], "length")
    (choice,) = builder.complete()["choices"]
    assert choice["message"] == {"role": "assistant", "content": '<tool_call>{"name"'}
    assert choice["finish_reason"] == "length"
