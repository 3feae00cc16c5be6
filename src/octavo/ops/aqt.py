"""AQT's constructors, with AQT's names and arguments, as descriptions that are frozen: each returns a DotConfig.

AQT (https://github.com/google/aqt) keeps one mutable object per operand and changes it with setters; here a changed
config is a new one, made by `DotConfig.replace` and `DotConfig.with_operands`. Operands compute in AQT's arithmetic,
which for float32 inputs gives AQT's bits. Pass `arithmetic="float32"` with bfloat16 and float16 inputs, whose scales
and quotients AQT rounds to those dtypes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp

from octavo._config import Config
from octavo._typing import DTypeLike
from octavo.numerics import Format, IntFormat, Stochastic, get_format
from octavo.ops.config import DotConfig, Matmul, Operand

SKIP: Literal["skip"] = "skip"
"""AQT's word for an argument that changes nothing."""

type Bits = int | str | None
"""None for float, 1 to 8 for an integer, "e4m3" or "e5m2" for a float8."""

_NOISE_BITS = {"jax.uniform": 24, "custom-1": 16}


@dataclasses.dataclass(frozen=True, repr=False)
class LocalAqt(Config):
    """Scales for each of n shards of a gradient's first contracted axis, which is where a batch is sharded.

    >>> config_v4(drhs_bits=8, drhs_local_aqt=LocalAqt(contraction_axis_shard_count=4)).drhs.lhs.tile
    0.25
    """

    contraction_axis_shard_count: int

    def __post_init__(self):
        if self.contraction_axis_shard_count < 1:
            raise ValueError(f"a contraction has at least one shard, got {self.contraction_axis_shard_count}")


def int_symmetric(bits: int, preserve_zero: bool = True, preserve_max_val: bool = False) -> Format:
    """AQT's IntSymmetric: integers about zero, in one of four conventions.

    With `preserve_zero` zero is representable; without it the values lie at the halves. With `preserve_max_val` the end
    of the range is the centre of the last bucket, without it that bucket's far edge.

    >>> [int_symmetric(8, zero, top).bound for zero in (True, False) for top in (False, True)]
    [127.5, 127.0, 128.0, 127.5]
    """
    # Buckets at the halves are symmetric already.
    return IntFormat(bits=bits, preserve_zero=preserve_zero, preserve_max=preserve_max_val, narrow=preserve_zero)


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
    """AQT's config_v3: integers, the incoming gradient rounded stochastically, residuals from the float operands.

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
    """AQT's config_v4: the incoming gradient rounded stochastically, residuals from the float operands.

    Calls that take a gradient need a `key`, unless both gradients are in float.

    >>> config = config_v4(fwd_bits=8, dlhs_bits="e5m2", drhs_bits=None)
    >>> config.fwd.lhs.qtype.name, config.dlhs.lhs.qtype.name, config.drhs.lhs
    ('int8', 'float8_e5m2', None)
    """
    if dlhs_mid_alpha_both != SKIP or drhs_mid_alpha_both != SKIP:
        raise NotImplementedError("only the forward is smoothed: leave dlhs_mid_alpha_both and drhs_mid_alpha_both out")
    if fwd_mid_alpha_both not in (SKIP, 0.5):
        raise ValueError(
            f"fwd_mid_alpha_both={fwd_mid_alpha_both}: AQT raises both sides to alpha, SmoothQuant one to alpha and "
            "the other to 1 - alpha, which agree at 0.5 only: use config_v4(...).replace(smooth=alpha)"
        )
    if fwd_bits is None and True in (dlhs_use_fwd_quant, drhs_use_fwd_quant):
        raise ValueError("use_fwd_quant takes the forward's low-bit values, but the forward is in float: give fwd_bits")
    config = _make(
        fwd=(fwd_bits, fwd_bits),
        bwd=(dlhs_bits, drhs_bits),
        reuse=(dlhs_use_fwd_quant is True, drhs_use_fwd_quant is True),
        local=(dlhs_local_aqt, drhs_local_aqt),
        accumulators=(fwd_accumulator_dtype, dlhs_accumulator_dtype, drhs_accumulator_dtype),
        calibration="constant,1" if use_dummy_static_bound else "absmax",
        arithmetic=arithmetic,
    )
    config = set_stochastic_rounding(config, True, False, rng_type)
    return config if fwd_mid_alpha_both == SKIP else config.replace(smooth=fwd_mid_alpha_both)


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

    Both operands of the gradients are rounded stochastically unless `use_stochastic_rounding` is False. To choose the
    two sides apart, pass None for it and both `vjp_lhs_stochastic_rounding` and `vjp_rhs_stochastic_rounding`.

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
    config = _make(
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
    return _make(fwd=(fwd_bits, fwd_bits), arithmetic=arithmetic)


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
    return _make(
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
    return _make(fwd=(lhs_bits, rhs_bits), arithmetic=arithmetic)


def default_unquantized_config() -> DotConfig:
    """AQT's default_unquantized_config: all three matmuls in float.

    >>> default_unquantized_config()
    DotConfig(clip_gradient=False)
    """
    return _make()


def set_stochastic_rounding(
    config: DotConfig,
    vjp_lhs_stochastic_rounding: bool,
    vjp_rhs_stochastic_rounding: bool,
    implementation: str = "jax.uniform",
    noise_sharing_axes: Sequence[int] = (),
) -> DotConfig:
    """A copy of a config whose gradients round their lhs (the incoming gradient) and rhs (the residual) as said.

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


def _make(
    *,
    fwd: tuple[Bits, Bits] = (None, None),
    bwd: tuple[Bits, Bits] = (None, None),
    reuse: tuple[bool, bool] = (False, False),
    local: tuple[LocalAqt | None, LocalAqt | None] = (None, None),
    accumulators: tuple[DTypeLike | None, DTypeLike | None, DTypeLike | None] = (None, None, None),
    **operand: Any,
) -> DotConfig:
    """A config from the bits of the forward's two sides and of dlhs and drhs, everything rounded to nearest."""
    left, right = (_operand(bits, **operand) for bits in fwd)
    gradients = []
    # The residual of dlhs is the forward's rhs, that of drhs its lhs.
    for bits, again, shards, saved, accumulator in zip(bwd, reuse, local, (right, left), accumulators[1:], strict=True):
        tiles = {} if shards is None else {"tile": 1 / shards.contraction_axis_shard_count, "tile_axis": 0}
        one = _operand(bits, **tiles, **operand)
        low = "reuse" if one is None else "requantize"
        residual = low if again and saved is not None else "original"
        gradients.append(Matmul(one, one, residual=residual, accumulator=_accumulator(accumulator, one, one)))
    forward = Matmul(left, right, accumulator=_accumulator(accumulators[0], left, right))
    # AQT masks no gradient unless it is asked to.
    return DotConfig(forward, *gradients, clip_gradient=False)


def _operand(bits: Bits, **fields: Any) -> Operand | None:
    return None if bits is None else Operand(_format(bits), **fields)


def _format(bits: int | str) -> Format:
    if bits in ("e4m3", "e5m2"):
        return get_format(bits)
    if isinstance(bits, int) and not isinstance(bits, bool) and 1 <= bits <= 8:
        return int_symmetric(bits, preserve_zero=bits > 1)
    raise ValueError(f"bits are None, 1 to 8, 'e4m3' or 'e5m2'; got {bits!r}")


def _accumulator(dtype: DTypeLike | None, lhs: Operand | None, rhs: Operand | None) -> str | None:
    """An accumulator as a Matmul has it: integers sum in int32 without being told."""
    if dtype is None or (isinstance(dtype, str) and dtype == SKIP):
        return None
    name = jnp.dtype(dtype).name
    integers = all(o is not None and isinstance(o.qtype, IntFormat) for o in (lhs, rhs))
    if name == "int32" and not integers:
        raise ValueError("an int32 accumulator needs integers on both sides: pass None for the accumulator of floats")
    if name.startswith("int") and name != "int32":
        raise ValueError(f"integers are summed in int32, got {name}: pass None or int32")
    return None if name == "int32" else name
