"""Fake quantization of matmuls and convolutions as LiteRT computes them, and its composites in StableHLO.

Weights have one scale for each output channel, or one in all. Activations are quantized dynamically or not at all.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._tree import flatten_paths
from octavo._typing import Array
from octavo.qarray import Quantizer, fake_quant
from octavo.rules import QuantizationRule
from octavo.transform import QuantizationProvider, Site
from octavo.transform.site import operand_axes

_STATIC = (
    "static ranges of LiteRT belong to the tensors between all operations of a model, which are not followed here: set "
    "act_static_scale=False for dynamic ranges, leave act_qtype out for weights only, or train with "
    "octavo.QtProvider, whose static ranges are those of matmuls"
)


class OdmlQatProvider(QuantizationProvider):
    """Quantization-aware training for LiteRT: matmuls and convolutions in float, of operands that are fake-quantized.

    Args:
        rules: The rules. With `act_qtype`, `act_static_scale` is False and ranges are "minmax" unless they say else.
        disable_per_channel_weights: Whether a weight has one scale.
        fixed_range_for_inputs: Of static ranges, which are not offered: None.
        fixed_range_for_outputs: As well.
        strict: Accepted for Qwix; weights are known by their paths.

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
        if fixed_range_for_inputs is not None or fixed_range_for_outputs is not None:
            raise NotImplementedError(f"fixed_range_for_inputs and fixed_range_for_outputs: {_STATIC}")
        super().__init__(rules)
        self.per_tensor = disable_per_channel_weights

    def _init_rule(self, rule: QuantizationRule) -> QuantizationRule:
        if rule.act_qtype is None:
            return rule
        if rule.act_static_scale is not False:
            raise NotImplementedError(f"{rule}: {_STATIC}")
        method = rule.act_calibration_method or "minmax"
        return rule.replace(act_calibration_method=method)

    def dot_general(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any) -> Array:
        lhs, rhs = self._operands(lhs, rhs, {"dimension_numbers": dimension_numbers})
        return jax.lax.dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)

    def einsum(self, subscripts: str, lhs: Any, rhs: Any, **kwargs: Any) -> Array:
        return OdmlQatProvider.dot_general(self, lhs, rhs, self.operation.site.params["dimension_numbers"], **kwargs)

    def conv_general_dilated(self, lhs: Any, rhs: Any, window_strides: Any, padding: Any, **geometry: Any) -> Array:
        lhs, rhs = self._operands(lhs, rhs, self.operation.site.params)
        return jax.lax.conv_general_dilated(lhs, rhs, window_strides, padding, **geometry)

    def ragged_dot(self, lhs: Any, rhs: Any, group_sizes: Any, **kwargs: Any) -> Array:
        raise NotImplementedError(
            f"{self.operation.site.path!r}: LiteRT has no grouped matmul: exempt it by an earlier rule with skip=True"
        )

    def gmm(self, lhs: Any, rhs: Any, group_sizes: Any, **kwargs: Any) -> Array:
        return OdmlQatProvider.ragged_dot(self, lhs, rhs, group_sizes, **kwargs)

    def _operands(self, lhs: Any, rhs: Any, params: Mapping[str, Any]) -> tuple[Any, Any]:
        """Both operands, fake-quantized as the rule of the operation says."""
        site = self.operation.site
        rule = site.rule
        assert rule is not None
        if not any(site.weights):  # two activations
            return lhs, rhs
        operands, axes = [lhs, rhs], operand_axes(params, lhs.shape, rhs.shape)
        for side in range(2):
            weight = site.weights[side]
            qtype = rule.weight_qtype if weight else rule.act_qtype
            if qtype is None:
                continue
            channels = [a for a in range(operands[side].ndim) if a not in axes[side]["contracting"]]
            method = rule.weight_calibration_method if weight else rule.act_calibration_method or "minmax"
            quantizer = Quantizer(qtype, () if weight and self.per_tensor else channels, calibration=method)
            operands[side] = self._fake_quant(operands[side], quantizer, side if weight else None)
        return operands[0], operands[1]

    def _fake_quant(self, x: Array, quantizer: Quantizer, weight: int | None) -> Array:
        """An operand, fake-quantized; `weight` is its side if it is a weight."""
        del weight
        return fake_quant(x, quantizer)


class OdmlConversionProvider(OdmlQatProvider):
    """Conversion to LiteRT: each fake quantization is a StableHLO composite `quant.fake_quant` with constant scales.

    Args:
        rules: The rules of training, or others.
        params: The parameters, whose scales become constants of the program.
        quant_stats: Of static ranges, which are not offered: empty.
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
        if jax.tree.leaves(quant_stats):
            raise NotImplementedError(f"quant_stats: {_STATIC}")
        self.params = {name: np.asarray(x) for name, x in flatten_paths(params).items()}

    def dot_general(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any) -> Array:
        contract, batch = dimension_numbers
        if not self.operation.site.weights[1] or rhs.ndim <= 2 or tuple(contract[1]) != (0,) or any(map(len, batch)):
            return super().dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)
        # A tensor of LiteRT has scales along one axis.
        flat = rhs.reshape(rhs.shape[0], -1)
        out = super().dot_general(lhs, flat, dimension_numbers, *args, **kwargs)
        return out.reshape(*out.shape[:-1], *rhs.shape[1:])

    def _fake_quant(self, x: Array, quantizer: Quantizer, weight: int | None) -> Array:
        if quantizer.qtype.name != "int8":
            raise ValueError(f"the fake quantization of LiteRT is int8, got {quantizer.qtype.name}")
        bounds: dict[str, Any] = {}
        if weight is not None:
            with jax.ensure_compile_time_eval():
                value = jnp.asarray(_stored(self.operation.site, weight, self.params, x.shape))
                bounds = quantizer.scale_of(quantizer.measure(value), x.dtype)
        name = "" if weight is None else str(self.operation.site.leaf)
        attributes = _attributes(name, bounds.get("scale"), bounds.get("zero_point"))

        def decomposition(x: Array, **attributes: Any) -> Array:
            return quantizer.quantize(x, bounds=bounds or None, check_finite=False).dequantize()

        return jax.lax.composite(decomposition, name="quant.fake_quant")(x, **attributes)


def _stored(site: Site, side: int, params: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """A weight by its path, rearranged as the operand is."""
    origin, leaf = site.origins[side], site.leaf or ""
    if leaf not in params or not origin.is_stored or origin.axes is None:
        reason = "is not among params" if leaf not in params else "is computed from before its matmul"
        raise ValueError(
            f"the weight {leaf!r} of {site.op_id} at {site.path!r} {reason}, so its scales are not constant"
        )
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
