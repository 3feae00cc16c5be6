"""The compiled programs of an engine, prefill and decode, and their state."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo import kernels, models
from octavo._typing import Array, Bool, Float, Shaped
from octavo.frameworks import served
from octavo.models import ModelConfig, apply
from octavo.qarray import is_qarray
from octavo.rollout import token_logprobs
from octavo.serve import engine_native
from octavo.serve.cache import FLOAT, KVCache, KVConfig
from octavo.serve.engine_update import Layouts, unstacked
from octavo.serve.prefill import prefill_model
from octavo.serve.sampling import (
    MAX_LOGPROBS,
    Sample,
    SamplingParams,
    Settings,
    pack_mask,
    sample_tokens,
    top_logprobs,
    unpack_mask,
)
from octavo.serve.stored_programs import StoredProgram, program_path


class State(NamedTuple):
    """The state of an engine on the device; each program takes it (donated) and returns the next."""

    cache: KVCache
    in_context: Bool[Array, "slots vocab"]
    """Which tokens occur in each slot's text."""
    counts: Shaped[Array, "slots vocab"]
    """How often each token occurs in each slot's answer."""
    last: Shaped[Array, "slots"]
    """The last token of each slot, which is not in the cache yet."""
    num_generated: Shaped[Array, "slots"]
    """The number of tokens generated in each slot."""
    settings: Settings

    def advanced(self, token: Shaped[Array, "slots"], active: Bool[Array, "slots"]) -> "State":
        """The state after a token of each active slot, but for the cache; other slots keep their last token."""
        rows, one = jnp.arange(token.shape[0]), active.astype(jnp.int32)
        return self._replace(
            in_context=self.in_context.at[rows, token].max(active),
            counts=self.counts.at[rows, token].add(one),
            last=jnp.where(active, token, self.last),
            num_generated=self.num_generated + one,
        )


STEPS = 4
"""The most tokens per call of the decoding program."""


class Output(NamedTuple):
    """The tokens of some steps, with axes for steps and rows. Only what is read is copied to the host."""

    sample: Sample
    top: tuple[Array, Array]
    prompt: tuple[Array, tuple[Array, Array]] | None = None
    """Of a chunk of a prompt, if asked for: the log probability of the token after each of its tokens, and the most
    probable tokens there."""

    def fetch(self, row: int, logprobs: int, step: int = 0) -> tuple[int, float, tuple[tuple[int, float], ...]]:
        """The token of a row, its log probability, and the most probable tokens with theirs."""
        top = ()
        if logprobs:
            tokens, values = (np.asarray(x)[step, row, :logprobs].tolist() for x in self.top)
            top = tuple(zip(tokens, values, strict=True))
        return int(np.asarray(self.sample.token)[step, row]), float(np.asarray(self.sample.logprob)[step, row]), top

    def fetch_prompt(self, count: int, logprobs: int) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        """Of the first `count` tokens of a chunk: the log probability of the next token, and the most probable ones."""
        assert self.prompt is not None
        chosen, tokens, values = (np.asarray(x)[0, :count].tolist() for x in jax.tree.leaves(self.prompt))
        tops = (tuple(zip(t[:logprobs], v[:logprobs], strict=True)) for t, v in zip(tokens, values, strict=True))
        return list(zip(chosen, tops, strict=True))


class Programs:
    """Prefill and decode, compiled once each, with their parameters and state."""

    def __init__(
        self,
        config: ModelConfig,
        load: Callable[[], Any],
        *,
        rules: Any,
        ranges: Any = None,
        slots: int,
        max_length: int,
        kv: KVConfig | str,
        chunk: int,
        prefill: str = "float",
        directory: Path | None = None,
    ):
        params = unstacked(jax.tree.map(jnp.asarray, load()))
        config = config.replace(scan_layers=False, remat="none")
        self._layouts = Layouts(config, params, rules)
        config, params = fuse_params(config, params, fuse=not rules)
        self.config, self.chunk, self._rules = config, chunk, rules
        if isinstance(kv, str):
            kv = self._kv_for(params) if kv == "auto" else KVConfig.of(kv)
        self.kv = kv
        """The precision of the cache."""
        self.traces: Counter[str] = Counter()
        """How often each program was traced."""
        # As a flat tuple: flattening a tree of QArrays at every step costs as much as a small model.
        leaves, self._tree = jax.tree.flatten(params)
        self._leaves, self._owns_leaves = tuple(leaves), False
        plain = functools.partial(apply, config)
        is_plain = not rules and not any(map(is_qarray, jax.tree.leaves(params, is_leaf=is_qarray)))
        self._model = plain if is_plain else served(plain, rules, state=ranges or {})
        if kv.latent and rules:
            raise ValueError(
                "latent=True multiplies queries by weights whose inputs the rules quantize otherwise: serve this model "
                "without it"
            )
        integers = prefill_model(plain, params, rules, prefill, latent=kv.latent)
        self._prefill_model = integers or self._model
        self.prefill_qtype = "float" if integers is None else "int8"
        """What activations are in prefill, unless the log probabilities of prompts are asked for."""
        # Chunks start at multiples of their size: room for the padding of the last one.
        padded = -(-max_length // chunk) * chunk
        cache = KVCache.empty(config, kv, slots=slots, max_length=padded)
        self.cache_nbytes, self.cache_bytes_per_token = cache.nbytes, cache.bytes_per_token
        """Bytes of all keys and values, and of those of one token."""
        self.params_nbytes = sum(x.size * x.dtype.itemsize for x in leaves)
        zeros = jnp.zeros(slots, jnp.int32)
        settings = Settings(*map(jnp.asarray, Settings.of([SamplingParams(temperature=0)] * slots)))
        seen = (jnp.zeros((slots, config.vocab_size), bool), jnp.zeros((slots, config.vocab_size), jnp.int32))
        state = State(cache, *seen, zeros, zeros + 0, settings)
        parts, self._state_tree = jax.tree.flatten(state)
        self._state = tuple(parts)
        self._all = np.full((slots, -(-config.vocab_size // 8)), 255, np.uint8)
        # Not sent at every step.
        self._all_on_device = jnp.asarray(self._all)
        # Remembered ranges are constants of the programs; programs for several devices are not stored.
        is_single = len({device for x in self._leaves for device in x.devices()}) == 1
        self._directory = directory if is_single and not ranges else None
        self._prefill = self._stored("prefill", self._traced_prefill)
        self._scored_prefill = jax.jit(self._traced_prefill, donate_argnums=1)
        self._decode = self._stored("decode", self._traced_decode)
        self._score = jax.jit(self._traced_score)
        # The old parameters are no input of the new ones: they are kept as arguments for their buffers.
        self._update = jax.jit(self._traced_update, donate_argnums=0, keep_unused=True)

    def prefill(
        self,
        slot: int,
        prompt: tuple[int, ...],
        start: int,
        settings: Settings,
        *,
        allowed: np.ndarray | None = None,
        score: bool = False,
    ) -> Output:
        """Write a chunk of a prompt into a slot from `start` on, and sample the token after it.

        Args:
            slot: The slot.
            prompt: All of the prompt.
            start: The first position of the chunk, a multiple of its size.
            settings: Sampling parameters of the request.
            allowed: The tokens that may be sampled, as bits of `pack_mask`; None for all.
            score: Whether to compute the log probabilities of the prompt's tokens: a program of its own.
        """
        rows = np.zeros((2, 1, self.chunk), np.int32)
        for row, tokens in zip(rows[:, 0], (prompt[start:], prompt[start + 1 :]), strict=True):
            tokens = tokens[: self.chunk]
            row[: len(tokens)] = tokens
        in_prompt = np.zeros(self.config.vocab_size, bool)
        in_prompt[list(prompt)] = True
        masks = np.stack([pack_mask(in_prompt), self._all[0] if allowed is None else allowed])
        location = np.asarray([slot, start, min(len(prompt) - start, self.chunk)], np.int32)
        program = self._scored_prefill if score else self._prefill
        arguments = rows[0], location, settings, masks, rows[1] if score else None
        out, self._state = program(self._leaves, self._state, *arguments)
        return out

    def decode(
        self, active: np.ndarray, steps: int = 1, *, top: bool = True, allowed: np.ndarray | None = None
    ) -> Output:
        """Decode `steps` tokens of each active slot, at most `STEPS`.

        A call takes a millisecond for some hundred parameters, a tenth of a small model's token. Without `top`, the
        most probable tokens are not computed. `allowed` has the tokens that each slot may sample, as bits.
        """
        options = np.asarray([steps, top], np.int32)
        masks = self._all_on_device if allowed is None else allowed
        out, self._state = self._decode(self._leaves, self._state, active, options, masks)
        return out

    def prepare(self) -> None:
        """Load both programs from the directory of compiled programs, or compile them at the same time."""
        self.prepare_prefill()
        active = np.zeros(len(self._all), bool)
        self._decode.prepare(self._leaves, self._state, active, np.ones(2, np.int32), self._all_on_device)

    def prepare_prefill(self) -> None:
        """Load one of the programs, or compile it."""
        settings = Settings.of([SamplingParams(temperature=0)])
        masks = np.stack([self._all[0], self._all[0]])
        tokens, location = np.zeros((1, self.chunk), np.int32), np.zeros(3, np.int32)
        self._prefill.prepare(self._leaves, self._state, tokens, location, settings, masks, None)

    @property
    def is_stored(self) -> bool:
        """Whether both programs are in the directory of compiled programs."""
        return self._prefill.is_stored and self._decode.is_stored

    def _stored(self, name: str, function: Callable[..., Any]) -> StoredProgram:
        """A program that takes the parameters and the state, and returns an output and the next state."""
        outputs = self._any_output, self._state
        return StoredProgram(function, program_path(self._directory, name, self._facts()), outputs)

    def _facts(self) -> tuple[Any, ...]:
        """What the programs depend on."""
        arrays = [(x.shape, x.dtype, x.weak_type, x.sharding) for x in (*self._leaves, *self._state)]
        sizes, trees = (self.chunk, STEPS), (str(self._tree), str(self._state_tree))
        return self.config.to_json(), self._rules, self.prefill_qtype, sizes, trees, arrays

    @property
    def _any_output(self) -> Output:
        """An output, of which only the structure matters."""
        any_array = self._state[0]
        return Output(Sample(any_array, any_array), (any_array, any_array))

    def all_allowed(self) -> np.ndarray:
        """A mask for `decode` that allows all tokens in every slot."""
        return self._all.copy()

    def score(self, tokens: np.ndarray) -> Array:
        """The log probability of each token [rows, length] but the first, given those before it."""
        return self._score(self._leaves, tokens)

    def update(self, params: Any) -> None:
        """Replace the parameters, in the same buffers."""
        if not self._owns_leaves:  # the caller may hold the first ones too
            self._leaves, self._owns_leaves = tuple(map(jnp.copy, self._leaves)), True
        self._leaves = self._update(self._leaves, params)

    @property
    def decoding(self) -> str:
        """What runs the layers when decoding: CPU kernels, or XLA and why."""
        params = jax.tree.unflatten(self._tree, self._leaves)
        reason = engine_native.unsupported_reason(self.config, params, self.kv, self._rules)
        return kernels.status() if reason is None else f"XLA, because {reason}"

    def lowered(self) -> Any:
        """The lowered decoding program."""
        active = np.zeros(self._state_of(self._state).last.shape, bool)
        return self._decode.jitted.lower(self._leaves, self._state, active, np.ones(2, np.int32), self._all_on_device)

    def _state_of(self, parts: tuple[Any, ...]) -> State:
        return jax.tree.unflatten(self._state_tree, parts)

    def _traced_update(self, old: Any, params: Any) -> Any:
        self.traces["update"] += 1
        del old
        _, new = fuse_params(self._layouts.config, self._layouts.matched(params), fuse=self.config.fused)
        return tuple(jax.tree.leaves(new))

    def _traced_score(self, leaves: Any, tokens: Array) -> Array:
        self.traces["score"] += 1
        return token_logprobs(self._model(jax.tree.unflatten(self._tree, leaves), tokens)[0], tokens)

    def _traced_prefill(
        self,
        leaves: Any,
        parts: Any,
        tokens: Array,
        location: Array,
        settings: Settings,
        masks: Array,
        targets: Array | None,
    ) -> Any:
        self.traces["prefill" if targets is None else "scored prefill"] += 1
        state, params = self._state_of(parts), jax.tree.unflatten(self._tree, leaves)
        slot, start, count = location[0], location[1], location[2]
        positions = start + jnp.arange(self.chunk, dtype=jnp.int32)[None]
        cache = state.cache.at(slot[None], counts=count[None])
        last, scores = count[None] - 1, None
        if targets is None:
            logits, _, cache = self._prefill_model(params, tokens, positions, cache=cache, last=last)
        else:
            every, _, cache = self._model(params, tokens, positions, cache=cache)
            logits = jax.lax.dynamic_slice_in_dim(every, last[0], 1, axis=1)
            scores = (_logprobs(every[0], targets[0]), top_logprobs(every[0], MAX_LOGPROBS))
        in_context = unpack_mask(masks[:1], self.config.vocab_size)
        sample = sample_tokens(logits[:, 0], settings, jnp.zeros(1, jnp.int32), in_context, allowed=masks[1:])
        in_context = in_context.at[0, sample.token[0]].set(True)
        counts = jnp.zeros_like(state.counts[:1]).at[0, sample.token[0]].set(1)
        new = State(
            cache.at(),
            jax.lax.dynamic_update_slice_in_dim(state.in_context, in_context, slot, 0),
            jax.lax.dynamic_update_slice_in_dim(state.counts, counts, slot, 0),
            state.last.at[slot].set(sample.token[0]),
            state.num_generated.at[slot].set(1),
            Settings(*(column.at[slot].set(x[0]) for column, x in zip(state.settings, settings, strict=True))),
        )
        out = Output(sample, top_logprobs(logits[:, 0], MAX_LOGPROBS), scores)
        return jax.tree.map(lambda x: x[None], out), tuple(jax.tree.leaves(new))

    def _traced_decode(self, leaves: Any, parts: Any, active: Array, options: Array, allowed: Array) -> Any:
        self.traces["decode"] += 1
        params = jax.tree.unflatten(self._tree, leaves)
        one_step = functools.partial(self._decode_step, params, active, allowed, options[1] > 0)
        _, one = jax.eval_shape(one_step, parts)
        outs = jax.tree.map(lambda x: jnp.zeros((STEPS, *x.shape), x.dtype), one)

        def step(number: Array, carry: tuple[Any, Output]) -> tuple[Any, Output]:
            parts, out = one_step(carry[0])
            return parts, jax.tree.map(lambda all, x: all.at[number].set(x), carry[1], out)

        parts, outs = jax.lax.fori_loop(0, options[0], step, (parts, outs))
        return outs, parts

    def _decode_step(
        self, params: Any, active: Array, allowed: Array, wants_top: Array, parts: Any
    ) -> tuple[Any, Output]:
        """Decode one token of each slot."""
        state = self._state_of(parts)
        lengths = state.cache.lengths
        logits, cache = self.forward(params, state.last[:, None], state.cache)
        logits = logits[:, 0]
        sample = sample_tokens(
            logits, state.settings, state.num_generated, state.in_context, state.counts, allowed=allowed
        )
        cache = cache.with_lengths(jnp.where(active, lengths + 1, lengths))
        new = state.advanced(sample.token, active)._replace(cache=cache)
        return tuple(jax.tree.leaves(new)), Output(sample, top_if(wants_top, logits))

    def forward(
        self, params: Any, tokens: Shaped[Array, "slots length"], cache: KVCache
    ) -> tuple[Float[Array, "slots length vocab"], KVCache]:
        """The logits after each of the next tokens of every slot, and the cache with those tokens added."""
        if self._is_native(params):
            return engine_native.decode(self.config, params, tokens, cache)
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        several = dataclasses.replace(cache, by_token=tokens.shape[1] > 1)
        logits, _, several = self._model(params, tokens, positions, cache=several)
        return logits, dataclasses.replace(several, by_token=False)

    def _kv_for(self, params: Any) -> KVConfig:
        """int8 where kernels decode with it; XLA takes longer to read codes than floats."""
        int8 = KVConfig.of("int8")
        return FLOAT if engine_native.unsupported_reason(self.config, params, int8, self._rules) else int8

    def _is_native(self, params: Any) -> bool:
        return engine_native.unsupported_reason(self.config, params, self.kv, self._rules) is None


def top_if(wanted: Array, logits: Float[Array, "rows vocab"]) -> tuple[Array, Array]:
    """The most probable tokens of each row and their log probabilities; zeros if they are not wanted."""
    find = lambda: top_logprobs(logits, MAX_LOGPROBS)  # noqa: E731
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(find))
    return jax.lax.cond(wanted, find, lambda: none)


def _logprobs(logits: Float[Array, "rows vocab"], tokens: Shaped[Array, "rows"]) -> Float[Array, "rows"]:
    """The log probability of one token of each row."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]


def fuse_params(config: ModelConfig, params: Any, *, fuse: bool) -> tuple[ModelConfig, Any]:
    """Parameters fused where possible, and their config. `params` is emptied, so that memory holds the model once."""
    joined = models.fuse(config, params, donate=True) if fuse else None
    return (config, params) if joined is None else joined
