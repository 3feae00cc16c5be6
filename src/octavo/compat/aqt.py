"""AQT's constructors, with AQT's names and arguments; each returns a DotConfig.

AQT (https://github.com/google/aqt) keeps one mutable object per operand and changes it with setters; here a setter
returns a changed copy, as `DotConfig.replace` and `DotConfig.with_operands` do. Operands compute in AQT's arithmetic,
which for float32 inputs gives AQT's bits. Pass `arithmetic="float32"` with bfloat16 and float16 inputs, whose scales
and quotients AQT rounds to those dtypes.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from octavo._typing import DTypeLike
from octavo.compat.aqt_operands import SKIP, Bits, LocalAqt, int_symmetric, make
from octavo.compat.aqt_setters import (
    CalibrationMode,
    DequantMode,
    MeanOfAbsMaxCalibration,
    set_absmax_calib_scale,
    set_accumulator_dtype,
    set_auto_calib_scale,
    set_bits,
    set_constant_calibration,
    set_fwd_calibration,
    set_fwd_calibration_mode,
    set_fwd_dequant_mode,
    set_fwd_rhs_dtype_int2,
    set_int_numerics_preserve_zero,
    set_local_aqt,
    set_numerics,
    set_scale_and_bias_dtype,
    set_use_fwd_quant,
)
from octavo.numerics import Stochastic
from octavo.ops.config import DotConfig, Matmul, Operand
from octavo.qarray import QArray

__all__ = [
    "SKIP",
    "Bits",
    "CalibrationMode",
    "DequantMode",
    "DotGeneral",
    "DotGeneralRaw",
    "LocalAqt",
    "MeanOfAbsMaxCalibration",
    "Tensor",
    "config_fwd_fp8",
    "config_v3",
    "config_v4",
    "conv_general_dilated_make",
    "default_unquantized_config",
    "dot_general_make",
    "from_qtensor",
    "fully_quantized",
    "int_symmetric",
    "set_absmax_calib_scale",
    "set_accumulator_dtype",
    "set_auto_calib_scale",
    "set_bits",
    "set_constant_calibration",
    "set_fwd_calibration",
    "set_fwd_calibration_mode",
    "set_fwd_dequant_mode",
    "set_fwd_rhs_dtype_int2",
    "set_int_numerics_preserve_zero",
    "set_local_aqt",
    "set_numerics",
    "set_scale_and_bias_dtype",
    "set_stochastic_rounding",
    "set_use_fwd_quant",
    "set_use_mid_quant",
    "to_qtensor",
]

DotGeneral, DotGeneralRaw, Tensor = DotConfig, Matmul, Operand
"""AQT's names of a config, of one of its matmuls and of an operand, for annotations."""
_NOISE_BITS = {"jax.uniform": 24, "custom-1": 16}


def config_v3(
    fwd_bits: Bits = 8,
    dlhs_bits: Bits = 8,
    drhs_bits: Bits = None,
    *,
    use_dummy_static_bound: bool = False,
    rng_type: str = "jax.uniform",
    dlhs_local_aqt: LocalAqt | None = None,
    drhs_local_aqt: LocalAqt | None = None,
    fwd_accumulator_dtype: DTypeLike | None = jnp.int32,
    dlhs_accumulator_dtype: DTypeLike | None = jnp.int32,
    drhs_accumulator_dtype: DTypeLike | None = None,
    arithmetic: str = "aqt",
) -> DotConfig:
    """AQT's config_v3: integers, the cotangent rounded stochastically, residuals from the float operands.

    Without bits for the forward or for dlhs, its accumulator has to be given as None: floats do not sum in int32.

    >>> config_v3(fwd_bits=4).fwd.lhs.qtype.name
    'int4'
    """
    if fp8 := [b for b in (fwd_bits, dlhs_bits, drhs_bits) if isinstance(b, str)]:
        raise ValueError(f"config_v3 has integers only, got {fp8[0]!r}: use config_v4")
    return config_v4(
        fwd_bits,
        dlhs_bits,
        drhs_bits,
        use_dummy_static_bound=use_dummy_static_bound,
        rng_type=rng_type,
        dlhs_local_aqt=dlhs_local_aqt,
        drhs_local_aqt=drhs_local_aqt,
        fwd_accumulator_dtype=fwd_accumulator_dtype,
        dlhs_accumulator_dtype=dlhs_accumulator_dtype,
        drhs_accumulator_dtype=drhs_accumulator_dtype,
        arithmetic=arithmetic,
    )


def config_v4(
    fwd_bits: Bits = 8,
    dlhs_bits: Bits = 8,
    drhs_bits: Bits = None,
    *,
    use_dummy_static_bound: bool = False,
    rng_type: str = "jax.uniform",
    dlhs_local_aqt: LocalAqt | None = None,
    drhs_local_aqt: LocalAqt | None = None,
    fwd_accumulator_dtype: DTypeLike | None = SKIP,
    dlhs_accumulator_dtype: DTypeLike | None = SKIP,
    drhs_accumulator_dtype: DTypeLike | None = SKIP,
    dlhs_use_fwd_quant: bool | str | None = SKIP,
    drhs_use_fwd_quant: bool | str | None = SKIP,
    fwd_mid_alpha_both: float | str = SKIP,
    dlhs_mid_alpha_both: float | str = SKIP,
    drhs_mid_alpha_both: float | str = SKIP,
    arithmetic: str = "aqt",
) -> DotConfig:
    """AQT's config_v4: the cotangent rounded stochastically, residuals from the float operands.

    Calls that take a gradient need a `key`, unless both gradients are in float.

    >>> config = config_v4(fwd_bits=8, dlhs_bits="e5m2", drhs_bits=None)
    >>> config.fwd.lhs.qtype.name, config.dlhs.lhs.qtype.name, config.drhs.lhs
    ('int8', 'float8_e5m2', None)
    """
    if fwd_bits is None and True in (dlhs_use_fwd_quant, drhs_use_fwd_quant):
        raise ValueError("use_fwd_quant takes the forward's low-bit values, but the forward is in float: give fwd_bits")
    config = make(
        fwd=(fwd_bits, fwd_bits),
        bwd=(dlhs_bits, drhs_bits),
        reuse=(dlhs_use_fwd_quant is True, drhs_use_fwd_quant is True),
        local=(dlhs_local_aqt, drhs_local_aqt),
        accumulators=(fwd_accumulator_dtype, dlhs_accumulator_dtype, drhs_accumulator_dtype),
        calibration="constant,1" if use_dummy_static_bound else "absmax",
        arithmetic=arithmetic,
    )
    config = set_stochastic_rounding(config, True, False, rng_type)
    return set_use_mid_quant(config, fwd_mid_alpha_both, dlhs_mid_alpha_both, drhs_mid_alpha_both)


def set_use_mid_quant(
    config: DotConfig,
    fwd_mid_alpha_both: float | str = SKIP,
    dlhs_mid_alpha_both: float | str = SKIP,
    drhs_mid_alpha_both: float | str = SKIP,
) -> DotConfig:
    """A copy of a config in which both operands of a matmul are scaled before they are quantized.

    Each contracted index k of the left operand is divided by max|lhs_k|**alpha / max|rhs_k|**alpha, and of the right
    one multiplied by it, which cancels out in the matmul. SmoothQuant's other exponent is 1 - alpha: `Matmul.smooth`
    takes one number for it.

    >>> set_use_mid_quant(config_v4(), 1.0, 1.0).dlhs.smooth
    (1.0, 1.0)
    """
    alphas = {"fwd": fwd_mid_alpha_both, "dlhs": dlhs_mid_alpha_both, "drhs": drhs_mid_alpha_both}
    wanted = {name: alpha for name, alpha in alphas.items() if alpha not in (SKIP, None)}
    return config.replace(**{name: getattr(config, name).replace(smooth=(a, a)) for name, a in wanted.items()})


def fully_quantized(
    fwd_bits: Bits = 8,
    bwd_bits: Bits = 8,
    *,
    use_fwd_quant: bool = True,
    use_stochastic_rounding: bool | None = True,
    vjp_lhs_stochastic_rounding: bool | None = None,
    vjp_rhs_stochastic_rounding: bool | None = None,
    use_dummy_static_bound: bool = False,
    dlhs_local_aqt: LocalAqt | None = None,
    drhs_local_aqt: LocalAqt | None = None,
    arithmetic: str = "aqt",
) -> DotConfig:
    """AQT's fully_quantized: all three matmuls, residuals from the forward's low-bit values.

    Both operands of the gradients are rounded stochastically unless `use_stochastic_rounding` is False. To set
    the two sides separately, pass None for it and both `vjp_lhs_stochastic_rounding` and `vjp_rhs_stochastic_rounding`.

    >>> fully_quantized(fwd_bits=8, bwd_bits=4).dlhs.residual
    'requantize'
    """
    sides = (vjp_lhs_stochastic_rounding, vjp_rhs_stochastic_rounding)
    if (use_stochastic_rounding is None) != all(side is not None for side in sides) or sides.count(None) == 1:
        raise ValueError(
            "say use_stochastic_rounding for both sides of the gradients, or pass None for it and both "
            "vjp_lhs_stochastic_rounding and vjp_rhs_stochastic_rounding"
        )
    if use_stochastic_rounding is not None:
        sides = (use_stochastic_rounding, use_stochastic_rounding)
    config = make(
        fwd=(fwd_bits, fwd_bits),
        bwd=(bwd_bits, bwd_bits),
        reuse=(use_fwd_quant, use_fwd_quant),
        local=(dlhs_local_aqt, drhs_local_aqt),
        calibration="constant,1" if use_dummy_static_bound else "absmax",
        arithmetic=arithmetic,
    )
    return set_stochastic_rounding(config, bool(sides[0]), bool(sides[1]))


def config_fwd_fp8(fwd_bits: str = "e4m3", *, arithmetic: str = "aqt") -> DotConfig:
    """AQT's config_fwd_fp8: a float8 forward, gradients in float.

    >>> config_fwd_fp8().fwd.lhs.qtype.name
    'float8_e4m3fn'
    """
    if fwd_bits not in ("e4m3", "e5m2"):
        raise ValueError(f"config_fwd_fp8 takes 'e4m3' or 'e5m2', got {fwd_bits!r}")
    return make(fwd=(fwd_bits, fwd_bits), arithmetic=arithmetic)


def dot_general_make(
    lhs_bits: Bits = None,
    rhs_bits: Bits = None,
    bwd_bits: Bits = None,
    *,
    use_fwd_quant: bool = True,
    dlhs_local_aqt: LocalAqt | None = None,
    drhs_local_aqt: LocalAqt | None = None,
    arithmetic: str = "aqt",
) -> DotConfig:
    """AQT's dot_general_make: bits for each side of the forward and for the gradients, all rounded to nearest.

    >>> dot_general_make(None, 4).fwd.rhs.qtype.name
    'int4'
    """
    return make(
        fwd=(lhs_bits, rhs_bits),
        bwd=(bwd_bits, bwd_bits),
        reuse=(use_fwd_quant, use_fwd_quant),
        local=(dlhs_local_aqt, drhs_local_aqt),
        arithmetic=arithmetic,
    )


def conv_general_dilated_make(
    spatial_dimensions: int, lhs_bits: Bits = None, rhs_bits: Bits = None, *, arithmetic: str = "aqt"
) -> DotConfig:
    """AQT's conv_general_dilated_make, for `octavo.conv_general_dilated`: a quantized forward, gradients in float.

    The count of spatial dimensions is not needed here: the axes are known at the call, in any layout.

    >>> conv_general_dilated_make(2, 8, 4).fwd.rhs.qtype.name
    'int4'
    """
    if spatial_dimensions < 1:
        raise ValueError(f"a convolution has at least one spatial dimension, got {spatial_dimensions}")
    return make(fwd=(lhs_bits, rhs_bits), arithmetic=arithmetic)


def default_unquantized_config() -> DotConfig:
    """AQT's default_unquantized_config: all three matmuls in float.

    >>> default_unquantized_config()
    DotConfig(clip_gradient=False)
    """
    return make()


def set_stochastic_rounding(
    config: DotConfig,
    vjp_lhs_stochastic_rounding: bool,
    vjp_rhs_stochastic_rounding: bool,
    implementation: str = "jax.uniform",
    noise_sharing_axes: Sequence[int] = (),
) -> DotConfig:
    """A copy of a config with the given rounding of the lhs (the cotangent) and rhs (the residual) of its gradients.

    An operand that rounds stochastically computes in float32: AQT's arithmetic maps the largest values beyond the last
    code, which makes their mean too small. One that rounds to nearest takes the arithmetic of the forward's operands.
    "jax.uniform" is 24 bits of noise, "custom-1" is 16.

    >>> set_stochastic_rounding(config_v4(), False, False).dlhs.lhs.rounding
    Nearest()
    """
    if implementation not in _NOISE_BITS:
        raise ValueError(f"the noise is one of {tuple(_NOISE_BITS)}, got {implementation!r}")
    noise = Stochastic(bits=_NOISE_BITS[implementation], shared_axes=tuple(noise_sharing_axes))
    forward = [o.arithmetic for o in (config.fwd.lhs, config.fwd.rhs) if o is not None]
    changes: dict[str, Any] = {}
    for name in ("dlhs", "drhs"):
        for side, wanted in (("lhs", vjp_lhs_stochastic_rounding), ("rhs", vjp_rhs_stochastic_rounding)):
            operand = getattr(getattr(config, name), side)
            if operand is None:
                continue
            plain = {"rounding": "nearest", "arithmetic": forward[0] if forward else operand.arithmetic}
            changes[f"{name}_{side}"] = {"rounding": noise, "arithmetic": "float32"} if wanted else plain
    return config.with_operands(**changes)


def from_qtensor(tensor: Any) -> QArray:
    """An AQT `QTensor` as a QArray: codes, and the product of its scales."""
    if tensor.bias or tensor.tiling_state is not None or tensor.sparsity_mask is not None:
        raise ValueError("a QTensor with a bias, tiles or a sparsity mask has no QArray: dequantize it")
    return QArray(tensor.qvalue, math.prod(tensor.scale[1:], start=tensor.scale[0]), dtype=tensor.dtype)


def to_qtensor(array: QArray) -> Any:
    """A QArray as an AQT `QTensor`; AQT has one scale per channel and no zero points."""
    from aqt.jax.v2 import aqt_tensor  # pyrefly: ignore

    cls: Any = aqt_tensor.QTensor
    tiled = any(n not in (1, size) for n, size in zip(array.scale.shape, array.shape, strict=True))
    if array.zero_point is not None or array.outer_scale is not None or tiled:
        raise ValueError("a QTensor has neither zero points nor tiles: quantize by channels")
    plain = array.unpack()
    return cls(qvalue=plain.qvalue, scale=[plain.scale], scale_t=None, bias=[], dequant_dtype=plain.dtype)
