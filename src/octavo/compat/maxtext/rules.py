"""MaxText's use of Qwix, by its names: rules and providers of a config, and layers' operations."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from octavo.compat.quantization import AqtDotGeneral, AqtEinsum, Quantization
from octavo.frameworks import quantize_model
from octavo.ops import DotConfig
from octavo.rules import QtRule, dot_config, recipe
from octavo.transform import QtProvider

LAYERS = "decoder/.*layers.*"
"""The module path of MaxText's rules."""

_FORMATS = {
    "int4": "int4",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_gpu": "float8_e4m3fn",
    "fp8_nanoo": "float8_e4m3fn",
}


class NvidaFp8Provider(QtProvider):
    """Matmuls by Flax's `Fp8DirectDotGeneralOp` and einsums by its `Fp8Einsum`, with amax histories."""

    def dot_general(self, *args: Any, **kwargs: Any) -> Any:
        rule, name = self._get_current_rule_and_op_id("dot_general")
        return (
            jax.lax.dot_general(*args, **kwargs)
            if rule is None
            else nn.Fp8DirectDotGeneralOp(name=name)(*args, **kwargs)
        )

    def einsum(self, *args: Any, **kwargs: Any) -> Any:
        rule, name = self._get_current_rule_and_op_id("einsum")
        return jnp.einsum(*args, **kwargs) if rule is None else nn.Fp8Einsum(name=name)(*args, **kwargs)


class NANOOFp8Provider(QtProvider):
    """Matmuls by Flax's `NANOOFp8DotGeneralOp`, for AMD's MI300."""

    def dot_general(self, *args: Any, **kwargs: Any) -> Any:
        rule, name = self._get_current_rule_and_op_id("dot_general")
        return (
            jax.lax.dot_general(*args, **kwargs)
            if rule is None
            else nn.NANOOFp8DotGeneralOp(name=name)(*args, **kwargs)
        )


_PROVIDERS = {"fp8_gpu": NvidaFp8Provider, "fp8_nanoo": NANOOFp8Provider}


def get_quantization_rule(config: Any) -> list[QtRule] | None:
    """The rules of a config's `quantization`, for layers of MaxText's names; None for "".

    >>> import types
    >>> rule, = get_quantization_rule(types.SimpleNamespace(quantization="int8", quantization_local_shard_count=4))
    >>> rule.module_path, rule.bwd_qtype, rule.bwd_weight_grad_tile_size
    ('decoder/.*layers.*', 'int8', 0.25)
    """
    name = config.quantization
    if not name:
        return None
    if name == "fp8_full":
        return get_fp8_full_qwix_rule_w_sparsity(config)
    if name not in _FORMATS:
        raise ValueError(
            f"quantization={name!r} has no rule in MaxText: {', '.join((*_FORMATS, 'fp8_full'))} have; for the others, "
            f"octavo.recipe({name!r})"
        )
    fmt, shards = _FORMATS[name], config.quantization_local_shard_count
    shards = jax.local_device_count() if shards < 0 else shards
    if not shards:
        raise ValueError("quantization_local_shard_count=0 leaves the weight gradient in float under AQT only")
    return [
        QtRule(
            module_path=LAYERS,
            weight_qtype=fmt,
            act_qtype=fmt,
            bwd_qtype=fmt,
            bwd_weight_grad_tile_size=1 / shards,
            op_names=("dot_general",),
        )
    ]


def get_fp8_full_qwix_rule_w_sparsity(config: Any) -> list[QtRule]:
    """The rule of `fp8_full`: the three calibration methods, and n:m sparsity of weights if it is configured."""
    n, m = getattr(config, "weight_sparsity_n", None), getattr(config, "weight_sparsity_m", None)
    return [
        QtRule(
            module_path=LAYERS,
            weight_qtype="float8_e4m3fn",
            act_qtype="float8_e4m3fn",
            bwd_qtype="float8_e5m2",
            weight_calibration_method=config.weight_quantization_calibration_method,
            act_calibration_method=config.act_quantization_calibration_method,
            bwd_calibration_method=config.bwd_quantization_calibration_method,
            sparsity=(n, m) if n and m else None,
            op_names=("dot_general", "gmm", "ragged_dot"),
        )
    ]


def get_qt_provider(config: Any) -> QtProvider | None:
    """The provider of a config's `quantization`; None for "".

    >>> import types
    >>> config = types.SimpleNamespace(quantization="fp8_gpu", quantization_local_shard_count=1)
    >>> type(get_qt_provider(config)).__name__
    'NvidaFp8Provider'
    """
    rules = get_quantization_rule(config)
    return None if rules is None else _PROVIDERS.get(config.quantization, QtProvider)(rules)


def maybe_quantize_model(model: Any, config: Any) -> Any:
    """The model, quantized if `use_qwix_quantization` and `quantization` say so."""
    if not config.use_qwix_quantization or getattr(config, "use_batch_split_schedule", False):
        return model
    provider = get_qt_provider(config)
    return model if provider is None else quantize_model(model, provider)


@dataclasses.dataclass(frozen=True)
class QwixQuantization(Quantization):
    """The operations of `fp8_full`: e4m3 forward, e5m2 gradients; for training.

    >>> QwixQuantization(weight_calibration_method="fixed,-224,224").config.fwd.rhs.calibration.high
    224.0
    """

    act_calibration_method: str = "absmax"
    weight_calibration_method: str = "absmax"
    bwd_calibration_method: str = "absmax"
    # The methods come first, as in MaxText.
    config: Any = dataclasses.field(default=None, kw_only=True)
    quant_mode: str = dataclasses.field(default="train", kw_only=True)
    replicate_scale: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        if self.config is None:
            sides = {f"{side}_calibration_method": getattr(self, f"{side}_calibration_method") for side in _SIDES}
            rule = recipe("fp8_full", exclude=None, **sides)[-1]
            object.__setattr__(self, "config", dot_config(rule, lhs_weight=False, rhs_weight=True))


_SIDES = ("act", "weight", "bwd")


class QwixDotGeneral(AqtDotGeneral):
    """A `dot_general` with a `DotConfig`, by MaxText's name."""


class QwixEinsum(AqtEinsum):
    """An einsum with a `DotConfig`, by MaxText's name."""


@dataclasses.dataclass(frozen=True)
class ConstantBoundConfig:
    """The constant bounds of the six operands; None for a dynamic range.

    >>> ConstantBoundConfig(fwd_lhs_bound=2.0).apply(DotConfig.qat("int8")).fwd.lhs.calibration.bound
    2.0
    """

    fwd_lhs_bound: float | None = None
    fwd_rhs_bound: float | None = None
    dlhs_lhs_bound: float | None = None
    dlhs_rhs_bound: float | None = None
    drhs_lhs_bound: float | None = None
    drhs_rhs_bound: float | None = None

    def apply(self, config: DotConfig) -> DotConfig:
        """A config with these bounds."""
        bounds = {name.removesuffix("_bound"): value for name, value in vars(self).items() if value is not None}
        return config.with_operands(**{name: {"calibration": f"constant,{bound}"} for name, bound in bounds.items()})


@dataclasses.dataclass(frozen=True)
class PerTensorScales:
    """Which of the six operands have one scale for the tensor.

    >>> PerTensorScales(fwd_rhs=True).apply(DotConfig.qat("int8")).fwd.rhs.per_tensor
    True
    """

    fwd_lhs: bool = False
    fwd_rhs: bool = False
    dlhs_lhs: bool = False
    dlhs_rhs: bool = False
    drhs_lhs: bool = False
    drhs_rhs: bool = False

    def apply(self, config: DotConfig) -> DotConfig:
        """A config with these scales."""
        return config.with_operands(**{name: {"per_tensor": True} for name, wanted in vars(self).items() if wanted})
