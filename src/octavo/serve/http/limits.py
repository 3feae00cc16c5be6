"""Limits of single requests and of the server."""

import dataclasses

from octavo._config import Config

_LEAST = {"queue": 0, "body": 1, "choices": 1, "stops": 0, "body_timeout": 0, "timeout": 0, "grace": 0}


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
    stops: int = 16
    """Stop strings of a request."""
    body_timeout: float = 30.0
    """Seconds until a body must have arrived."""
    timeout: float = 600.0
    """Seconds until a response must be complete, including the time in the queue."""
    grace: float = 10.0
    """Seconds that running requests have to finish when the server is stopped."""

    def __post_init__(self):
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} is at least {least}, got {getattr(self, name)}")


DEFAULT = Limits()
