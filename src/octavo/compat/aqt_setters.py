"""AQT's setters, with its names and arguments; each returns a changed copy of the config, where AQT changes it."""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from octavo._typing import DTypeLike
from octavo.calibration import RunningMean
from octavo.compat.aqt_operands import SKIP, Bits, LocalAqt, int_symmetric, operand_accumulator, operand_format
from octavo.numerics import FormatLike, IntFormat
from octavo.ops.config import DotConfig, Matmul, Operand

_SIX = ("fwd", "dlhs", "drhs")


class DequantMode(enum.Enum):
    """Where a scale is applied: to the output, to this operand before the matmul, or to the other operand."""

    OUTPUT = "output"
    THIS_INPUT = "input"
    OTHER_INPUT = "other"


class CalibrationMode(enum.Enum):
    """Which axes share a scale: the contracted ones, or the others."""

    CONTRACTING_AXIS = "remaining"
    REMAINING_AXIS = "contracted"


class MeanOfAbsMaxCalibration:
    """AQT's static range, for `set_fwd_calibration`: the mean of the largest magnitudes of all calibration batches.

    Without `functools.partial` or with it: the collection is that of the module that collects the ranges.
    """


def _all(config: DotConfig, **fields: Any) -> DotConfig:
    return config.with_operands(**dict.fromkeys(_SIX, fields))


def set_fwd_dequant_mode(
    config: DotConfig,
    *,
    lhs_dequant_mode: DequantMode | None = None,
    rhs_dequant_mode: DequantMode | None = None,
) -> DotConfig:
    """A copy in which the scales of the forward are applied elsewhere.

    With OTHER_INPUT, scales run along the contracted axes, as `CalibrationMode.REMAINING_AXIS` says.

    >>> from octavo.compat import aqt
    >>> set_fwd_dequant_mode(aqt.config_v4(), rhs_dequant_mode=DequantMode.THIS_INPUT).fwd.rhs.dequant
    'input'
    """
    modes = {"fwd_lhs": lhs_dequant_mode, "fwd_rhs": rhs_dequant_mode}
    changes: dict[str, Any] = {name: {"dequant": mode.value} for name, mode in modes.items() if mode is not None}
    for change in changes.values():
        if change["dequant"] != "input":
            change["channelwise_axes"] = None
    return config.with_operands(**changes)


def set_fwd_calibration_mode(
    config: DotConfig,
    *,
    lhs_calibration_mode: CalibrationMode | str = SKIP,
    rhs_calibration_mode: CalibrationMode | str = SKIP,
) -> DotConfig:
    """A copy in which scales of the forward run along other axes; the dequantization mode is set before it.

    >>> from octavo.compat import aqt
    >>> fake = set_fwd_dequant_mode(aqt.config_v4(), rhs_dequant_mode=DequantMode.THIS_INPUT)
    >>> along = set_fwd_calibration_mode(fake, rhs_calibration_mode=CalibrationMode.REMAINING_AXIS)
    >>> along.fwd.rhs.channelwise_axes
    'contracted'
    """
    changes: dict[str, Any] = {}
    for side, mode in (("lhs", lhs_calibration_mode), ("rhs", rhs_calibration_mode)):
        operand = getattr(config.fwd, side)
        if not isinstance(mode, CalibrationMode) or operand is None:
            continue
        remaining = mode is CalibrationMode.REMAINING_AXIS
        if operand.dequant == ("output" if remaining else "other"):
            raise ValueError(
                f"{mode} does not go with the dequantization {operand.dequant!r} of fwd.{side}: call "
                "set_fwd_dequant_mode first, with THIS_INPUT or "
                f"{'OTHER_INPUT' if remaining else 'OUTPUT'}"
            )
        if operand.dequant == "input":
            changes[f"fwd_{side}"] = {"channelwise_axes": "contracted" if remaining else None}
    return config.with_operands(**changes)


def set_numerics(matmul: Matmul, lhs_numerics: FormatLike | None, rhs_numerics: FormatLike | None) -> Matmul:
    """A copy of one matmul of a config, with other formats; None for float.

    >>> from octavo.compat import aqt
    >>> config = aqt.config_v4()
    >>> config.replace(fwd=set_numerics(config.fwd, aqt.int_symmetric(4), "fp8")).fwd.rhs.qtype.name
    'float8_e4m3fn'
    """

    def changed(operand: Operand | None, qtype: FormatLike | None) -> Operand | None:
        if qtype is None:
            return None
        return Operand(qtype, arithmetic="aqt") if operand is None else operand.replace(qtype=qtype)

    return matmul.replace(lhs=changed(matmul.lhs, lhs_numerics), rhs=changed(matmul.rhs, rhs_numerics))


def set_fwd_rhs_dtype_int2(config: DotConfig) -> DotConfig:
    """A copy whose weights of two bits are stored as int2.

    >>> from octavo.compat import aqt
    >>> set_fwd_rhs_dtype_int2(aqt.config_v4(fwd_bits=2, dlhs_bits=None)).fwd.rhs.qtype.name
    'int2'
    """
    operand = config.fwd.rhs
    if operand is None or not isinstance(operand.qtype, IntFormat) or operand.qtype.bits != 2:
        raise ValueError(f"the weights of the forward have not two bits but {operand}: use fwd_bits=2")
    return config.with_operands(fwd_rhs={"qtype": "int2"})


def set_accumulator_dtype(
    config: DotConfig,
    fwd_dtype: DTypeLike | None,
    dlhs_dtype: DTypeLike | None,
    drhs_dtype: DTypeLike | None,
) -> DotConfig:
    """A copy whose sums have other dtypes; integers always accumulate in int32.

    >>> from octavo.compat import aqt
    >>> set_accumulator_dtype(aqt.config_v4(), "bfloat16", aqt.SKIP, None).fwd.accumulator
    'bfloat16'
    """
    changes = {}
    for name, dtype in zip(_SIX, (fwd_dtype, dlhs_dtype, drhs_dtype), strict=True):
        if not (isinstance(dtype, str) and dtype == SKIP):
            matmul = getattr(config, name)
            changes[name] = matmul.replace(accumulator=operand_accumulator(dtype, matmul.lhs, matmul.rhs))
    return config.replace(**changes)


def set_constant_calibration(config: DotConfig, bound: float = 1.0, bias: float | None = None) -> DotConfig:
    """A copy whose ranges are given; with a bias, about that value.

    >>> from octavo.compat import aqt
    >>> set_constant_calibration(aqt.config_v4(), 2.0).fwd.lhs.calibration
    Constant(bound=2.0)
    """
    if bias is None:
        return _all(config, calibration=f"constant,{bound}")
    return _all(config, calibration=f"constant,{bound},{bias}", arithmetic="float32")


def set_local_aqt(
    config: DotConfig,
    fwd_local_aqt: LocalAqt | str | None,
    dlhs_local_aqt: LocalAqt | str | None,
    drhs_local_aqt: LocalAqt | str | None,
) -> DotConfig:
    """A copy with scales for each shard of the first contracted axis; None for one scale.

    >>> from octavo.compat import aqt
    >>> set_local_aqt(aqt.config_v4(drhs_bits=8), aqt.SKIP, None, aqt.LocalAqt(4)).drhs.lhs.tile
    0.25
    """
    changes: dict[str, Any] = {}
    for name, local in zip(_SIX, (fwd_local_aqt, dlhs_local_aqt, drhs_local_aqt), strict=True):
        if local is None:
            changes[name] = {"tile": None, "tile_axis": -1}
        elif isinstance(local, LocalAqt):
            changes[name] = {"tile": 1 / local.contraction_axis_shard_count, "tile_axis": 0}
    return config.with_operands(**changes)


def set_use_fwd_quant(
    config: DotConfig, dlhs_use_fwd_quant: bool | str | None, drhs_use_fwd_quant: bool | str | None
) -> DotConfig:
    """A copy whose gradients take the low-bit values of the forward, or the float ones.

    >>> from octavo.compat import aqt
    >>> set_use_fwd_quant(aqt.config_v4(), True, aqt.SKIP).dlhs.residual
    'requantize'
    """
    changes = {}
    for name, use in (("dlhs", dlhs_use_fwd_quant), ("drhs", drhs_use_fwd_quant)):
        matmul = getattr(config, name)
        if use != SKIP:
            low = "reuse" if matmul.rhs is None else "requantize"
            changes[name] = matmul.replace(residual=low if use else "original")
    return config.replace(**changes)


def set_int_numerics_preserve_zero(config: DotConfig, preserve_zero: bool) -> DotConfig:
    """A copy whose integers have a zero, or are half-integers.

    >>> from octavo.compat import aqt
    >>> set_int_numerics_preserve_zero(aqt.config_v4(), False).fwd.lhs.qtype.has_zero
    False
    """

    def change(operand: Operand) -> Operand:
        fmt = operand.qtype
        integer = isinstance(fmt, IntFormat)
        return operand.replace(qtype=int_symmetric(fmt.bits, preserve_zero, fmt.preserve_max)) if integer else operand

    return _each(config, change)


def set_auto_calib_scale(config: DotConfig, auto_clip_search_config: Sequence[float]) -> DotConfig:
    """A copy whose right operands are clipped by that factor, of these and 1, which has the best SNR.

    >>> from octavo.compat import aqt
    >>> set_auto_calib_scale(aqt.config_v4(), [0.5, 0.9]).fwd.lhs.calibration
    AbsMax()
    """
    method = ",".join(["snr", *(str(factor) for factor in auto_clip_search_config if factor != 1)])
    return _each(config, lambda operand: operand.replace(calibration=method), sides=("rhs",))


def set_absmax_calib_scale(config: DotConfig, scale: float) -> DotConfig:
    """A copy whose ranges are this share of the largest magnitudes; below 1, gradients are clipped too.

    >>> from octavo.compat import aqt
    >>> set_absmax_calib_scale(aqt.config_v4(), 0.9).clip_gradient
    True
    """
    changed = _all(config, calibration=f"absmax,{scale}")
    return changed.replace(clip_gradient=True) if scale < 1 else changed


def set_bits(
    config: DotConfig,
    fwd_lhs_bit: Bits,
    fwd_rhs_bit: Bits,
    dlhs_lhs_bit: Bits,
    dlhs_rhs_bit: Bits,
    drhs_lhs_bit: Bits,
    drhs_rhs_bit: Bits,
) -> DotConfig:
    """A copy with these bits, calibrated by absmax and rounded to nearest; residuals are those in float.

    >>> from octavo.compat import aqt
    >>> set_bits(aqt.config_v4(), 8, 4, None, None, None, None).fwd.rhs.qtype.name
    'int4'
    """

    def operand(old: Operand | None, bits: Bits) -> Operand | None:
        if bits is None:
            return None
        fields = {"qtype": operand_format(bits), "calibration": "absmax", "rounding": "nearest"}
        return Operand(**fields, arithmetic="aqt") if old is None else old.replace(**fields)  # pyrefly: ignore

    bits = ((fwd_lhs_bit, fwd_rhs_bit), (dlhs_lhs_bit, dlhs_rhs_bit), (drhs_lhs_bit, drhs_rhs_bit))
    changes = {}
    for name, (lhs, rhs), saved in zip(_SIX, bits, (None, fwd_rhs_bit, fwd_lhs_bit), strict=True):
        matmul = getattr(config, name)
        low = "reuse" if matmul.residual == "requantize" and rhs is None else matmul.residual
        residual = "original" if saved is not None else low
        changes[name] = matmul.replace(lhs=operand(matmul.lhs, lhs), rhs=operand(matmul.rhs, rhs), residual=residual)
    return config.replace(**changes)


def set_scale_and_bias_dtype(config: DotConfig, dtype: Any) -> DotConfig:
    """A copy whose scales have this dtype; AQT's setter has no effect.

    >>> from octavo.compat import aqt
    >>> set_scale_and_bias_dtype(aqt.config_v4(), "bfloat16").fwd.lhs.scale_dtype
    'bfloat16'
    """
    return _all(config, scale_dtype=jnp.dtype(dtype).name, arithmetic="float32")


def set_fwd_calibration(config: DotConfig, calibration_factory: Any) -> DotConfig:
    """A copy whose forward is calibrated otherwise.

    Args:
      config: The config.
      calibration_factory: `MeanOfAbsMaxCalibration`, whose ranges the modules of `octavo.compat.aqt_flax` collect in
        mode CALIBRATE; or a calibration of Octavo by name, such as "absmean,1.5".

    >>> from octavo.compat import aqt
    >>> set_fwd_calibration(aqt.config_v4(), MeanOfAbsMaxCalibration).fwd.lhs.tracker
    RunningMean()
    """
    factory = getattr(calibration_factory, "func", calibration_factory)  # of a functools.partial
    if factory is MeanOfAbsMaxCalibration:
        return config.with_operands(fwd={"tracker": RunningMean()})
    return config.with_operands(fwd={"calibration": calibration_factory})


def _each(config: DotConfig, change: Callable[[Any], Operand], sides: Sequence[str] = ("lhs", "rhs")) -> DotConfig:
    """A copy with each operand that is quantized changed."""
    names = [(name, side) for name in _SIX for side in sides if getattr(getattr(config, name), side) is not None]
    return config.with_operands(**{f"{n}_{s}": change(getattr(getattr(config, n), s)) for n, s in names})
