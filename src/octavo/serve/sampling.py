"""Sampling of next tokens for a batch of requests, each with its own parameters and random numbers."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo._config import Config
from octavo._typing import Array, Bool, Float, Shaped

MAX_LOGPROBS = 20
"""The most alternatives whose log probability a request may ask for."""

# Most distributions are truncated within this many tokens. For others the vocabulary is sorted, some milliseconds.
_CANDIDATES = 64
_BLOCK = 256
_ALL = 255


@dataclasses.dataclass(frozen=True, repr=False)
class SamplingParams(Config):
    """Sampling parameters of one request.

    `top_k`, `top_p` and `min_p` truncate the distribution at the given temperature; tokens of equal probability are
    kept or dropped together.

    Args:
        temperature: 0 takes the most probable token.
        top_k: The number of tokens that are kept; 0 for all.
        top_p: Keeps the fewest tokens whose probabilities sum to at least this.
        min_p: Keeps tokens with at least this fraction of the highest probability.
        repetition_penalty: Divides positive logits of tokens in the prompt or answer, and multiplies negative ones.
        frequency_penalty: Subtracted from a token's logit for each time it occurs in the answer.
        presence_penalty: Subtracted once from the logits of tokens that occur in the answer.
        max_tokens: The most tokens that are generated.
        stop: Texts that end the answer, which does not contain them.
        seed: The same request with the same seed gives the same tokens, whatever other requests run.
        logprobs: The number of most probable tokens to return with their log probability, at temperature 1.
        prompt_logprobs: Whether the first event has the log probabilities of the prompt's tokens.

    >>> SamplingParams(temperature=0.7, top_p=0.9)
    SamplingParams(temperature=0.7, top_p=0.9)
    """

    temperature: float | int = 1.0
    top_k: int = 0
    top_p: float | int = 1.0
    min_p: float | int = 0.0
    repetition_penalty: float | int = 1.0
    frequency_penalty: float | int = 0.0
    presence_penalty: float | int = 0.0
    max_tokens: int = 128
    stop: Sequence[str] = ()
    seed: int | None = None
    logprobs: int = 0
    prompt_logprobs: bool = False

    def __post_init__(self):
        for name, is_valid, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "positive"),
            ("frequency_penalty", abs(self.frequency_penalty) < float("inf"), "finite"),
            ("presence_penalty", abs(self.presence_penalty) < float("inf"), "finite"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("logprobs", 0 <= self.logprobs <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
        ):
            if not is_valid:
                raise ValueError(f"{name} is {expected}, got {getattr(self, name)}")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop is a tuple of texts that are not empty, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))


DEFAULT = SamplingParams()


class Settings(NamedTuple):
    """The parameters of several requests as arrays, one row each."""

    temperature: Float[Array, "rows"]
    top_k: Shaped[Array, "rows"]
    top_p: Float[Array, "rows"]
    min_p: Float[Array, "rows"]
    repetition_penalty: Float[Array, "rows"]
    frequency_penalty: Float[Array, "rows"]
    presence_penalty: Float[Array, "rows"]
    seed: Shaped[Array, "rows 2"]
    """The two halves of 64-bit seeds."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "Settings":
        """The settings of requests, which have seeds."""
        columns: list[Any] = [
            np.asarray([getattr(p, name) for p in params], np.int32 if name == "top_k" else np.float32)
            for name in cls._fields[:-1]
        ]
        seeds = [(p.seed or 0) % 2**64 for p in params]
        columns.append(np.asarray([(s >> 32, s & 0xFFFFFFFF) for s in seeds], np.uint32).reshape(-1, 2))
        return cls(*columns)


class Sample(NamedTuple):
    """Sampled tokens."""

    token: Shaped[Array, "rows"]
    logprob: Float[Array, "rows"]
    """Log probability at temperature 1 without penalty; NaN where a logit is."""


def sample_tokens(
    logits: Float[Array, "rows vocab"],
    settings: Settings,
    num_generated: Shaped[Array, "rows"],
    in_context: Bool[Array, "rows vocab"],
    counts: Shaped[Array, "rows vocab"] | None = None,
    allowed: Shaped[Array, "rows bytes"] | None = None,
) -> Sample:
    """Sample a token for each row.

    Args:
        logits: Logits of the next token.
        settings: Sampling parameters of each row.
        num_generated: How many tokens the row has generated: the index of its random number.
        in_context: Which tokens occur in the row's prompt or answer, for the repetition penalty.
        counts: How often each token occurs in the row's answer, for the other penalties; None for an empty answer.
        allowed: The tokens that may be sampled, at least one, as bits of `pack_mask`; None for all.
    """
    # Most batches have no penalty and no constraint: then neither passes over the vocabulary.
    adjusted = jax.lax.cond(
        _has_penalty(settings), lambda: _penalized(logits, settings, in_context, counts), lambda: logits
    )
    if allowed is not None:
        adjusted = jax.lax.cond(
            jnp.any(allowed != _ALL),
            lambda: jnp.where(unpack_mask(allowed, logits.shape[1]), adjusted, -jnp.inf),
            lambda: adjusted,
        )
    token = jax.lax.cond(
        jnp.any(settings.temperature > 0),
        lambda: _sample(adjusted, settings, num_generated),
        lambda: _argmax(adjusted),
    )
    logit = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return Sample(token, logit - _log_total(logits))


def top_logprobs(
    logits: Float[Array, "rows vocab"], count: int
) -> tuple[Shaped[Array, "rows k"], Float[Array, "rows k"]]:
    """The `count` most probable tokens of each row, and their log probabilities."""
    values, tokens = jax.lax.top_k(logits, min(count, logits.shape[1]))
    return tokens.astype(jnp.int32), values - _log_total(logits)[:, None]


def pack_mask(mask: np.ndarray) -> np.ndarray:
    """A mask over the vocabulary as bits; the bits of the padding are set."""
    return np.packbits(np.pad(mask, (0, -len(mask) % 8), constant_values=True), bitorder="little")


def unpack_mask(bits: Shaped[Array, "rows bytes"], vocab: int) -> Bool[Array, "rows vocab"]:
    """The mask of bits that `pack_mask` made."""
    single = jnp.bitwise_and(jnp.right_shift(bits[:, :, None], jnp.arange(8, dtype=jnp.uint8)[None, None]), 1)
    return single.reshape(bits.shape[0], -1)[:, :vocab].astype(bool)


def _has_penalty(settings: Settings) -> Shaped[Array, ""]:
    additive = (settings.frequency_penalty != 0) | (settings.presence_penalty != 0)
    return jnp.any(additive | (settings.repetition_penalty != 1))


def _penalized(logits: Array, settings: Settings, in_context: Array, counts: Array | None) -> Array:
    penalty = settings.repetition_penalty[:, None]
    logits = jnp.where(in_context, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if counts is None:
        return logits
    presence = jnp.where(counts > 0, settings.presence_penalty[:, None], 0)
    return logits - settings.frequency_penalty[:, None] * counts.astype(jnp.float32) - presence


def _log_total(logits: Array) -> Array:
    # jax.nn.logsumexp also handles infinities, which takes longer.
    top = jnp.max(logits, axis=-1)
    # A maximum may drop NaN (see Quantizer), a sum does not.
    return jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), axis=-1)) + top


def _argmax(x: Float[Array, "rows vocab"]) -> Shaped[Array, "rows"]:
    """The index of the first maximum; the last index if there is NaN.

    XLA's CPU backend takes a fifth of the time for a maximum and then its index as for an argmax.
    """
    top = jnp.max(x, axis=-1, keepdims=True)
    indices = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape)
    return jnp.min(jnp.where(x == top, indices, x.shape[1] - 1), axis=-1)


def _sample(logits: Array, settings: Settings, num_generated: Array) -> Array:
    """Inverse transform sampling: the token at which the cumulative probability exceeds a uniform random number."""
    greedy = settings.temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, settings.temperature)[:, None]
    kept = scaled >= threshold(scaled, settings)[:, None]
    weights = jnp.where(kept, jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True)), 0)

    def uniform(seed: Array, number: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), number)
        return jax.random.uniform(key, (), jnp.float32)

    token = _inverse_transform(weights, jax.vmap(uniform)(settings.seed, num_generated))
    return jnp.where(greedy, _argmax(logits), token)


def _inverse_transform(weights: Float[Array, "rows vocab"], point: Float[Array, "rows"]) -> Shaped[Array, "rows"]:
    """In two steps, a block and a token in it: a cumulative sum over the full vocabulary takes far longer."""
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(rows, -1, _BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = point[:, None] * ends[:, -1:]
    block = _first_true(ends > target, sums)
    target = target - jnp.take_along_axis(ends - sums, block[:, None], axis=1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + _first_true(jnp.cumsum(inside, axis=-1) > target, inside)


def _first_true(condition: Bool[Array, "rows count"], weight: Float[Array, "rows count"]) -> Shaped[Array, "rows"]:
    """The first true index; if rounding left none, or one of weight zero, the index of the largest weight."""
    found = jnp.argmax(condition, axis=-1).astype(jnp.int32)
    is_positive = jnp.take_along_axis(jnp.where(condition, weight, 0), found[:, None], axis=1)[:, 0] > 0
    return jnp.where(is_positive, found, jnp.argmax(weight, axis=-1).astype(jnp.int32))


def threshold(scaled: Float[Array, "rows vocab"], settings: Settings) -> Float[Array, "rows"]:
    """The lowest logit that top_k, top_p and min_p keep."""
    total = _log_total(scaled)
    count = min(_CANDIDATES, scaled.shape[1])
    best = jax.lax.top_k(scaled, count)[0]
    low, is_enough = _lowest_kept(best, total, settings, scaled.shape[1])

    def from_sorted() -> Array:
        return _lowest_kept(-jnp.sort(-scaled, axis=-1), total, settings, scaled.shape[1])[0]

    # One row that needs more candidates makes all rows sort, which gives the same result for the others.
    return jax.lax.cond(jnp.all(is_enough), lambda: low, from_sorted)


def _lowest_kept(best: Array, total: Array, settings: Settings, vocab: int) -> tuple[Array, Array]:
    """The lowest kept logit, given the largest ones in descending order, and whether these were enough to decide."""
    count = best.shape[1]
    probability = jnp.exp(best - total[:, None])
    before = jnp.cumsum(probability, axis=1) - probability
    rank = jnp.arange(count)[None]
    top_k = jnp.where(settings.top_k > 0, settings.top_k, vocab)[:, None]
    top_p = settings.top_p[:, None]
    kept = (
        (rank < top_k)
        & ((before < top_p) | (top_p >= 1))
        & (probability >= settings.min_p[:, None] * probability[:, :1])
    )
    kept = kept | (rank == 0)
    # Logits are sorted, so the last that is kept is the lowest.
    low = jnp.min(jnp.where(kept, best, jnp.inf), axis=1)
    plain = (settings.top_k <= 0) & (settings.top_p >= 1) & (settings.min_p <= 0)
    low = jnp.where(plain, -jnp.inf, low)
    return low, plain | ~kept[:, -1] | (settings.top_k == count) | (count == vocab)
