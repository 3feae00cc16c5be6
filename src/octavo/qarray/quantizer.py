"""The description of a quantization, and its implementation."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo import _sharding
from octavo._config import Config
from octavo._typing import Array, DTypeLike, Float, PRNGKeyArray
from octavo.calibration import Bounds, Calibration, CalibrationLike, get_calibration
from octavo.numerics import BlockFormat, Format, FormatLike, Rounding, get_format, get_rounding
from octavo.qarray.arithmetic import ARITHMETICS, Arithmetic
from octavo.qarray.qarray import QArray
from octavo.qarray.tiles import Tiles, check_tile_size

_SCALE_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e8m0fnu")


@dataclasses.dataclass(frozen=True, repr=False)
class Quantizer(Config):
    """A frozen description of a quantization, with a method that carries it out.

    Its fields are validated when it is made. A block format has a tile size of its own, along the last axis unless
    `tiled_axes` names others; the rest of its axes are channelwise.

    Args:
      qtype: The number format: a registered name such as "int8" or "nvfp4", a dtype, or a `Format`.
      channelwise_axes: Axes with one scale per index. Axes that are neither channelwise nor tiled share a scale.
      tiled_axes: The tile size of each tiled axis: a number of values, or 1/n for n tiles.
      calibration: How the range is measured: "absmax", "minmax", "rms,7", ... or a `Calibration`.
      rounding: "nearest", "stochastic", "stochastic,8" (bits of noise), or a `Rounding`.
      scale_dtype: The dtype of the scales; by default the array's, float32 for float16, or the format's own.
      arithmetic: "float32"; "qwix" and "aqt" give the results of these libraries bit for bit.

    >>> q = Quantizer("int8", channelwise_axes=(0,)).quantize(jnp.asarray([[1.0, 2.0], [0.5, 4.0]]))
    >>> q.qvalue.tolist(), q.scale.shape
    ([[64, 127], [16, 127]], (2, 1))
    """

    qtype: Format
    channelwise_axes: tuple[int, ...] = ()
    tiled_axes: tuple[tuple[int, int | float], ...] = ()
    calibration: Calibration = "absmax"  # pyrefly: ignore
    rounding: Rounding = "nearest"  # pyrefly: ignore
    scale_dtype: str | None = None
    arithmetic: str = "float32"

    def __init__(
        self,
        qtype: FormatLike,
        channelwise_axes: Collection[int] = (),
        tiled_axes: Mapping[int, int | float] | Collection[tuple[int, int | float]] | None = None,
        calibration: CalibrationLike = "absmax",
        rounding: Rounding | str = "nearest",
        scale_dtype: DTypeLike | None = None,
        arithmetic: str = "float32",
    ):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        tiled = tuple((dict(tiled_axes or {})).items())
        put("qtype", get_format(qtype))
        put("channelwise_axes", tuple(channelwise_axes))
        put("tiled_axes", tuple((axis, check_tile_size(axis, size)) for axis, size in tiled))
        put("calibration", get_calibration(calibration))
        put("rounding", get_rounding(rounding))
        put("scale_dtype", None if scale_dtype is None else jnp.dtype(scale_dtype).name)
        put("arithmetic", arithmetic)
        self._validate()

    def _validate(self) -> None:
        fmt = self.qtype
        if self.arithmetic not in ARITHMETICS:
            raise ValueError(f"arithmetic is one of {tuple(ARITHMETICS)}, got {self.arithmetic!r}")
        if self.scale_dtype not in (None, *_SCALE_DTYPES):
            raise ValueError(f"a scale is stored as one of {_SCALE_DTYPES}, got {self.scale_dtype}")
        if self.calibration.asymmetric and not fmt.asymmetric:
            raise ValueError(
                f"{self.calibration!r} gives a minimum and a maximum, which needs an integer format with a zero point; "
                f"{fmt.name} is symmetric: use 'absmax', or a type such as int8 or uint8"
            )
        if not fmt.signed and not self.calibration.asymmetric:
            raise ValueError(
                f"{fmt.name} has no negative values: use an asymmetric calibration ('minmax' or 'fixed,lo,hi'), "
                f"or int{fmt.bits}"
            )
        if both := {a for a, _ in self.tiled_axes} & set(self.channelwise_axes):
            raise ValueError(f"axes {sorted(both)} are both channelwise and tiled; a channelwise axis has tiles of 1")
        if fmt.tile is not None:
            if not self.tiled_axes:
                object.__setattr__(self, "tiled_axes", ((-1, fmt.tile),))
            if wrong := [f"axis {axis} is given {size}" for axis, size in self.tiled_axes if size != fmt.tile]:
                raise ValueError(
                    f"{fmt.name} has tiles of {fmt.tile} values; {wrong[0]}. "
                    "Leave the size to the format, or choose a format without tiles of its own"
                )

    def __repr__(self) -> str:
        shown: dict[str, Any] = {
            "channelwise_axes": self.channelwise_axes,
            "tiled_axes": dict(self.tiled_axes),
            "calibration": self.calibration,
            "rounding": self.rounding,
            "scale_dtype": self.scale_dtype,
            "arithmetic": self.arithmetic,
        }
        plain = {"calibration": get_calibration("absmax"), "rounding": get_rounding(None), "arithmetic": "float32"}
        known = repr(self.qtype.name) if _is_registered(self.qtype) else repr(self.qtype)
        parts = [known, *(f"{k}={v!r}" for k, v in shown.items() if v and v != plain.get(k))]
        return f"Quantizer({', '.join(parts)})"

    @property
    def _arithmetic(self) -> Arithmetic:
        return ARITHMETICS[self.arithmetic]

    def tiles(self, shape: tuple[int, ...]) -> Tiles:
        """The tiles of an array of this shape: which values share a scale."""
        tiled = dict(self.tiled_axes)
        channelwise = self.channelwise_axes
        if self.qtype.tile is not None:
            # Only values of a tile share the scale of a block, never other rows.
            along = {axis % len(shape) for axis in tiled if -len(shape) <= axis < len(shape)}
            channelwise = (*channelwise, *(axis for axis in range(len(shape)) if axis not in along))
        return Tiles.of(shape, channelwise, tiled)

    def measure(self, x: Float[Array, "..."], *, witness: Float[Array, "..."] | None = None) -> Bounds:
        """Measure the range of each group of values.

        Args:
          x: The values.
          witness: An array of the same shape that is checked for NaN in place of `x`.

        Returns:
          The bounds, in the shape of the scale; NaN for groups that hold a NaN.
        """
        tiles, x = self.tiles(x.shape), _sharding.without_reduced(x)
        split = tiles.split(x).astype(self._arithmetic.compute_dtype(_float_dtype(x)))
        seen = split if witness is None else tiles.split(_sharding.without_reduced(witness)).astype(split.dtype)
        return {k: tiles.merge(v) for k, v in self._measure(split, tiles, x.dtype, seen).items()}

    def _measure(self, split: Array, tiles: Tiles, dtype: np.dtype, witness: Array) -> Bounds:
        if not split.size:
            return {k: jnp.zeros([1 if a in tiles.axes else d for a, d in enumerate(split.shape)], split.dtype)
                    for k in (("min", "max") if self.calibration.asymmetric else ("absmax",))}  # fmt: skip

        def round_trip(bounds: Bounds) -> Array:
            scale, zero_point, outer, _ = self._scale(bounds, dtype)
            scale = scale if outer is None else scale * outer
            fmt = self._arithmetic.format(self.qtype)
            codes = self._arithmetic.encode(split, fmt, scale, zero_point, None)
            return self._arithmetic.decode(codes, fmt, scale, zero_point, split.dtype)

        bounds = self.calibration.measure(split, axes=tiles.axes, mask=tiles.mask(), round_trip=round_trip)
        return bounds if self.calibration.finite else _with_nan(bounds, witness, tiles.axes)

    def _scale(self, bounds: Bounds, dtype: np.dtype) -> tuple[Array, Array | None, Array | None, np.dtype]:
        arithmetic = self._arithmetic
        fmt = arithmetic.format(self.qtype)
        stored = jnp.dtype(self.scale_dtype) if self.scale_dtype else arithmetic.scale_dtype(fmt, dtype)
        stochastic = self.rounding.stochastic
        return *arithmetic.scale(bounds, fmt, dtype=dtype, scale_dtype=stored, stochastic=stochastic), stored

    def quantize(
        self,
        x: Float[Array, "..."],
        *,
        key: PRNGKeyArray | None = None,
        bounds: Bounds | None = None,
        own: bool = False,
    ) -> QArray:
        """Quantize an array.

        Args:
          x: The values.
          key: A PRNG key, for stochastic rounding.
          bounds: The range of each group, as `measure` returns it; by default it is measured on `x`. Along an axis
            there may be one bound for all tiles.
          own: Whether `bounds` were measured on `x` itself, so that they already show its non-finite values.

        Returns:
          A `QArray` of the same shape.
        """
        dtype, where, x = _float_dtype(x), _sharding.explicit(x), _sharding.without_reduced(x)
        arithmetic, tiles = self._arithmetic, self.tiles(x.shape)
        fmt = arithmetic.format(self.qtype)
        split = tiles.split(x).astype(arithmetic.compute_dtype(dtype))
        given = bounds is not None and not own
        if bounds is None:
            bounds = self._measure(split, tiles, dtype, split)
        else:
            bounds = {k: tiles.split_scale(v).astype(split.dtype) for k, v in bounds.items()}
            if ("min" in bounds) and not fmt.asymmetric:
                raise ValueError(
                    f"bounds have a minimum and a maximum, but {fmt.name} has no zero point: give an absmax"
                )
        if (given or self.calibration.finite) and self.arithmetic == "float32":
            split, bounds = _poison(split, bounds, fmt, tiles)
        scale, zero_point, outer, stored = self._scale(bounds, dtype)
        noise = self.rounding.noise(key, tiles.padded)
        noise = None if noise is None else tiles.split(noise)
        codes = arithmetic.encode(split, fmt, scale if outer is None else scale * outer, zero_point, noise)
        return QArray(
            _sharding.restore_reduced(tiles.merge(codes), where),
            tiles.merge(scale.astype(stored)),
            None if zero_point is None else tiles.merge(zero_point),
            fmt,
            outer_scale=None if outer is None else tiles.merge(outer),
            dtype=_value_dtype(stored, self.scale_dtype, dtype),
            padding=tiles.padding,
        )

    def bits_per_value(self, shape: tuple[int, ...]) -> float:
        """Bits per value of a packed array of this shape, scales and padding included."""
        q = jax.eval_shape(lambda: self.quantize(jnp.zeros(shape), key=jax.random.key(0)).pack())
        return 8 * q.nbytes / max(1, q.size)


def _with_nan(bounds: Bounds, x: Array, axes: tuple[int, ...]) -> Bounds:
    """Bounds that are NaN where a value is.

    XLA's CPU backend loses NaN in the maximum of an array that is not small (jaxlib 0.12.0, YNNPACK's reduction), but
    not in a sum, which costs next to nothing. A sum of huge values may be NaN although none of them is.
    """
    lost = jnp.isnan(jnp.sum(x, axis=axes, keepdims=True))
    return {k: jnp.where(lost & (jnp.abs(v) < 1e30), jnp.asarray(jnp.nan, v.dtype), v) for k, v in bounds.items()}


def _poison(split: Array, bounds: Bounds, fmt: Format, tiles: Tiles) -> tuple[Array, Bounds]:
    """Propagate non-finite values although the bounds are finite: as NaN, or in the scale of their group."""
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if element.has_nan:
        return jnp.where(jnp.isfinite(split), split, jnp.nan), bounds
    any_shape = next(iter(bounds.values())).shape
    shared = tuple(axis for axis, size in enumerate(any_shape) if size == 1)
    fine = jnp.all(jnp.isfinite(split), axis=shared, keepdims=True)
    return split, {k: jnp.where(fine, v, jnp.nan) for k, v in bounds.items()}


def _float_dtype(x: Array) -> np.dtype:
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
        raise TypeError(
            f"only bfloat16, float16, float32 and float64 arrays are quantized, got {x.dtype}; cast it first"
        )
    return np.dtype(x.dtype)


def _value_dtype(stored: np.dtype, asked: str | None, dtype: np.dtype) -> np.dtype:
    """Dequantized values have the input's dtype; as in Qwix, that of an explicit scale dtype, if it is wide enough."""
    return stored if asked and stored.itemsize >= 2 else dtype


def _is_registered(fmt: Format) -> bool:
    try:
        return get_format(fmt.name) == fmt
    except ValueError:
        return False
