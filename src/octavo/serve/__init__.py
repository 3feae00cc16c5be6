"""Text generation: quantized key and value caches, sampling, and an engine with continuous batching."""

from octavo.serve.cache import KVCache, KVConfig
from octavo.serve.constraint import Constraint, Vocabulary
from octavo.serve.engine import Engine, Event, Request
from octavo.serve.sampling import SamplingParams
from octavo.serve.text import TextStream

__all__ = [
    "Constraint",
    "Engine",
    "Event",
    "KVCache",
    "KVConfig",
    "Request",
    "SamplingParams",
    "TextStream",
    "Vocabulary",
]
