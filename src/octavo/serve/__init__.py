"""Generation: a key and value cache in low precision, sampling, and an engine that serves many requests at once."""

from octavo.serve.cache import KVCache, KVConfig
from octavo.serve.engine import Engine, Event, Request
from octavo.serve.sampling import SamplingParams
from octavo.serve.text import TextStream

__all__ = ["Engine", "Event", "KVCache", "KVConfig", "Request", "SamplingParams", "TextStream"]
