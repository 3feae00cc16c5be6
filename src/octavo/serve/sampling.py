"""Choosing the next token, for many requests at once, each with parameters and random numbers of its own."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo._config import Config
from octavo._typing import Array, Bool, Float, Shaped

MAX_LOGPROBS = 20
"""Of how many tokens at most the probabilities are told at each step."""

# Most distributions are cut within this many tokens. Sorting the vocabulary, for others, takes some milliseconds.
_CANDIDATES = 64
_BLOCK = 256


@dataclasses.dataclass(frozen=True, repr=False)
class SamplingParams(Config):
    """How the tokens of one request are chosen.

    A temperature of 0 takes the likeliest token. `top_k` keeps that many tokens (0: all), `top_p` the fewest whose
    probabilities sum to at least that, `min_p` those with at least that share of the likeliest one's probability: each
    of the distribution at the given temperature, and tokens that are equally likely stay or go together.
    `repetition_penalty` divides the positive logits of tokens that were there before, in the prompt too, and
    multiplies the negative ones. With a `seed` the same request gives the same tokens, whatever else runs beside it.

    >>> SamplingParams(temperature=0.7, top_p=0.9)
    SamplingParams(temperature=0.7, top_p=0.9)
    """

    temperature: float | int = 1.0
    top_k: int = 0
    top_p: float | int = 1.0
    min_p: float | int = 0.0
    repetition_penalty: float | int = 1.0
    max_tokens: int = 128
    stop: Sequence[str] = ()
    """Texts that end the answer, which does not have them."""
    seed: int | None = None
    logprobs: int = 0
    """Of how many likeliest tokens to tell the logarithm of the probability, at temperature 1."""

    def __post_init__(self):
        for name, fine, what in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "positive"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("logprobs", 0 <= self.logprobs <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
        ):
            if not fine:
                raise ValueError(f"{name} is {what}, got {getattr(self, name)}")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop is a tuple of texts that are not empty, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))


DEFAULT = SamplingParams()


class Settings(NamedTuple):
    """The parameters of several requests as arrays, a row for each."""

    temperature: Float[Array, "rows"]
    top_k: Shaped[Array, "rows"]
    top_p: Float[Array, "rows"]
    min_p: Float[Array, "rows"]
    penalty: Float[Array, "rows"]
    seed: Shaped[Array, "rows 2"]
    """A seed of 64 bits in two halves."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "Settings":
        """Of requests; a seed must be there."""

        def column(name: str, dtype: type) -> np.ndarray:
            return np.asarray([getattr(p, name) for p in params], dtype)

        seeds = [(p.seed or 0) % 2**64 for p in params]
        return cls(
            column("temperature", np.float32),  # pyrefly: ignore
            column("top_k", np.int32),  # pyrefly: ignore
            column("top_p", np.float32),  # pyrefly: ignore
            column("min_p", np.float32),  # pyrefly: ignore
            column("repetition_penalty", np.float32),  # pyrefly: ignore
            np.asarray([(s >> 32, s & 0xFFFFFFFF) for s in seeds], np.uint32).reshape(-1, 2),  # pyrefly: ignore
        )


class Choice(NamedTuple):
    """The tokens that were chosen."""

    token: Shaped[Array, "rows"]
    logprob: Float[Array, "rows"]
    """Of the token, at temperature 1 and without a penalty; NaN where the logits are."""


def choose(
    logits: Float[Array, "rows vocab"],
    settings: Settings,
    number: Shaped[Array, "rows"],
    seen: Bool[Array, "rows vocab"],
) -> Choice:
    """A token for each row. `number` counts the tokens of a request, so that each has random numbers of its own."""
    penalty = settings.penalty[:, None]
    adjusted = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    token = jax.lax.cond(
        jnp.any(settings.temperature > 0),
        lambda: _sampled(adjusted, settings, number),
        lambda: _argmax(adjusted),
    )
    own = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return Choice(token, own - _log_total(logits))


def likeliest(logits: Float[Array, "rows vocab"], count: int) -> tuple[Shaped[Array, "rows k"], Float[Array, "rows k"]]:
    """The `count` likeliest tokens of each row, and the logarithms of their probabilities."""
    values, tokens = jax.lax.top_k(logits, min(count, logits.shape[1]))
    return tokens.astype(jnp.int32), values - _log_total(logits)[:, None]


def _log_total(logits: Array) -> Array:
    # As sums of exponentials of differences: jax.nn.logsumexp does more, for infinities.
    top = jnp.max(logits, axis=-1)
    # A maximum may lose NaN (see Quantizer), a sum does not.
    return jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), axis=-1)) + top


def _argmax(x: Float[Array, "rows vocab"]) -> Shaped[Array, "rows"]:
    """The place of the largest, the first of equal ones; the last place if there is NaN.

    XLA's CPU backend finds a maximum and then its place in a fifth of the time that it takes to find both at once.
    """
    top = jnp.max(x, axis=-1, keepdims=True)
    places = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape)
    return jnp.min(jnp.where(x == top, places, x.shape[1] - 1), axis=-1)


def _sampled(logits: Array, settings: Settings, number: Array) -> Array:
    """Where a random point of [0, total) falls, if tokens lie side by side with lengths as their probabilities."""
    greedy = settings.temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, settings.temperature)[:, None]
    kept = scaled >= threshold(scaled, settings)[:, None]
    chance = jnp.where(kept, jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True)), 0)

    def uniform(seed: Array, number: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), number)
        return jax.random.uniform(key, (), jnp.float32)

    token = _place(chance, jax.vmap(uniform)(settings.seed, number))
    return jnp.where(greedy, _argmax(logits), token)


def _place(chance: Float[Array, "rows vocab"], point: Float[Array, "rows"]) -> Shaped[Array, "rows"]:
    """In two steps, a block and a token in it: a running sum of the whole vocabulary would take far longer."""
    rows, vocab = chance.shape
    blocks = jnp.pad(chance, ((0, 0), (0, -vocab % _BLOCK))).reshape(rows, -1, _BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = point[:, None] * ends[:, -1:]
    block = _first(ends > target, sums)
    target = target - jnp.take_along_axis(ends - sums, block[:, None], axis=1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + _first(jnp.cumsum(inside, axis=-1) > target, inside)


def _first(true: Bool[Array, "rows count"], weight: Float[Array, "rows count"]) -> Shaped[Array, "rows"]:
    """The first place that is true; where rounding has left none, or one without weight, that of the largest weight."""
    found = jnp.argmax(true, axis=-1).astype(jnp.int32)
    weighs = jnp.take_along_axis(jnp.where(true, weight, 0), found[:, None], axis=1)[:, 0] > 0
    return jnp.where(weighs, found, jnp.argmax(weight, axis=-1).astype(jnp.int32))


def threshold(scaled: Float[Array, "rows vocab"], settings: Settings) -> Float[Array, "rows"]:
    """The lowest logit that top_k, top_p and min_p keep."""
    total = _log_total(scaled)
    count = min(_CANDIDATES, scaled.shape[1])
    best = jax.lax.top_k(scaled, count)[0]
    low, enough = _cut(best, total, settings, scaled.shape[1])

    def of_all() -> Array:
        return _cut(-jnp.sort(-scaled, axis=-1), total, settings, scaled.shape[1])[0]

    # One that needs to see more makes all of them sort: rows differ in nothing else, so none is changed by another.
    return jax.lax.cond(jnp.all(enough), lambda: low, of_all)


def _cut(best: Array, total: Array, settings: Settings, vocab: int) -> tuple[Array, Array]:
    """The lowest logit kept, from the largest in descending order, and whether these were enough to tell."""
    count = best.shape[1]
    chance = jnp.exp(best - total[:, None])
    before = jnp.cumsum(chance, axis=1) - chance
    place = jnp.arange(count)[None]
    top_k = jnp.where(settings.top_k > 0, settings.top_k, vocab)[:, None]
    top_p = settings.top_p[:, None]
    kept = (place < top_k) & ((before < top_p) | (top_p >= 1)) & (chance >= settings.min_p[:, None] * chance[:, :1])
    kept = kept | (place == 0)
    # Kept ones come first, so the last of them is the lowest.
    low = jnp.min(jnp.where(kept, best, jnp.inf), axis=1)
    plain = (settings.top_k <= 0) & (settings.top_p >= 1) & (settings.min_p <= 0)
    low = jnp.where(plain, -jnp.inf, low)
    return low, plain | ~kept[:, -1] | (settings.top_k == count) | (count == vocab)
