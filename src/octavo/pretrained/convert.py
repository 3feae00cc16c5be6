"""Converting a model to low precision: parameters are read and quantized one after the other.

An abstract trace of the model finds the parameters that are operands of matmuls, and their contracted axes;
the rules then give the quantizer of each, exactly as in training. The model is not run.
"""

import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.frameworks.serving import quantize_by_range
from octavo.models import ModelConfig, abstract_params, apply
from octavo.pretrained.memory import peak_memory
from octavo.pretrained.model import Leaf, PretrainedModel, storage_name, to_float
from octavo.pretrained.names import EMBEDDING, LOGITS
from octavo.qarray import QArray, Quantizer
from octavo.rules import QuantizationRule
from octavo.transform import quantized

_PIECE = 1 << 20
"""Values per piece: bounds the memory needed in addition to a parameter and its codes."""


def param_quantizers(
    config: ModelConfig, rules: Sequence[QuantizationRule], *, scale_dtype: str | None = None
) -> dict[str, Quantizer]:
    """The quantizer of each parameter that a rule quantizes, by path.

    Args:
      config: The model.
      rules: The first that matches a matmul applies to it.
      scale_dtype: The dtype of scales, for formats that do not define one.

    >>> from octavo.pretrained.weight_rules import weight_rules
    >>> sizes = dict(vocab_size=8, emb_dim=64, num_query_heads=1, num_kv_heads=1, head_dim=64, mlp_dim=64)
    >>> config = ModelConfig(**sizes, num_layers=1, scan_layers=False)
    >>> quantizers = param_quantizers(config, weight_rules("int4", config))
    >>> quantizers["decoder/layers_0/mlp/wo/kernel"], quantizers["token_embedder/embedding"]
    (Quantizer('int4', channelwise_axes=(1,), tiled_axes={0: 32}), Quantizer('int8', channelwise_axes=(0,)))
    """
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    low = quantized(functools.partial(logits, config), list(rules), weights="params")
    found = low.stored_quantizers(abstract_params(config), tokens)
    if not config.tied_logits and (quantizer := found.get(LOGITS)) is not None:
        # The table is only indexed, not an operand of a matmul: rows are quantized like columns of the logits.
        found[EMBEDDING] = Quantizer(
            quantizer.qtype,
            channelwise_axes=tuple(1 - a % 2 for a in quantizer.channelwise_axes),
            tiled_axes={1 - a % 2: size for a, size in quantizer.tiled_axes},
            calibration=quantizer.calibration,
        )
    if scale_dtype is None:
        return found
    return {path: q if q.qtype.tile else q.replace(scale_dtype=scale_dtype) for path, q in found.items()}


def logits(config: ModelConfig, params: Any, tokens: Any) -> Any:
    """The logits of a model without a cache."""
    return apply(config, params, tokens)[0]


def _remembered_ranges(source: PretrainedModel, rules: Sequence[QuantizationRule]) -> dict[str, Any]:
    """The range by which training quantized each parameter, by path, where the model remembers it."""
    low = quantized(functools.partial(logits, source.config), list(rules), weights="params")
    return low.stored_ranges(source.state, abstract_params(source.config), jax.ShapeDtypeStruct((1, 8), jnp.int32))


def quantize_array(x: np.ndarray, quantizer: Quantizer, bounds: dict[str, Any] | None = None) -> tuple[QArray, float]:
    """Quantize a NumPy array to a packed QArray of NumPy arrays; also returns the signal to noise ratio in dB.

    `bounds` are its range if training remembers it.

    Large arrays are quantized in pieces, along an axis on which no scale is shared, to need little memory in addition
    to `x` and the result.
    """
    axis, count = _split(x.shape, quantizer) if bounds is None else (0, 1)
    if count == 1:
        codes, signal, noise = _quantize(jnp.asarray(x), quantizer, bounds)
        return codes._map(np.asarray), _decibels(float(signal), float(noise))
    result: QArray | None = None
    signal = noise = 0.0
    size = x.shape[axis]
    step = math.ceil(size / count)
    for start in range(0, size, step):
        piece = np.take(x, range(start, min(size, start + step)), axis=axis)
        codes, power, error = _quantize(jnp.asarray(piece), quantizer)
        signal, noise = signal + float(power), noise + float(error)
        if result is None:
            result = codes._map(functools.partial(_empty, axis=axis, size=size, piece=piece.shape[axis]))
        for name in ("qvalue", "scale", "zero_point"):
            array = getattr(codes, name)
            if array is not None:
                index = [slice(None)] * array.ndim
                index[axis] = slice(start, start + array.shape[axis])
                getattr(result, name)[tuple(index)] = np.asarray(array)
    assert result is not None
    return result, _decibels(signal, noise)


def _empty(part: Any, *, axis: int, size: int, piece: int) -> np.ndarray:
    assert part.shape[axis] == piece
    shape = list(part.shape)
    shape[axis] = size
    return np.empty(shape, part.dtype)


def _split(shape: tuple[int, ...], quantizer: Quantizer) -> tuple[int, int]:
    """The axis along which an array is quantized in pieces, and their number."""
    total = math.prod(shape)
    if total <= _PIECE:
        return 0, 1
    abstract = jax.eval_shape(lambda: quantizer.quantize(jnp.zeros(shape)))
    if abstract.outer_scale is not None:
        return 0, 1  # one scale for all of it
    free = [a for a, (n, s) in enumerate(zip(shape, abstract.scale.shape, strict=True)) if n == s]
    if not free:
        return 0, 1
    axis = max(free, key=lambda a: shape[a])
    return axis, min(shape[axis], math.ceil(total / _PIECE))


@functools.partial(jax.jit, static_argnames="quantizer")
def _quantize(x: jax.Array, quantizer: Quantizer, bounds: Any = None) -> tuple[QArray, jax.Array, jax.Array]:
    x = x.astype(jnp.float32)
    codes = quantize_by_range(x, quantizer, bounds).astype(jnp.float32)
    error = codes.dequantize(jnp.float32) - x
    return pack(codes, quantizer), jnp.sum(x * x), jnp.sum(error * error)


def pack(codes: QArray, quantizer: Quantizer) -> QArray:
    """Codes packed along the contracted axis."""
    return codes.pack(_packing_axis(quantizer, codes.ndim))


def signal_to_noise(x: jax.Array, codes: QArray) -> float:
    """The signal to noise ratio of codes, in dB."""
    x = x.astype(jnp.float32)
    return _decibels(float(jnp.sum(x * x)), float(jnp.sum(jnp.square(codes.dequantize(jnp.float32) - x))))


def _packing_axis(quantizer: Quantizer, ndim: int) -> int:
    """The contracted axis, so that codes that are read together share a byte."""
    channelwise = {a % ndim for a in quantizer.channelwise_axes}
    rest = [a for a in range(ndim) if a not in channelwise]
    tiled = [a % ndim for a, _ in quantizer.tiled_axes]
    return (tiled or rest or [ndim - 1])[-1]


def _decibels(signal: float, noise: float) -> float:
    return math.inf if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise)


@dataclasses.dataclass(frozen=True)
class Summary:
    """Sizes and errors of a conversion.

    Attributes:
      before: Bytes of the parameters in their float dtype.
      after: Bytes as stored.
      values: Number of parameters.
      kinds: Number of parameters by storage format.
      ratios: Signal to noise ratio in dB of quantized parameters, by path, where it was measured.
      seconds: Duration.
      peak: Peak memory in bytes.
    """

    before: int
    after: int
    values: int
    kinds: Mapping[str, int]
    ratios: Mapping[str, float]
    seconds: float
    peak: int

    @property
    def worst(self) -> tuple[tuple[str, float], ...]:
        """The ten parameters with the lowest signal to noise ratio."""
        return tuple(sorted(self.ratios.items(), key=lambda pair: pair[1])[:10])

    @property
    def bits_per_weight(self) -> float:
        """Average bits per parameter."""
        return 8 * self.after / self.values

    def __str__(self) -> str:
        return (
            f"{self.before / 2**20:.1f} MiB -> {self.after / 2**20:.1f} MiB ({self.after / self.before:.3f} of it), "
            f"{self.bits_per_weight:.3f} bits per weight, in {self.seconds:.1f} seconds; "
            f"peak memory {self.peak / 2**20:.0f} MiB"
        )


def convert_model(
    source: PretrainedModel,
    rules: Sequence[QuantizationRule],
    *,
    scale_dtype: str | None = None,
    log: Callable[[str], None] | None = None,
    codes: Mapping[str, tuple[Any, float | None]] | None = None,
) -> tuple[dict[str, Any], Summary]:
    """Quantize all parameters of a model.

    Args:
      source: The model.
      rules: The first that matches a matmul applies to it.
      scale_dtype: The dtype of scales, for formats that do not define one; float32 by default.
      log: Called with a line for each parameter.
      codes: Parameters that are converted already, by path, with the signal to noise ratios of quantized ones.

    Returns:
      The parameters by path, arrays and QArrays of NumPy, and a summary.
    """
    params: dict[str, Any] = {}
    sums = ConversionSums(len(source.leaves), max(map(len, source.leaves)))
    quantizers = param_quantizers(source.config, rules, scale_dtype=scale_dtype)
    ranges = _remembered_ranges(source, rules)
    for path, leaf in source.leaves.items():
        value: Any
        ratio = None
        if codes is not None and path in codes:
            value, ratio = codes[path]
        elif path in quantizers:
            value, ratio = quantize_array(to_float(leaf.load(), "float32"), quantizers[path], ranges.get(path))
        else:
            value = leaf.load()
        params[path] = value = value if isinstance(value, QArray) else np.asarray(value)
        line = sums.add(path, leaf, storage_name(value), value.nbytes, ratio)
        if log is not None:
            log(line)
    return params, sums.summary()


class ConversionSums:
    """Sums up the sizes of a conversion; `count` and `width` are the number of parameters and their longest name."""

    def __init__(self, count: int, width: int):
        self._count, self._width, self._done, self._start = count, width, 0, time.perf_counter()
        self._before = self._after = self._values = 0
        self._kinds: Counter[str] = Counter()
        self._ratios: dict[str, float] = {}

    def add(self, name: str, leaf: Leaf, kind: str, nbytes: int, ratio: float | None = None) -> str:
        """Add a parameter that is stored as `kind` in so many bytes, and return its line of the log."""
        values = math.prod(leaf.shape)
        self._done += 1
        self._before += leaf.nbytes
        self._after += nbytes
        self._values += values
        self._kinds[kind] += values
        number = f"{self._done:>{len(str(self._count))}}/{self._count}"
        sizes = f"{leaf.nbytes / 2**20:9.2f} MiB -> {nbytes / 2**20:8.2f} MiB"
        line = f"[{number}] {name:<{self._width}}  {leaf.stored:>9} -> {kind:<9} {sizes}"
        if ratio is None:
            return line
        self._ratios[name] = ratio
        return f"{line}  {ratio:5.1f} dB"

    def summary(self) -> Summary:
        seconds = time.perf_counter() - self._start
        return Summary(self._before, self._after, self._values, self._kinds, self._ratios, seconds, peak_memory())
