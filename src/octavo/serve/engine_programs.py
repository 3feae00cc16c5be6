"""The two programs of an engine, and the memory they work in."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo import kernels, models
from octavo._typing import Array, Bool, Shaped
from octavo.frameworks import served
from octavo.models import ModelConfig, apply, unstack_layers
from octavo.qarray import QArray, is_qarray
from octavo.serve import engine_native
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


STEPS = 4
"""How many tokens the decoding program makes at most before what it chose can be read."""


class Output(NamedTuple):
    """What some steps chose: arrays with an axis of steps and one of rows. Only what is read is copied."""

    choice: Choice
    top: tuple[Array, Array]

    def fetch(self, row: int, logprobs: int, step: int = 0) -> tuple[int, float, tuple[tuple[int, float], ...]]:
        """The token of a row, its log probability, and the likeliest tokens with theirs."""
        top = ()
        if logprobs:
            tokens, values = (np.asarray(x)[step, row, :logprobs].tolist() for x in self.top)
            top = tuple(zip(tokens, values, strict=True))
        return int(np.asarray(self.choice.token)[step, row]), float(np.asarray(self.choice.logprob)[step, row]), top


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
        self.config, self.chunk, self._rules = config, chunk, rules
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

    def decode(self, active: np.ndarray, steps: int = 1, *, top: bool = True) -> Output:
        """The next tokens of each slot, at most `STEPS`; of those that are not active nothing is kept.

        A call takes a millisecond for some hundred parameters, as much as a tenth of a small model's token. Without
        `top`, the likeliest tokens are not looked for.
        """
        how = np.asarray([steps, top], np.int32)
        out, self._state = self._decode(self._leaves, self._state, active, how)
        return out

    @property
    def decoding(self) -> str:
        """How the decoding program runs layers."""
        params = jax.tree.unflatten(self._tree, self._leaves)
        reason = engine_native.refusal(self.config, params, self._state_of(self._state).cache, self._rules)
        return kernels.status() if reason is None else f"XLA, because {reason}"

    def lowered(self) -> Any:
        """The decoding program, to look at."""
        active = np.zeros(self._state_of(self._state).last.shape, bool)
        return self._decode.lower(self._leaves, self._state, active, np.ones(2, np.int32))

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
        out = Output(choice, likeliest(logits[:, 0], MAX_LOGPROBS))
        return jax.tree.map(lambda x: x[None], out), tuple(jax.tree.leaves(new))

    def _traced_decode(self, leaves: Any, parts: Any, active: Array, how: Array) -> Any:
        self.traces["decode"] += 1
        params = jax.tree.unflatten(self._tree, leaves)
        _, one = jax.eval_shape(functools.partial(self._next, params, active, how[1] > 0), parts)
        outs = jax.tree.map(lambda x: jnp.zeros((STEPS, *x.shape), x.dtype), one)

        def step(number: Array, carry: tuple[Any, Output]) -> tuple[Any, Output]:
            parts, out = self._next(params, active, how[1] > 0, carry[0])
            return parts, jax.tree.map(lambda all, x: all.at[number].set(x), carry[1], out)

        parts, outs = jax.lax.fori_loop(0, how[0], step, (parts, outs))
        return outs, parts

    def _next(self, params: Any, active: Array, wants_top: Array, parts: Any) -> tuple[Any, Output]:
        """One token of each slot."""
        state = self._state_of(parts)
        lengths = state.cache.lengths
        if engine_native.refusal(self.config, params, state.cache, self._rules) is None:
            logits, cache = engine_native.decode(self.config, params, state.last, state.cache)
        else:
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
        find = lambda: likeliest(logits, MAX_LOGPROBS)  # noqa: E731
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(find))
        return tuple(jax.tree.leaves(new)), Output(choice, jax.lax.cond(wants_top, find, lambda: none))


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
    return jax.tree.leaves(params, is_leaf=is_qarray)
