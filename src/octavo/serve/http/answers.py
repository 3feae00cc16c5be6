"""Answers in the shapes of OpenAI's API: whole, or in pieces as they are made."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from octavo.serve.http.errors import ApiError


@dataclasses.dataclass(frozen=True)
class Token:
    """A token that was made: its text, where that begins in the answer, its logarithm, and alternatives to it."""

    text: str
    offset: int
    logprob: float
    top: tuple[tuple[str, float], ...]


@runtime_checkable
class Shape(Protocol):
    """How one kind of answer is written."""

    prefix: str
    whole: str
    chunk: str

    def choice(self, text: str, tokens: Sequence[Token] | None) -> dict[str, Any]:
        """The content of a whole choice."""
        ...

    def piece(self, text: str, tokens: Sequence[Token] | None, first: bool) -> dict[str, Any]:
        """The content of a piece of a choice."""
        ...


class CompletionShape:
    """That of /v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def choice(self, text: str, tokens: Sequence[Token] | None) -> dict[str, Any]:
        return {"text": text, "logprobs": self._logprobs(tokens)}

    def piece(self, text: str, tokens: Sequence[Token] | None, first: bool) -> dict[str, Any]:
        return self.choice(text, tokens)

    def _logprobs(self, tokens: Sequence[Token] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [{text: _finite(value) for text, value in token.top} for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


class ChatShape:
    """That of /v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, text: str, tokens: Sequence[Token] | None) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}, "logprobs": self._logprobs(tokens)}

    def piece(self, text: str, tokens: Sequence[Token] | None, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"delta": delta, "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: Sequence[Token] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        content = [
            {**self._one(token.text, token.logprob), "top_logprobs": [self._one(*other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content}

    def _one(self, text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode(errors="replace"))}


def _finite(logprob: float) -> float:
    """JSON has no infinity, which is the logarithm of what cannot be."""
    return logprob if math.isfinite(logprob) else -9999.0


@dataclasses.dataclass
class _Choice:
    text: str = ""
    tokens: list[Token] = dataclasses.field(default_factory=list)
    finish: str | None = None
    begun: bool = False


class Answer:
    """An answer in the making, from the events of its texts."""

    def __init__(
        self,
        shape: Shape,
        model: str,
        request_id: str,
        *,
        echoes: Sequence[str],
        logprobs: bool,
        prompt_tokens: int,
        tokenizer: Any,
    ):
        self.shape, self.logprobs, self.prompt_tokens, self.generated = shape, logprobs, prompt_tokens, 0
        self._tokenizer = tokenizer
        self._head = {"id": f"{shape.prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._choices = [_Choice(echo) for echo in echoes]

    def add(self, index: int, event: Any) -> dict[str, Any] | None:
        """Take an event; the chunk that tells of it, if there is anything to tell."""
        if event.finish == "error":
            raise ApiError(500, "the engine could not finish this answer", code="engine_error")
        if event.finish == "cancelled":
            raise ApiError(503, "the answer was given up before it was complete", code="cancelled")
        choice = self._choices[index]
        made = [] if event.token < 0 else [self._token(event, len(choice.text))]
        self.generated += len(made)
        text = event.text if choice.begun else choice.text + event.text
        first, choice.begun = not choice.begun, True
        choice.text += event.text
        choice.finish = event.finish
        tokens = made if self.logprobs else None
        choice.tokens += tokens or ()
        if not (text or tokens or event.finish or first):
            return None
        piece = self.shape.piece(text, tokens, first)
        return self._object(self.shape.chunk, [{"index": index, **piece, "finish_reason": event.finish}])

    def _token(self, event: Any, offset: int) -> Token:
        if not self.logprobs:
            return Token("", offset, 0.0, ())
        name = lambda token: self._tokenizer.decode([token])  # noqa: E731
        top = tuple((name(token), value) for token, value in event.top)
        return Token(name(event.token), offset, event.logprob, top)

    def usage(self) -> dict[str, int]:
        """Tokens so far."""
        total = self.prompt_tokens + self.generated
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.generated, "total_tokens": total}

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that tells what was used."""
        return {**self._object(self.shape.chunk, []), "usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        """The answer, complete."""
        choices = [
            {
                "index": i,
                **self.shape.choice(choice.text, choice.tokens if self.logprobs else None),
                "finish_reason": choice.finish,
            }
            for i, choice in enumerate(self._choices)
        ]
        return {**self._object(self.shape.whole, choices), "usage": self.usage()}

    def _object(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": list(choices)}
