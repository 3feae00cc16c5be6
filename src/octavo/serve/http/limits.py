"""Limits of single requests and of the server."""

import dataclasses

from octavo._config import Config, check_least


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Limits(Config):
    """The limits of a server.

    >>> Limits(queue=8)
    Limits(queue=8)
    """

    queue: int = 64
    """Choices that may wait for a slot; further requests get status 429."""
    body: int = 1 << 20
    """Bytes of a request body."""
    choices: int = 32
    """Choices of one request: prompts times n."""
    inputs: int = 256
    """Texts of one request for embeddings."""
    stops: int = 16
    """Stop strings of a request."""
    header_timeout: float = 30.0
    """Seconds until the headers of a request must have arrived; then the connection is closed."""
    body_timeout: float = 30.0
    """Seconds until a body must have arrived."""
    timeout: float = 600.0
    """Seconds until a response must be complete, including the time in the queue."""
    grace: float = 10.0
    """Seconds that running requests have to finish when the server is stopped."""

    def __post_init__(self):
        check_least(self, 1, "body", "choices", "inputs")
        check_least(self, 0, "queue", "stops", "header_timeout", "body_timeout", "timeout", "grace")


DEFAULT = Limits()
