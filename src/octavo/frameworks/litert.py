"""Fake quantization of models as LiteRT computes them, and its composites in StableHLO.

Weights of matmuls and convolutions have one scale for each output channel, or one in all; other tensors have one.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from octavo._tree import flatten_paths
from octavo._typing import Array
from octavo.calibration import Fixed, RunningMean, widest
from octavo.frameworks.litert_evaluation import Evaluation, FakeQuant
from octavo.frameworks.litert_tensors import MARK, Node, Tensor
from octavo.qarray import Quantizer, fake_quant
from octavo.rules import QuantizationRule
from octavo.transform import QuantizationProvider
from octavo.transform.frame import Frame, Key, Value
from octavo.transform.jaxpr import Jaxpr
from octavo.transform.state import QUANT_STATS, find_state, static_scale
from octavo.transform.weights import Origin


@functools.lru_cache
def _mark(name: str) -> Callable[[Array], Array]:
    """An identity that is visible in a jaxpr by its name."""

    def identity(x: Array) -> Array:
        return x

    identity.__name__ = MARK + name
    return jax.jit(identity)


def _mark_arrays(name: str, tree: Any) -> Any:
    return jax.tree.map(lambda x: _mark(name)(x) if isinstance(x, jax.Array) else x, tree)


class OdmlQatProvider(QuantizationProvider):
    """Quantization-aware training for LiteRT: operations in float, of tensors that are fake-quantized.

    Args:
        rules: The rules. With `act_qtype`, ranges are "minmax" unless they say else, and static unless
            `act_static_scale` is False: then only the activations of matmuls with weights are quantized, by their own
            ranges. `weight_qtype` is that of the weights that an operation reads, `act_qtype` that of its result.
        disable_per_channel_weights: Whether a weight has one scale.
        fixed_range_for_inputs: The range of all inputs of the model; None to measure each.
        fixed_range_for_outputs: The range of all outputs.
        strict: Accepted for Qwix; weights and activations are known by their paths.

    >>> OdmlQatProvider([QuantizationRule(weight_qtype="int8")]).rules
    (QuantizationRule(weight_qtype='int8'),)
    """

    def __init__(
        self,
        rules: Any,
        *,
        disable_per_channel_weights: bool = False,
        fixed_range_for_inputs: tuple[float, float] | None = None,
        fixed_range_for_outputs: tuple[float, float] | None = None,
        strict: bool = True,
    ):
        del strict
        super().__init__(rules)
        self.evaluation = Evaluation(
            FakeQuant(self._weight, self._dynamic, self._static),
            per_tensor=disable_per_channel_weights,
            flat_weights=isinstance(self, OdmlConversionProvider),
            input_range=fixed_range_for_inputs,
            output_range=fixed_range_for_outputs,
        )

    def _init_rule(self, rule: QuantizationRule) -> QuantizationRule:
        if rule.act_qtype is None:
            return rule
        method, static = rule.act_calibration_method or "minmax", rule.act_static_scale is not False
        return rule.replace(act_calibration_method=method, act_static_scale=static)

    def evaluate(self, jaxpr: Jaxpr, values: list[Value], frame: Frame) -> list[Value]:
        nodes = self.evaluation.run(jaxpr, [Node(value, Tensor()) for value in values], frame)
        return [node.value for node in nodes]

    def trace_model(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _mark_arrays("input", (args, kwargs))
        return _mark_arrays("final_output" if name == "__call__" else f"{name}_output", fn(*args, **kwargs))

    def trace_method(
        self, module: Any, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        op = next((op for kind, op in _NORMS.items() if isinstance(module, kind)), None)
        if op is None or name != "__call__" or not args:
            return fn(*args, **kwargs)
        return _mark(f"end_{op}")(fn(_mark(f"begin_{op}")(args[0]), *args[1:], **kwargs))

    def _weight(self, x: Array, quantizer: Quantizer, origin: Origin, reader: str) -> Array:
        """A weight, fake-quantized."""
        del origin, reader
        return fake_quant(x, quantizer)

    def _dynamic(self, x: Array, quantizer: Quantizer) -> Array:
        """An activation, fake-quantized by its own range."""
        return fake_quant(x, quantizer)

    def _static(self, x: Array, quantizer: Quantizer, key: Key, frame: Frame) -> Array:
        """An activation, fake-quantized by the mean of the ranges of all steps."""
        measured = quantizer.measure(x)
        bounds = {k: jnp.mean(v.astype(jnp.float32), keepdims=True) for k, v in measured.items()}
        bounds = widest(bounds, frame.manual_axes)
        fixed, tracker = isinstance(quantizer.calibration, Fixed), RunningMean()
        state = frame.read(key, lambda: tracker.init(bounds))
        if not frame.context.init and frame.context.updates(key.path):
            # The mean of a range that is always the same would collect rounding errors.
            state = tracker.update(tracker.init(bounds) if fixed else state, bounds)
            frame.write(key, state)
        used = bounds if frame.context.init else tracker.read(state, bounds)
        whole = Quantizer(quantizer.qtype, (), calibration=quantizer.calibration)
        low = whole.quantize(x, bounds=used).dequantize()
        # As in Qwix, the gradient of a clipped value is that of the range, which it reaches as the largest value does.
        ends = (-used["absmax"], used["absmax"]) if "absmax" in used else (used["min"], used["max"])
        straight = jnp.clip(x, *(end.astype(x.dtype) for end in ends))
        return straight + jax.lax.stop_gradient(low - straight)


_NORMS = {
    nn.LayerNorm: "norm_op",
    nn.GroupNorm: "norm_op",
    nn.BatchNorm: "batch_norm_op",
    nnx.BatchNorm: "batch_norm_op",
    nn.Dropout: "dropout",
}
"""Modules that are one operation."""


class OdmlConversionProvider(OdmlQatProvider):
    """Conversion to LiteRT: each fake quantization is a StableHLO composite `quant.fake_quant` with constant scales.

    Args:
        rules: The rules of training, or others.
        params: The parameters, whose scales become constants of the program.
        quant_stats: The statistics of static ranges, from training or calibration; {} if there are none.
        **kwargs: As for `OdmlQatProvider`.

    >>> import flax.linen as nn, octavo
    >>> x = jnp.ones((1, 4))
    >>> variables = nn.Dense(2).init(jax.random.key(0), x)
    >>> provider = OdmlConversionProvider([QuantizationRule(weight_qtype="int8")], variables["params"], {})
    >>> text = jax.jit(octavo.quantize_model(nn.Dense(2), provider).apply).lower(variables, x).as_text()
    >>> "stablehlo.composite \\"quant.fake_quant\\"" in text
    True
    """

    def __init__(self, rules: Any, params: Any, quant_stats: Any, **kwargs: Any):
        super().__init__(rules, **kwargs)
        self.stateful = False  # the statistics are constants of the program
        self.params = {name: np.asarray(x) for name, x in flatten_paths(params).items()}
        self.quant_stats = {QUANT_STATS: quant_stats}

    def _weight(self, x: Array, quantizer: Quantizer, origin: Origin, reader: str) -> Array:
        with jax.ensure_compile_time_eval():
            value = jnp.asarray(_stored(origin, reader, self.params, x.shape))
            bounds = quantizer.scale_of(quantizer.measure(value), x.dtype)
        return _composite(x, quantizer, bounds, origin.leaves[0])

    def _dynamic(self, x: Array, quantizer: Quantizer) -> Array:
        return _composite(x, quantizer, None)

    def _static(self, x: Array, quantizer: Quantizer, key: Key, frame: Frame) -> Array:
        stats = find_state(self.quant_stats, key)
        if stats is None or not np.all(np.asarray(stats["count"]) > 0):
            raise ValueError(
                f"quant_stats has no range of {key.name} at {key.path!r}: run the model of OdmlQatProvider, with these "
                "rules, on calibration data with mutable='quant_stats', and pass what it returns"
            )
        with jax.ensure_compile_time_eval():
            bounds = static_scale(quantizer, jax.tree.map(jnp.asarray, dict(stats)), x.dtype)
            bounds = {k: v.reshape((1,) * x.ndim) for k, v in bounds.items()}
        return _composite(x, quantizer, bounds)


def _composite(x: Array, quantizer: Quantizer, bounds: Mapping[str, Any] | None, weight: str = "") -> Array:
    """A fake quantization as a composite, by the range of `x` if there are no bounds; `weight` is a weight's name."""
    if quantizer.qtype.name != "int8":
        raise ValueError(f"the fake quantization of LiteRT is int8, got {quantizer.qtype.name}")
    found = bounds or {}
    whole = quantizer if weight or bounds is None else Quantizer(quantizer.qtype, (), calibration=quantizer.calibration)

    def decomposition(x: Array, **attributes: Any) -> Array:
        del attributes
        return whole.quantize(x, bounds=bounds, check_finite=False).dequantize()  # pyrefly: ignore

    attributes = _attributes(weight, found.get("scale"), found.get("zero_point"))
    return jax.lax.composite(decomposition, name="quant.fake_quant")(x, **attributes)


def _stored(origin: Origin, reader: str, params: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """A weight by its path, rearranged as the operand is."""
    leaf = origin.leaves[0]
    if leaf not in params or not origin.is_stored or origin.axes is None:
        reason = "is not among params" if leaf not in params else "is computed from before it is used"
        raise ValueError(f"the weight {leaf!r} of {reader} {reason}, so its scales are not constant")
    factors = [factor for axis in origin.axes for factor in axis]
    digits = sorted(factors, key=lambda f: (f.axis, -f.stride))
    stored = params[leaf]
    if math.prod(f.size for f in factors) != stored.size:
        raise ValueError(f"the weight {leaf!r} is a stack of layers or is sliced: unroll the loop over layers first")
    return stored.reshape([f.size for f in digits]).transpose([digits.index(f) for f in factors]).reshape(shape)


def _attributes(name: str, scale: Any, zero_point: Any) -> dict[str, Any]:
    """The attributes of a composite; a scale of None is that of a dynamic range, and `name` that of a weight."""
    scale = np.zeros(0, np.float32) if scale is None else np.asarray(scale, np.float32)
    if not np.all(np.isfinite(scale)):
        raise ValueError(f"the scale of {name!r} is not finite: check the parameters")
    along = [axis for axis, size in enumerate(scale.shape) if size > 1]
    if len(along) > 1:
        raise ValueError(
            f"the weight {name!r} has scales along the axes {along}, but a tensor of LiteRT along one: use "
            "disable_per_channel_weights=True"
        )
    found: dict[str, Any] = {"scale": scale.reshape(-1), "dtype": "i8", "narrow_range": bool(name)}
    if zero_point is not None:
        found["zero_point"] = np.asarray(zero_point, np.int64).reshape(-1)
    return found | ({"quantization_dimension": along[0]} if along else {})
