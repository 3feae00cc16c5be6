"""From HTTP requests to the engine's: token ids and sampling parameters."""

import secrets
from collections.abc import Sequence
from typing import Any

from octavo.serve.engine import ContextLengthError, Request
from octavo.serve.http.errors import ApiError, field_error
from octavo.serve.http.requests import ChatCompletionRequest, CompletionRequest
from octavo.serve.sampling import SamplingParams

type AnyRequest = CompletionRequest | ChatCompletionRequest

_SEEDS = 1 << 64
_COMPLETION_TOKENS = 16
"""The default of `max_tokens` for completions, as OpenAI's; a chat message may fill the context."""


class Prompts:
    """The prompts of one engine."""

    def __init__(self, engine: Any):
        self.tokenizer, self.max_length = engine.tokenizer, engine.max_length
        self._check = engine.check

    def encode(self, request: AnyRequest) -> list[list[int]]:
        """Token ids of every prompt."""
        if isinstance(request, ChatCompletionRequest):
            return [self._checked("messages", self._apply_template(request))]
        encode = self.tokenizer.encode
        ids = [encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in request.prompt]
        return [self._checked("prompt", prompt) for prompt in ids]

    def _apply_template(self, request: ChatCompletionRequest) -> list[int]:
        try:
            return self.tokenizer.chat([message.to_dict() for message in request.messages])
        except ValueError as error:
            raise ApiError(400, str(error), param="messages", code="no_chat") from None

    def _checked(self, name: str, ids: list[int]) -> list[int]:
        try:
            self._check(ids)
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "out_of_range"
            raise ApiError(400, str(error), param=name, code=code) from None
        return ids

    def requests(self, request: AnyRequest, prompts: Sequence[list[int]], name: str) -> list[Request]:
        """The engine's requests: n for each prompt, each with a seed of its own."""
        seed = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
        return [
            Request(f"{name}-{i * request.n + k}", tuple(ids), self._params(request, len(ids), (seed + k) % _SEEDS))
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
            )
        except ValueError as error:
            raise ApiError(400, str(error)) from None

    def echoes(self, request: AnyRequest, prompts: Sequence[list[int]]) -> list[str]:
        """The text that each choice starts with: its prompt with `echo`, otherwise nothing."""
        texts = [""] * len(prompts)
        if isinstance(request, CompletionRequest) and request.echo:
            decode = self.tokenizer.decode
            texts = [prompt if isinstance(prompt, str) else decode(list(prompt)) for prompt in request.prompt]
        return [text for text in texts for _ in range(request.n)]
