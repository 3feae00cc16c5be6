"""The endpoint of encoders: /v1/embeddings."""

import asyncio
import base64
from typing import Any

import numpy as np

from octavo.serve.http.errors import ApiError
from octavo.serve.http.limits import Limits
from octavo.serve.http.requests import EmbeddingRequest


class IdleEngine:
    """In the place of an engine on a server that has only an encoder: there is nothing to generate."""

    slots, busy, active, reused, proposed, accepted = 0, False, 0, 0, 0, 0

    def __init__(self, encoder: Any):
        self.tokenizer, self.max_length = encoder.tokenizer, encoder.max_length

    def check(self, prompt: Any) -> None:
        """No prompt gets here."""
        raise AssertionError("an encoder generates no text")


class Embeddings:
    """Embeds the texts of one request at a time, in batches; further requests wait.

    Args:
        encoder: An `octavo.pretrained.encoder.Encoder` with a tokenizer.
        limits: Bounds on requests.
    """

    def __init__(self, encoder: Any, limits: Limits):
        if encoder.tokenizer is None:
            raise ValueError("the encoder has no tokenizer: it cannot read a text")
        self._encoder, self._limits = encoder, limits
        self._lock, self.waiting = asyncio.Lock(), 0

    async def respond(self, request: EmbeddingRequest, name: str) -> dict[str, Any]:
        """The response to a request."""
        if self.waiting > self._limits.queue:
            message = f"{self.waiting} requests wait already: try again soon"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
        self.waiting += 1
        try:
            async with asyncio.timeout(self._limits.timeout), self._lock:
                vectors, tokens = await asyncio.to_thread(self._embed, list(request.input))
        except TimeoutError:
            message = f"the response was not complete after {self._limits.timeout:g} seconds: ask for less"
            raise ApiError(504, message, code="timeout") from None
        finally:
            self.waiting -= 1
        encode = _base64 if request.encoding_format == "base64" else np.ndarray.tolist
        data = [{"object": "embedding", "index": i, "embedding": encode(x)} for i, x in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": name, "usage": usage}

    def _embed(self, texts: list[str]) -> tuple[np.ndarray, int]:
        tokens = sum(len(encoding.ids) for encoding in self._encoder.tokenizer.encode_batch(texts))
        return self._encoder.embed(texts), tokens


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
