"""The conversion of a model: one pass over its parameters, each read, quantized and let go before the next.

Nothing is run. An abstract trace of the model tells which parameters are multiplied and along which axes; the rules
then say how each is quantized, exactly as in training.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.models import ModelConfig, abstract_params, apply
from octavo.pretrained.memory import peak_memory
from octavo.pretrained.source import Leaf, Source
from octavo.qarray import QArray, Quantizer
from octavo.rules import QuantizationRule
from octavo.transform import quantized

_PIECE = 1 << 20
"""Values that are quantized at once: what is needed beside the parameter itself and its codes."""

_EMBEDDING = "token_embedder/embedding"


@dataclasses.dataclass(frozen=True)
class Done:
    """A parameter that was converted, or kept: `how` is None then."""

    path: str
    value: Any
    how: Quantizer | None
    before: int
    sqnr: float | None
    """The ratio of the parameter's power to that of its error, in dB."""

    @property
    def after(self) -> int:
        """Its bytes now."""
        return self.value.nbytes

    @property
    def kind(self) -> str:
        """How it is stored, in a word or two."""
        return stored_as(self.value)


def stored_as(value: Any) -> str:
    """How a parameter is stored, in a word or two.

    >>> import octavo
    >>> stored_as(octavo.quantize(jnp.ones((64, 2)), "int4", tiled_axes={0: 32})), stored_as(np.ones(2, np.float32))
    ('int4 g32', 'float32')
    """
    if not isinstance(value, QArray):
        return str(value.dtype)
    if value.qtype.tile is not None:
        return value.qtype.name
    groups = [tile for tile, size in zip(value.tile_shape, value.shape, strict=True) if 1 < tile < size]
    return f"{value.qtype.name} g{groups[0]}" if groups else value.qtype.name


def quantizers_of(
    config: ModelConfig, rules: Sequence[QuantizationRule], *, scale_dtype: str | None = None
) -> dict[str, Quantizer]:
    """How each parameter that a rule quantizes is stored, by its path.

    `scale_dtype` is that of scales for which the format has none of its own.

    >>> from octavo.pretrained.weights import weight_rules
    >>> sizes = dict(vocab_size=8, emb_dim=64, num_query_heads=1, num_kv_heads=1, head_dim=64, mlp_dim=64)
    >>> config = ModelConfig(**sizes, num_layers=1, scan_layers=False)
    >>> hows = quantizers_of(config, weight_rules("int4", config))
    >>> hows["decoder/layers_0/mlp/wo/kernel"], hows["token_embedder/embedding"]
    (Quantizer('int4', channelwise_axes=(1,), tiled_axes={0: 32}), Quantizer('int8', channelwise_axes=(0,)))
    """
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    low = quantized(functools.partial(_logits, config), list(rules), weights="params")
    found = low.stored_quantizers(abstract_params(config), tokens)
    if not config.tied_logits and (how := found.get("decoder/logits_dense/kernel")) is not None:
        # The table is only looked up, so no product tells how; a row of it has what a column of the logits has.
        turned = {axis: 1 - axis for axis in (0, 1)}
        found[_EMBEDDING] = Quantizer(
            how.qtype,
            channelwise_axes=tuple(turned[a % 2] for a in how.channelwise_axes),
            tiled_axes={turned[a % 2]: size for a, size in how.tiled_axes},
            calibration=how.calibration,
        )
    if scale_dtype is None:
        return found
    return {path: how if how.qtype.tile else how.replace(scale_dtype=scale_dtype) for path, how in found.items()}


def _logits(config: ModelConfig, params: Any, tokens: Any) -> Any:
    return apply(config, params, tokens)[0]


def convert_leaves(
    source: Source, rules: Sequence[QuantizationRule], *, scale_dtype: str | None = None
) -> Iterator[Done]:
    """Each parameter of a model in turn, quantized as the rules say."""
    hows = quantizers_of(source.config, rules, scale_dtype=scale_dtype)
    for path, leaf in source.leaves.items():
        yield _converted(path, leaf, hows.get(path))


def _converted(path: str, leaf: Leaf, how: Quantizer | None) -> Done:
    value = leaf.load()
    if how is None:
        kept = value if isinstance(value, QArray) else np.asarray(value)
        return Done(path, kept, None, leaf.nbytes, None)
    if isinstance(value, QArray):
        # It was quantized before: what it stands for is what is quantized now.
        value = np.asarray(value.dequantize(jnp.float32))
    codes, sqnr = quantize_array(np.asarray(value), how)
    return Done(path, codes, how, leaf.nbytes, sqnr)


def quantize_array(x: np.ndarray, how: Quantizer) -> tuple[QArray, float]:
    """The QArray of a NumPy array, packed, with arrays of NumPy, and its signal to noise ratio in dB.

    It is made in pieces, along an axis on which every value has scales of its own, so that little memory is needed
    beside `x` and the result.
    """
    axis, count = _pieces(x.shape, how)
    if count == 1:
        codes, signal, noise = _quantize(jnp.asarray(x), how)
        return codes._map(np.asarray), _decibels(float(signal), float(noise))
    whole: QArray | None = None
    signal = noise = 0.0
    size = x.shape[axis]
    step = math.ceil(size / count)
    for start in range(0, size, step):
        piece = np.take(x, range(start, min(size, start + step)), axis=axis)
        codes, power, error = _quantize(jnp.asarray(piece), how)
        signal, noise = signal + float(power), noise + float(error)
        if whole is None:
            whole = codes._map(functools.partial(_empty, axis=axis, size=size, piece=piece.shape[axis]))
        for name in ("qvalue", "scale", "zero_point"):
            part = getattr(codes, name)
            if part is not None:
                place = [slice(None)] * part.ndim
                place[axis] = slice(start, start + part.shape[axis])
                getattr(whole, name)[tuple(place)] = np.asarray(part)
    assert whole is not None
    return whole, _decibels(signal, noise)


def _empty(part: Any, *, axis: int, size: int, piece: int) -> np.ndarray:
    assert part.shape[axis] == piece
    shape = list(part.shape)
    shape[axis] = size
    return np.empty(shape, part.dtype)


def _pieces(shape: tuple[int, ...], how: Quantizer) -> tuple[int, int]:
    """The axis along which an array is quantized in pieces, and how many."""
    total = math.prod(shape)
    if total <= _PIECE:
        return 0, 1
    abstract = jax.eval_shape(lambda: how.quantize(jnp.zeros(shape)))
    if abstract.outer_scale is not None:
        return 0, 1  # one scale for all of it
    free = [a for a, (n, s) in enumerate(zip(shape, abstract.scale.shape, strict=True)) if n == s]
    if not free:
        return 0, 1
    axis = max(free, key=lambda a: shape[a])
    return axis, min(shape[axis], math.ceil(total / _PIECE))


@functools.partial(jax.jit, static_argnames="how")
def _quantize(x: jax.Array, how: Quantizer) -> tuple[QArray, jax.Array, jax.Array]:
    x = x.astype(jnp.float32)
    codes = how.quantize(x).astype(jnp.float32)
    error = codes.dequantize(jnp.float32) - x
    return codes.pack(_packing_axis(how, x.ndim)), jnp.sum(x * x), jnp.sum(error * error)


def _packing_axis(how: Quantizer, ndim: int) -> int:
    """The axis that is contracted: codes that are read together lie in a byte."""
    channelwise = {a % ndim for a in how.channelwise_axes}
    rest = [a for a in range(ndim) if a not in channelwise]
    tiled = [a % ndim for a, _ in how.tiled_axes]
    return (tiled or rest or [ndim - 1])[-1]


def _decibels(signal: float, noise: float) -> float:
    return math.inf if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise)


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a conversion did: sizes in bytes, and for each kind of storage how many parameters have it."""

    before: int
    after: int
    values: int
    kinds: Mapping[str, int]
    ratios: Mapping[str, float]
    """The signal to noise ratio of each parameter that was quantized, in dB, where it was measured."""
    seconds: float
    peak: int

    @property
    def worst(self) -> tuple[tuple[str, float], ...]:
        """The ten parameters with the lowest signal to noise."""
        return tuple(sorted(self.ratios.items(), key=lambda pair: pair[1])[:10])

    @property
    def bits_per_weight(self) -> float:
        """Bits that a parameter takes, on average over all of them."""
        return 8 * self.after / self.values

    def __str__(self) -> str:
        return (
            f"{self.before / 2**20:.1f} MiB -> {self.after / 2**20:.1f} MiB ({self.after / self.before:.3f} of it), "
            f"{self.bits_per_weight:.3f} bits per weight, in {self.seconds:.1f} seconds; "
            f"peak memory {self.peak / 2**20:.0f} MiB"
        )


def convert_model(
    source: Source,
    rules: Sequence[QuantizationRule],
    *,
    scale_dtype: str | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[dict[str, Any], Summary]:
    """All parameters by path, quantized as the rules say, and a summary; `say` is told of each.

    Scales are float32 unless the format has its own, or `scale_dtype` says otherwise.
    """
    began = time.perf_counter()
    params: dict[str, Any] = {}
    kinds: dict[str, int] = {}
    ratios: dict[str, float] = {}
    before = 0
    width = max(map(len, source.leaves))
    for number, done in enumerate(convert_leaves(source, rules, scale_dtype=scale_dtype), 1):
        params[done.path] = done.value
        before += done.before
        kinds[done.kind] = kinds.get(done.kind, 0) + math.prod(source.leaves[done.path].shape)
        if done.sqnr is not None:
            ratios[done.path] = done.sqnr
        if say is not None:
            ratio = f"  {done.sqnr:5.1f} dB" if done.sqnr is not None else ""
            say(
                f"[{number:>{len(str(len(source.leaves)))}}/{len(source.leaves)}] {done.path:<{width}}  "
                f"{source.leaves[done.path].stored:>9} -> {done.kind:<9} "
                f"{done.before / 2**20:9.2f} MiB -> {done.after / 2**20:8.2f} MiB{ratio}"
            )
    after = sum(value.nbytes for value in params.values())
    return params, Summary(before, after, source.size, kinds, ratios, time.perf_counter() - began, peak_memory())
