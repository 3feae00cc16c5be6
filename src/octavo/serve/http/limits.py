"""How much one request, and all of them together, may ask for."""

import dataclasses

from octavo._config import Config

_LEAST = {"queue": 0, "body": 1, "choices": 1, "stops": 0, "body_timeout": 0, "timeout": 0, "grace": 0}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Limits(Config):
    """Bounds of a server.

    >>> Limits(queue=8)
    Limits(queue=8)
    """

    queue: int = 64
    """Choices that may wait for a slot; a request beyond is refused with 429."""
    body: int = 1 << 20
    """Bytes of a request's body."""
    choices: int = 32
    """Texts that one request may ask for: prompts times n."""
    stops: int = 16
    """Stop strings of a request."""
    body_timeout: float = 30.0
    """Seconds in which a body must have arrived."""
    timeout: float = 600.0
    """Seconds in which an answer must be complete, waiting included."""
    grace: float = 10.0
    """Seconds that requests have to finish when the server is stopped."""

    def __post_init__(self):
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} is at least {least}, got {getattr(self, name)}")


DEFAULT = Limits()
