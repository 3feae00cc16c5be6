"""Evaluation on a text: perplexity, and the divergence from a reference model, by token and by layer.

With l the negative log likelihood of each token and n of them: perplexity = exp(mean l), its standard error by the
delta method perplexity * std(l) / sqrt(n). Against a reference p, for a model q:

    KL = mean over tokens of sum_t p(t) (log p(t) - log q(t))
    RMS change = sqrt(mean (q(token) - p(token))^2)        same top-1 = mean [argmax p = argmax q]

as llama.cpp reports them.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array
from octavo.models import Decoder, ModelConfig, apply, layer_groups
from octavo.models.decoder import LayerAngles
from octavo.models.module_params import bind
from octavo.pretrained.model import PretrainedModel
from octavo.serve.cache import KVCache, KVConfig

_LOGITS_AT_ONCE = 1 << 26


@dataclasses.dataclass(frozen=True)
class Measured:
    """A mean over tokens and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.6g} ± {self.error:.2g}"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation; see the module for the formulas. Fields after `seconds` need a reference."""

    tokens: int
    perplexity: Measured
    loss: Measured
    seconds: float
    reference_perplexity: Measured | None = None
    log_ratio: Measured | None = None
    """The mean of log(perplexity / reference perplexity) by token: its error is much smaller than those of the two."""
    kl: Measured | None = None
    rms_change: float | None = None
    same_top: Measured | None = None
    layers: tuple[tuple[str, float], ...] = ()
    """The signal-to-noise ratio of each layer's output, in dB."""

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"tokens            {self.tokens}", f"perplexity        {self.perplexity}"]
        if self.reference_perplexity is not None:
            assert self.log_ratio is not None
            assert self.kl is not None
            assert self.same_top is not None
            change = math.expm1(self.log_ratio.mean)
            lines += [
                f"  of the other    {self.reference_perplexity}",
                f"  change          {change:+.4%} ± {self.log_ratio.error:.4%}",
                f"KL divergence     {self.kl}",
                f"RMS change of p   {self.rms_change:.4%}",
                f"same top token    {self.same_top.mean:.3%} ± {self.same_top.error:.3%}",
            ]
        if self.layers:
            lines.append("signal to noise of each layer's output, in dB:")
            lines += [f"  {name:<16} {ratio:6.1f}" for name, ratio in self.layers]
        return "\n".join(lines)


def evaluate(
    source: PretrainedModel,
    ids: Sequence[int],
    *,
    against: PretrainedModel | None = None,
    kv: KVConfig | None = None,
    length: int = 256,
    layers: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Evaluation:
    """Evaluate a model on the token ids of a text, in independent windows.

    Args:
        source: The model.
        ids: The text. Windows start with the BOS token, if the model has one, so that the first token counts.
        against: The reference model.
        kv: If given, attention reads keys and values from a cache of this precision.
        length: The tokens of a window.
        layers: Whether to compare the outputs of layers with those of the reference.
        progress: Called with the progress.
    """
    began = time.perf_counter()
    windows = list(_windows(ids, length, source))
    if not windows:
        raise ValueError("the text is too short: there is no token to predict")
    run = _forward(source, kv)
    other = None if against is None else _forward(against, None)
    if against is not None and against.config.vocab_size != source.config.vocab_size:
        raise ValueError(
            f"the vocabularies differ: {source.config.vocab_size} and {against.config.vocab_size} tokens; models of "
            "one family can be compared"
        )
    rows = min(len(windows), max(1, _LOGITS_AT_ONCE // (length * source.config.vocab_size)))
    found: dict[str, list[np.ndarray]] = {}
    for start in range(0, len(windows), rows):
        tokens, targets, counts = _padded(windows[start : start + rows], rows, length)
        measured = _measure(run(tokens), None if other is None else other(tokens), targets)
        for name, values in measured.items():
            found.setdefault(name, []).append(np.asarray(values)[counts])
        if progress is not None:
            progress(f"{min(start + rows, len(windows))} of {len(windows)} windows")
    values = {name: np.concatenate(parts).astype(np.float64) for name, parts in found.items()}
    loss = _mean(values["nll"])
    result = Evaluation(values["nll"].size, _perplexity(loss), loss, 0.0)
    if against is not None:
        change = values["change"]
        result = dataclasses.replace(
            result,
            reference_perplexity=_perplexity(_mean(values["reference"])),
            log_ratio=_mean(values["nll"] - values["reference"]),
            kl=_mean(values["kl"]),
            rms_change=float(np.sqrt(np.mean(change**2))),
            same_top=_mean(values["same"]),
            layers=_layer_ratios(source, against, windows[0]) if layers else (),
        )
    return dataclasses.replace(result, seconds=time.perf_counter() - began)


def _perplexity(loss: Measured) -> Measured:
    value = math.exp(min(loss.mean, 700.0))
    return Measured(value, value * loss.error)


def _mean(values: np.ndarray) -> Measured:
    error = float(np.std(values, ddof=1) / np.sqrt(values.size)) if values.size > 1 else math.nan
    return Measured(float(np.mean(values)), error)


def _windows(ids: Sequence[int], length: int, source: PretrainedModel) -> Iterator[list[int]]:
    """Windows of input tokens and one more: the target of the last."""
    tokenizer = source.tokenizer
    bos = [tokenizer.bos_id] if tokenizer is not None and tokenizer.add_bos and tokenizer.bos_id is not None else []
    text = [int(i) for i in ids]
    if bos and text[:1] == bos:
        text = text[1:]
    if any(not 0 <= i < source.config.vocab_size for i in set(text)):
        raise ValueError(f"an id of the text is outside of the model's vocabulary of {source.config.vocab_size}")
    step = length + 1 - len(bos)
    for start in range(0, len(text), step if bos else length):
        window = [*bos, *text[start : start + step]]
        if len(window) > 1:
            yield window


def _padded(windows: list[list[int]], rows: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, targets = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    counts = np.zeros((rows, length), bool)
    for row, window in enumerate(windows):
        size = len(window) - 1
        tokens[row, :size], targets[row, :size], counts[row, :size] = window[:-1], window[1:], True
    return tokens, targets, counts


def _forward(source: PretrainedModel, kv: KVConfig | None) -> Callable[[np.ndarray], Array]:
    """The logits of windows of tokens."""
    params = source.params()

    @jax.jit
    def logits(params: Any, tokens: Array) -> Array:
        # One call for a window: with a cache, each token attends to keys and values as the cache stores them.
        rows, length = tokens.shape
        cache = None if kv is None else KVCache.empty(source.config, kv, slots=rows, max_length=length)
        return source.function(functools.partial(apply, source.config, cache=cache))(params, tokens)[0]

    return lambda tokens: logits(params, jnp.asarray(tokens))


@jax.jit
def _measure(logits: Array, reference: Array | None, targets: Array) -> dict[str, Array]:
    """What is averaged over tokens, by token."""

    def log_softmax(logits: Array) -> Array:
        return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)

    def at_targets(logs: Array) -> Array:
        return jnp.take_along_axis(logs, targets[..., None], axis=-1)[..., 0]

    mine = log_softmax(logits)
    found = {"nll": -at_targets(mine)}
    if reference is not None:
        other = log_softmax(reference)
        found["reference"] = -at_targets(other)
        found["kl"] = jnp.sum(jnp.exp(other) * (other - mine), axis=-1)
        found["change"] = jnp.exp(at_targets(mine)) - jnp.exp(at_targets(other))
        found["same"] = (jnp.argmax(mine, axis=-1) == jnp.argmax(other, axis=-1)).astype(jnp.float32)
    return found


def layer_outputs(config: ModelConfig, params: Any, tokens: Any) -> dict[str, Array]:
    """The output of each layer by its name, and the logits."""
    model = bind(Decoder, config, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = model.embed(tokens, positions)
    angles = LayerAngles.of(config, positions, jnp.zeros(tokens.shape, jnp.int32))
    found = {}
    for group in layer_groups(config):
        here = angles.sliding if config.is_sliding(group.layers[0]) else angles.full
        found[group.name] = x = getattr(model.decoder, group.name)(x, here)[0]
    found["logits"] = model.logits(model.decoder.decoder_norm(x))
    return found


def _layer_ratios(
    source: PretrainedModel, against: PretrainedModel, window: list[int]
) -> tuple[tuple[str, float], ...]:
    tokens = jnp.asarray([window[:-1]], jnp.int32)
    outputs = [
        jax.jit(s.function(functools.partial(layer_outputs, s.config)))(s.params(), tokens) for s in (source, against)
    ]
    found = []
    for name, wanted in outputs[1].items():
        signal = float(jnp.sum(jnp.square(wanted)))
        noise = float(jnp.sum(jnp.square(outputs[0][name] - wanted)))
        found.append((name, math.inf if noise == 0 else 10 * math.log10(signal / noise)))
    return tuple(found)
