"""What a request may say: the fields of each endpoint, their checks, and what they amount to together."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from octavo.numerics import nearest_names
from octavo.serve.http import checks
from octavo.serve.http.checks import Check, refuse
from octavo.serve.http.errors import ApiError
from octavo.serve.http.limits import Limits

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ZERO = checks.only(0, 0.0)


def _shared(limits: Limits) -> dict[str, Check]:
    return {
        "model": checks.text,
        "max_tokens": checks.integer(1, 1 << 30),
        "temperature": checks.number(0, 2),
        "top_p": checks.number(0, 1, above=True),
        "top_k": checks.integer(0, 1 << 30),
        "min_p": checks.number(0, 1),
        "repetition_penalty": checks.number(0, 10, above=True),
        "n": checks.integer(1, limits.choices),
        "stop": checks.texts(limits.stops),
        "seed": checks.integer(-(1 << 63), (1 << 63) - 1),
        "stream": checks.flag,
        "stream_options": checks.stream_options,
        "presence_penalty": _ZERO,
        "frequency_penalty": _ZERO,
        "logit_bias": checks.only({}),
        "user": checks.ignored,
    }


def completion_fields(limits: Limits) -> dict[str, Check]:
    """Those of /v1/completions."""
    return {
        **_shared(limits),
        "prompt": checks.prompt,
        "echo": checks.flag,
        "logprobs": checks.integer(0, 5),
        "suffix": checks.only(""),
        "best_of": checks.only(1),
    }


def chat_fields(limits: Limits) -> dict[str, Check]:
    """Those of /v1/chat/completions."""
    return {
        **_shared(limits),
        "messages": checks.messages,
        "max_completion_tokens": checks.integer(1, 1 << 30),
        "logprobs": checks.flag,
        "top_logprobs": checks.integer(0, 20),
        "response_format": checks.only({"type": "text"}),
        "modalities": checks.only(["text"]),
        "tools": checks.only([]),
        "tool_choice": checks.only("none"),
        "functions": checks.only([]),
        "function_call": checks.only("none"),
        "parallel_tool_calls": checks.ignored,
        "store": checks.only(False),
        "metadata": checks.ignored,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """A request that was understood."""

    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[Mapping[str, str], ...] = ()
    """Instead of prompts, in a chat."""
    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    logprobs: int | None = None
    """How many alternatives to tell beside each token; None for no logarithms at all."""

    @property
    def chat(self) -> bool:
        """Whether it is a conversation."""
        return bool(self.messages)


def parse(body: bytes, fields: Mapping[str, Check]) -> dict[str, Any]:
    """The fields that a body has, checked; null is as good as nothing."""
    try:
        found = json.loads(body.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, of numbers with thousands of digits
        what = str(error) if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else "it is not plain enough"
        raise ApiError(400, f"the body is no JSON in UTF-8: {what}", code="bad_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, 'the body is JSON, but no object: it looks like {"prompt": ...}', code="bad_json")
    values = {}
    for name, value in found.items():
        if name not in fields:
            shown = name[:60].encode(errors="replace").decode()
            raise ApiError(400, f"unknown field {shown!r}: {nearest_names(shown, tuple(fields))}", param=shown)
        if value is not None:
            values[name] = fields[name](name, value)
    return values


def _no_constant(name: str) -> None:
    raise json.JSONDecodeError(f"{name} is no number of JSON", name, 0)


def completion(body: bytes, limits: Limits) -> Ask:
    """A request for completions, understood."""
    values = parse(body, completion_fields(limits))
    if "prompt" not in values:
        raise refuse("prompt", "is missing")
    if values.get("echo") and values.get("logprobs") is not None:
        raise refuse("echo", "cannot be had together with logprobs: those of a prompt are not computed")
    prompts = values["prompt"]
    if len(prompts) * values.get("n", 1) > limits.choices:
        raise refuse(
            "prompt" if len(prompts) > 1 else "n",
            f"asks for too much: {len(prompts)} prompts times n={values.get('n', 1)} is more than {limits.choices}",
            code="out_of_range",
        )
    return Ask(
        prompts=prompts,
        echo=values.get("echo", False),
        logprobs=values.get("logprobs"),
        **_common(values, values.get("max_tokens")),
    )


def chat(body: bytes, limits: Limits) -> Ask:
    """A request for the next message of a conversation, understood."""
    values = parse(body, chat_fields(limits))
    if "messages" not in values:
        raise refuse("messages", "is missing")
    if values.get("top_logprobs") and not values.get("logprobs"):
        raise refuse("top_logprobs", "needs logprobs to be true")
    if "max_tokens" in values and "max_completion_tokens" in values:
        raise refuse("max_tokens", "is the old name of max_completion_tokens: give one of them")
    return Ask(
        messages=values["messages"],
        logprobs=values.get("top_logprobs", 0) if values.get("logprobs") else None,
        **_common(values, values.get("max_completion_tokens", values.get("max_tokens"))),
    )


def _common(values: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
    if "stream_options" in values and not values.get("stream"):
        raise refuse("stream_options", "needs stream to be true")
    return {
        "model": values.get("model"),
        "n": values.get("n", 1),
        "max_tokens": max_tokens,
        "sampling": {name: values[name] for name in _SAMPLING if name in values},
        "stop": values.get("stop", ()),
        "seed": values.get("seed"),
        "stream": values.get("stream", False),
        "include_usage": values.get("stream_options", False),
    }
