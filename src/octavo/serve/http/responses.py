"""Responses in the formats of OpenAI's API, complete or as the chunks of a stream."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.serve.http.errors import ApiError
from octavo.serve.http.tools import Call, ToolParser


@dataclasses.dataclass(frozen=True)
class Token:
    """A generated token: its text, the offset of that in the choice, its log probability, and alternatives to it."""

    text: str
    offset: int
    logprob: float | None
    """None for the first token of a prompt."""
    top: tuple[tuple[str, float], ...]


class CompletionFormat:
    """The format of /v1/completions: of a complete `choice`, and of its `delta` in a chunk."""

    id_prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def choice(self, text: str, tokens: Sequence[Token] | None, calls: Sequence[Call] = ()) -> dict[str, Any]:
        return {"text": text, "logprobs": self._logprobs(tokens)}

    def delta(
        self, text: str, tokens: Sequence[Token] | None, first: bool, calls: Sequence[Call] = ()
    ) -> dict[str, Any]:
        return self.choice(text, tokens)

    def _logprobs(self, tokens: Sequence[Token] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                None if token.logprob is None else {text: _finite(value) for text, value in token.top}
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }


class ChatFormat:
    """The format of /v1/chat/completions."""

    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, text: str, tokens: Sequence[Token] | None, calls: Sequence[Call] = ()) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": [call.to_dict() for call in calls]}
        return {"message": message, "logprobs": self._logprobs(tokens)}

    def delta(
        self, text: str, tokens: Sequence[Token] | None, first: bool, calls: Sequence[Call] = ()
    ) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": i, **call.to_dict()} for i, call in enumerate(calls)]
        return {"delta": delta, "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: Sequence[Token] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        content = [
            {**self._entry(token.text, token.logprob), "top_logprobs": [self._entry(*other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content}

    def _entry(self, text: str, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode(errors="replace"))}


type ResponseFormat = CompletionFormat | ChatFormat


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity, the log probability of an impossible token."""
    return logprob if logprob is None or math.isfinite(logprob) else -9999.0


@dataclasses.dataclass
class _Choice:
    text: str = ""
    tokens: list[Token] = dataclasses.field(default_factory=list)
    finish: str | None = None
    started: bool = False
    parser: ToolParser | None = None
    calls: Sequence[Call] = ()


class ResponseBuilder:
    """Builds a response, or its chunks, from the events of its choices."""

    def __init__(
        self,
        fmt: ResponseFormat,
        model: str,
        request_id: str,
        *,
        echoes: Sequence[str],
        logprobs: bool,
        prompt_tokens: int,
        tokenizer: Any,
        echoed: Sequence[Sequence[int]] = (),
        parser: ToolParser | None = None,
    ):
        self.format, self.logprobs, self.prompt_tokens, self.generated = fmt, logprobs, prompt_tokens, 0
        self._tokenizer, self._echoed = tokenizer, echoed
        self._head = {"id": f"{fmt.id_prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._choices = [_Choice(echo, parser=None if parser is None else parser.fresh()) for echo in echoes]

    def add(self, index: int, event: Any) -> dict[str, Any] | None:
        """Add an event of a choice, and return its chunk; None if that would be empty."""
        if event.finish == "error":
            raise ApiError(500, "the engine could not finish this response", code="engine_error")
        if event.finish == "cancelled":
            raise ApiError(503, "the response was cancelled before it was complete", code="cancelled")
        choice = self._choices[index]
        new = [] if event.token < 0 else [self._token(event, len(choice.text))]
        self.generated += len(new)
        if event.prompt and self._echoed:
            new = [*self._prompt_tokens(self._echoed[index], event.prompt), *new]
        added, finish = event.text, event.finish
        if choice.parser is not None:
            added = choice.parser.push(added)
            if finish is not None:
                rest, choice.calls = choice.parser.finish()
                added, finish = added + rest, "tool_calls" if choice.calls and finish == "stop" else finish
        text = added if choice.started else choice.text + added
        first, choice.started = not choice.started, True
        choice.text += added
        choice.finish = finish
        tokens = new if self.logprobs else None
        choice.tokens += tokens or ()
        if not (text or tokens or finish or first):
            return None
        delta = self.format.delta(text, tokens, first, choice.calls)
        return self._object(self.format.chunk_name, [{"index": index, **delta, "finish_reason": finish}])

    def _prompt_tokens(self, ids: Sequence[int], scores: Sequence[Any]) -> list[Token]:
        """The tokens of a prompt, whose first has no log probability."""
        decode, offset, found = self._tokenizer.decode, 0, []
        for token, (logprob, top) in zip(ids, [(None, ()), *scores], strict=True):
            text = decode([token])
            found.append(Token(text, offset, logprob, tuple((decode([other]), value) for other, value in top)))
            offset += len(text)
        return found

    def _token(self, event: Any, offset: int) -> Token:
        if not self.logprobs:
            return Token("", offset, 0.0, ())
        text = lambda token: self._tokenizer.decode([token])  # noqa: E731
        top = tuple((text(token), value) for token, value in event.top)
        return Token(text(event.token), offset, event.logprob, top)

    def usage(self) -> dict[str, int]:
        """Counts of tokens so far."""
        total = self.prompt_tokens + self.generated
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.generated, "total_tokens": total}

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream with `include_usage`."""
        return {**self._object(self.format.chunk_name, []), "usage": self.usage()}

    def complete(self) -> dict[str, Any]:
        """The complete response."""
        choices = [
            {
                "index": i,
                **self.format.choice(choice.text, choice.tokens if self.logprobs else None, choice.calls),
                "finish_reason": choice.finish,
            }
            for i, choice in enumerate(self._choices)
        ]
        return {**self._object(self.format.object_name, choices), "usage": self.usage()}

    def _object(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": list(choices)}
