"""The two programs of an engine, and the memory they work in."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo import models
from octavo._typing import Array, Bool, Shaped
from octavo.frameworks import served
from octavo.models import ModelConfig, apply, unstack_layers
from octavo.qarray import QArray
from octavo.serve.cache import KVCache, KVConfig
from octavo.serve.sampling import MAX_LOGPROBS, Choice, Settings, choose, likeliest


class State(NamedTuple):
    """All that changes from step to step. It stays on the device; each program is given it and returns the next."""

    cache: KVCache
    seen: Bool[Array, "slots vocab"]
    """Which tokens each slot's text has."""
    last: Shaped[Array, "slots"]
    """The newest token of each slot, which is not in the cache yet."""
    number: Shaped[Array, "slots"]
    """How many tokens each slot has generated."""
    settings: Settings


class Output(NamedTuple):
    """What a step chose. Only what is read is copied from the device."""

    choice: Choice
    top: tuple[Array, Array]

    def fetch(self, row: int, logprobs: int) -> tuple[int, float, tuple[tuple[int, float], ...]]:
        """The token of a row, its log probability, and the likeliest tokens with theirs."""
        top = ()
        if logprobs:
            tokens, values = (np.asarray(x)[row, :logprobs].tolist() for x in self.top)
            top = tuple(zip(tokens, values, strict=True))
        return int(np.asarray(self.choice.token)[row]), float(np.asarray(self.choice.logprob)[row]), top


class Programs:
    """Prefill and decode, compiled once each, with parameters, cache and random numbers in place."""

    def __init__(
        self,
        config: ModelConfig,
        load: Callable[[], Any],
        *,
        rules: Any,
        slots: int,
        max_length: int,
        kv: KVConfig,
        chunk: int,
        fuse: bool,
    ):
        config, params = prepared(config, load, fuse=fuse and not rules)
        self.config, self.chunk = config, chunk
        self.traces: Counter[str] = Counter()
        # Leaves side by side: to take a tree of QArrays apart at every step costs as much as a small model does.
        leaves, self._tree = jax.tree.flatten(params)
        self._leaves = tuple(leaves)
        plain = functools.partial(apply, config)
        is_plain = not rules and not any(isinstance(x, QArray) for x in _stored(params))
        self._model = plain if is_plain else served(plain, rules)
        # Chunks start at multiples of their size, so that the last one, filled up, fits as well.
        whole = -(-max_length // chunk) * chunk
        cache = KVCache.empty(config, kv, slots=slots, max_length=whole)
        self.cache_nbytes, self.cache_bytes_per_token = cache.nbytes, cache.bytes_per_token
        self.params_nbytes = sum(x.size * x.dtype.itemsize for x in leaves)
        zeros = jnp.zeros(slots, jnp.int32)
        settings = Settings(*(jnp.zeros((slots, *x.shape[1:]), x.dtype) for x in Settings.of([])))
        state = State(cache, jnp.zeros((slots, config.vocab_size), bool), zeros, zeros + 0, settings)
        parts, self._state_tree = jax.tree.flatten(state)
        self._state = tuple(parts)
        self._prefill = jax.jit(self._traced_prefill, donate_argnums=1)
        self._decode = jax.jit(self._traced_decode, donate_argnums=1)

    def prefill(self, slot: int, tokens: tuple[int, ...], start: int, settings: Settings) -> Output:
        """Read tokens into a slot from `start` on, and choose what follows the last of them."""
        row = np.zeros((1, self.chunk), np.int32)
        row[0, : len(tokens)] = tokens
        where = np.asarray([slot, start, len(tokens)], np.int32)
        out, self._state = self._prefill(self._leaves, self._state, row, where, settings)
        return out

    def decode(self, active: np.ndarray) -> Output:
        """The next token of each slot; of those that are not active nothing is kept."""
        out, self._state = self._decode(self._leaves, self._state, active)
        return out

    def lowered(self) -> Any:
        """The decoding program, to look at."""
        active = np.zeros(self._state_of(self._state).last.shape, bool)
        return self._decode.lower(self._leaves, self._state, active)

    def _state_of(self, parts: tuple[Any, ...]) -> State:
        return jax.tree.unflatten(self._state_tree, parts)

    def _traced_prefill(self, leaves: Any, parts: Any, tokens: Array, where: Array, settings: Settings) -> Any:
        self.traces["prefill"] += 1
        state, params = self._state_of(parts), jax.tree.unflatten(self._tree, leaves)
        slot, start, count = where[0], where[1], where[2]
        positions = start + jnp.arange(self.chunk, dtype=jnp.int32)[None]
        cache = state.cache.at(slot[None], counts=count[None])
        logits, _, cache = self._model(params, tokens, positions, cache=cache, last=count[None] - 1)
        # A slot begins anew with its first chunk. What fills the chunk up is no token.
        own = jnp.where(start == 0, False, jax.lax.dynamic_slice_in_dim(state.seen, slot, 1))
        real = jnp.arange(self.chunk) < count
        own = own.at[0, jnp.where(real, tokens[0], self.config.vocab_size)].set(True, mode="drop")
        choice = choose(logits[:, 0], settings, jnp.zeros(1, jnp.int32), own)
        own = own.at[0, choice.token[0]].set(True)
        new = State(
            cache.at(),
            jax.lax.dynamic_update_slice_in_dim(state.seen, own, slot, 0),
            state.last.at[slot].set(choice.token[0]),
            state.number.at[slot].set(1),
            Settings(*(whole.at[slot].set(x[0]) for whole, x in zip(state.settings, settings, strict=True))),
        )
        return Output(choice, likeliest(logits[:, 0], MAX_LOGPROBS)), tuple(jax.tree.leaves(new))

    def _traced_decode(self, leaves: Any, parts: Any, active: Array) -> Any:
        self.traces["decode"] += 1
        state, params = self._state_of(parts), jax.tree.unflatten(self._tree, leaves)
        lengths = state.cache.lengths
        logits, _, cache = self._model(params, state.last[:, None], lengths[:, None], cache=state.cache)
        logits = logits[:, 0]
        choice = choose(logits, state.settings, state.number, state.seen)
        rows = jnp.arange(lengths.shape[0])
        # The newest token of a slot that does not take part must stay the next to be read.
        new = State(
            cache.with_lengths(jnp.where(active, lengths + 1, lengths)),
            state.seen.at[rows, choice.token].max(active),
            jnp.where(active, choice.token, state.last),
            jnp.where(active, state.number + 1, state.number),
            state.settings,
        )
        return Output(choice, likeliest(logits, MAX_LOGPROBS)), tuple(jax.tree.leaves(new))


def prepared(config: ModelConfig, load: Callable[[], Any], *, fuse: bool) -> tuple[ModelConfig, Any]:
    """A config and parameters as serving wants them: layers apart, matrices joined where they go together.

    Parameters that are loaded only here are held once: parts are let go as soon as they are joined.
    """
    params = jax.tree.map(jnp.asarray, load())  # with dictionaries of its own, which may be emptied
    if config.scan_layers:
        params = unstack_layers(params)
    config = config.replace(scan_layers=False, remat="none")
    joined = models.fuse(config, params, donate=True) if fuse else None
    return (config, params) if joined is None else joined


def _stored(params: Any) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QArray))
