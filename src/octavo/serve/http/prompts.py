"""From what was asked to what the engine is given: token ids, and how to sample."""

import secrets
from collections.abc import Sequence
from typing import Any

from octavo.serve.engine import Request
from octavo.serve.http.checks import refuse
from octavo.serve.http.errors import ApiError
from octavo.serve.http.fields import Ask
from octavo.serve.sampling import SamplingParams

_SEEDS = 1 << 64
_COMPLETION = 16
"""How many tokens a completion has where it is not said, as with OpenAI; an answer in a chat has room."""


class Prompts:
    """Prompts of one engine."""

    def __init__(self, engine: Any):
        self.tokenizer, self.max_length = engine.tokenizer, engine.max_length
        self.vocab_size = engine.config.vocab_size

    def encode(self, ask: Ask) -> list[list[int]]:
        """Token ids of every prompt, which fit into the model with room for an answer."""
        if ask.chat:
            return [self._fitting("messages", self._chat(ask))]
        return [self._fitting("prompt", self._ids(prompt)) for prompt in ask.prompts]

    def _chat(self, ask: Ask) -> list[int]:
        try:
            return self.tokenizer.chat([dict(message) for message in ask.messages])
        except ValueError as error:
            raise ApiError(400, str(error), param="messages", code="no_chat") from None

    def _ids(self, prompt: str | tuple[int, ...]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        beyond = next((i for i in prompt if not 0 <= i < self.vocab_size), None)
        if beyond is not None:
            raise refuse(
                "prompt",
                f"has a token id outside of the model's vocabulary: ids are from 0 to {self.vocab_size - 1}",
                code="out_of_range",
            )
        return list(prompt)

    def _fitting(self, name: str, ids: list[int]) -> list[int]:
        if not ids:
            raise refuse(name, "has no tokens: this model needs at least one to begin with")
        if len(ids) >= self.max_length:
            raise refuse(
                name,
                f"is too long: it has {len(ids)} tokens, and the server's limit is {self.max_length} with the answer",
                code="context_length_exceeded",
            )
        return ids

    def requests(self, ask: Ask, prompts: Sequence[list[int]], name: str) -> list[Request]:
        """What the engine is to do: n texts for each prompt, each with a seed of its own."""
        seed = secrets.randbelow(_SEEDS) if ask.seed is None else ask.seed
        return [
            Request(f"{name}-{i * ask.n + k}", tuple(ids), self._params(ask, len(ids), (seed + k) % _SEEDS))
            for i, ids in enumerate(prompts)
            for k in range(ask.n)
        ]

    def _params(self, ask: Ask, length: int, seed: int) -> SamplingParams:
        room = self.max_length - length
        if ask.max_tokens is not None and ask.max_tokens > room:
            raise refuse(
                "max_tokens",
                f"is too large: {length} tokens of the prompt and {ask.max_tokens} of the answer are more than the "
                f"server's limit of {self.max_length}",
                code="context_length_exceeded",
            )
        most = ask.max_tokens or (room if ask.chat else min(_COMPLETION, room))
        try:
            return SamplingParams(**ask.sampling, max_tokens=most, stop=ask.stop, seed=seed, logprobs=ask.logprobs or 0)
        except ValueError as error:
            raise ApiError(400, str(error)) from None

    def echoes(self, ask: Ask, prompts: Sequence[list[int]]) -> list[str]:
        """What every text begins with: its prompt if that is wanted."""
        shown = [""] * len(prompts)
        if ask.echo:
            shown = [prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt) for prompt in ask.prompts]
        return [text for text in shown for _ in range(ask.n)]
