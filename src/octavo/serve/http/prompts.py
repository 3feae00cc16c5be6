"""From HTTP requests to the engine's: token ids and sampling parameters."""

import functools
import json
import secrets
from collections.abc import Sequence
from typing import Any, TypeGuard

from octavo.serve.constraint import Constraint
from octavo.serve.engine import ContextLengthError, Request
from octavo.serve.http.errors import ApiError, field_error
from octavo.serve.http.requests import ChatCompletionRequest, CompletionRequest
from octavo.serve.http.tools import ToolParser
from octavo.serve.json_schema import compile_tool_calls
from octavo.serve.sampling import SamplingParams

type AnyRequest = CompletionRequest | ChatCompletionRequest

_SEEDS = 1 << 64
_COMPLETION_TOKENS = 16
"""The default of `max_tokens` for completions, as OpenAI's; a chat message may fill the context."""


_CONSTRAINTS = 8
"""Constraints that are kept, with their masks."""


def has_echo(request: AnyRequest) -> TypeGuard[CompletionRequest]:
    """Whether the answer starts with the prompt."""
    return isinstance(request, CompletionRequest) and request.echo


class Prompts:
    """The prompts of one engine."""

    def __init__(self, engine: Any):
        self.tokenizer, self.max_length = engine.tokenizer, engine.max_length
        self._check, self._engine = engine.check, engine
        self._compile = functools.lru_cache(_CONSTRAINTS)(self._compile_text)

    def read(self, request: AnyRequest) -> tuple[list[list[int]], Constraint | None]:
        """Token ids of every prompt, and what the answers must conform to."""
        return self.encode(request), self.constraint(request)

    def encode(self, request: AnyRequest) -> list[list[int]]:
        """Token ids of every prompt."""
        if isinstance(request, ChatCompletionRequest):
            return [self._checked("messages", self._apply_template(request))]
        encode = self.tokenizer.encode
        ids = [encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in request.prompt]
        return [self._checked("prompt", prompt) for prompt in ids]

    def _apply_template(self, request: ChatCompletionRequest) -> list[int]:
        param = "tools" if request.used_tools else "messages"
        try:
            messages = [message.to_dict() for message in request.messages]
            tools = [tool.to_dict() for tool in request.used_tools]
            return self.tokenizer.chat(messages, tools) if tools else self.tokenizer.chat(messages)
        except RecursionError:
            raise field_error(param, "is nested too deeply") from None
        except ValueError as error:
            raise ApiError(400, str(error), param=param, code="no_chat") from None

    def constraint(self, request: AnyRequest) -> Constraint | None:
        """What the answer must conform to."""
        if not isinstance(request, ChatCompletionRequest):
            return None
        if tools := request.required_tools:
            return self._checked_constraint("tools", "tools", tools)
        if request.response_format is None:
            return None
        schema = request.response_format.json_schema
        if schema is None:
            return self._checked_constraint("response_format", "object", None)
        return self._checked_constraint("response_format.json_schema.schema", "schema", schema.content)

    def _checked_constraint(self, name: str, kind: str, content: Any) -> Constraint:
        try:
            return self._compile(kind, json.dumps(content))
        except (ValueError, RecursionError) as error:
            message = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            # Names in a schema may hold half of a surrogate pair.
            message = message.encode(errors="replace").decode()
            raise field_error(name, f"cannot be used: {message}", code="unsupported") from None

    def _compile_text(self, kind: str, text: str) -> Constraint:
        vocabulary, content = self._engine.vocabulary, json.loads(text)
        if kind == "object":
            return Constraint.json(vocabulary)
        if kind == "tools":
            return Constraint(compile_tool_calls(content, raw=vocabulary.has_bytes), vocabulary)
        return Constraint.of_schema(content, vocabulary)

    def _checked(self, name: str, ids: list[int]) -> list[int]:
        try:
            self._check(ids)
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "out_of_range"
            raise ApiError(400, str(error), param=name, code=code) from None
        return ids

    def requests(
        self, request: AnyRequest, prompts: Sequence[list[int]], name: str, constraint: Constraint | None = None
    ) -> list[Request]:
        """The engine's requests: n for each prompt, each with a seed of its own."""
        seed = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
        return [
            Request(
                f"{name}-{i * request.n + k}",
                tuple(ids),
                self._params(request, len(ids), (seed + k) % _SEEDS),
                constraint,
            )
            for i, ids in enumerate(prompts)
            for k in range(request.n)
        ]

    def _params(self, request: AnyRequest, length: int, seed: int) -> SamplingParams:
        room, limit = self.max_length - length, request.token_limit
        if limit is not None and limit > room:
            raise field_error(
                "max_tokens",
                f"is too large: {length} tokens of the prompt and {limit} of the answer are more than the server's "
                f"limit of {self.max_length}",
                code="context_length_exceeded",
            )
        default = room if isinstance(request, ChatCompletionRequest) else min(_COMPLETION_TOKENS, room)
        try:
            return SamplingParams(
                **request.sampling,
                max_tokens=limit or default,
                stop=request.stop,
                seed=seed,
                logprobs=request.num_logprobs or 0,
                prompt_logprobs=has_echo(request) and request.num_logprobs is not None,
            )
        except ValueError as error:
            raise ApiError(400, str(error)) from None

    def tool_parser(self, request: AnyRequest) -> ToolParser | None:
        """A parser of the model's calls of tools, if it has some."""
        if not isinstance(request, ChatCompletionRequest) or not request.used_tools:
            return None
        template = "" if request.required_tools else str(getattr(self.tokenizer, "template", ""))
        names = [tool.function.name for tool in request.used_tools]
        return ToolParser(names, template, parallel=request.parallel_tool_calls)

    def echoes(self, request: AnyRequest, prompts: Sequence[list[int]]) -> list[str]:
        """The text that each choice starts with: its prompt with `echo`, otherwise nothing."""
        texts = [""] * len(prompts)
        if has_echo(request):
            decode = self.tokenizer.decode
            texts = [prompt if isinstance(prompt, str) else decode(list(prompt)) for prompt in request.prompt]
        return [text for text in texts for _ in range(request.n)]
