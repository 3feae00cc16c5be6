"""The description of a quantization, and its implementation."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo import _sharding
from octavo._config import Config
from octavo._typing import Array, DTypeLike, Float, PRNGKeyArray, Shape
from octavo.calibration import AbsMax, Bounds, Calibration, CalibrationLike, get_calibration
from octavo.numerics import BlockFormat, Eden, Format, FormatLike, IntFormat, Rounding, get_format, get_rounding
from octavo.qarray.arithmetic import ARITHMETICS, on_cpu
from octavo.qarray.eden import correct_scale
from octavo.qarray.indexing import unpad
from octavo.qarray.qarray import QArray, Tiles, is_eager

_ABSMAX = AbsMax()
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
    format: Format = dataclasses.field(init=False, repr=False, compare=False)
    """The format as the arithmetic uses it."""

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
        if isinstance(self.rounding, Eden) and not (isinstance(fmt, BlockFormat) and fmt.outer):
            raise ValueError(
                f"MS-EDEN rounds the scales of blocks under a scale of the tensor, as in nvfp4; {fmt.name} has none: "
                "use rounding='stochastic'"
            )
        narrow = ARITHMETICS[self.arithmetic].narrow and isinstance(fmt, IntFormat) and fmt.has_zero and fmt.signed
        object.__setattr__(self, "format", fmt.replace(narrow=True) if narrow else fmt)

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

    def with_axes(self, channelwise: tuple[int, ...], tiled: tuple[tuple[int, int | float], ...]) -> "Quantizer":
        """The same quantizer with other axes, which are not validated."""
        new = object.__new__(Quantizer)
        new.__dict__.update(self.__dict__, channelwise_axes=channelwise, tiled_axes=tiled)
        return new

    def tiles(self, shape: Shape) -> Tiles:
        """The tiles of an array of this shape: one value each on channelwise axes, one tile on axes without tiles."""
        rank = len(shape)
        for axis in (*self.channelwise_axes, *(axis for axis, _ in self.tiled_axes)):
            if not -rank <= axis < rank:
                raise ValueError(f"axis {axis} is out of range for an array of shape {shape}")
        tiled = {axis % rank: size for axis, size in self.tiled_axes}
        channels = {axis % rank for axis in self.channelwise_axes}
        if both := channels & tiled.keys():
            raise ValueError(f"axes {sorted(both)} are both channelwise and tiled; a channelwise axis has tiles of 1")
        if self.qtype.tile is not None:
            # Only values of a tile share the scale of a block, never other rows.
            channels = {axis for axis in range(rank) if axis not in tiled}
        sizes = []
        for axis, dim in enumerate(shape):
            size = 1 if axis in channels else tiled.get(axis, dim)
            # A float 1/n is a count of n tiles.
            size = -(-dim // round(1 / size)) if isinstance(size, float) else size
            sizes.append(max(size if size is dim or not isinstance(dim, int) else min(size, dim), 1))
        counts = tuple(-(-dim // size) for dim, size in zip(shape, sizes, strict=True))
        return Tiles(tuple(shape), tuple(sizes), counts)

    def measure(self, x: Float[Array, "..."], *, witness: Float[Array, "..."] | None = None) -> Bounds:
        """Measure the range of each group of values.

        Args:
          x: The values.
          witness: An array of the same shape that is checked for NaN in place of `x`.

        Returns:
          The bounds, in the shape of the scale; NaN for groups that hold a NaN.
        """
        tiles, x = self.tiles(x.shape), _sharding.without_reduced(x)
        split = tiles.split(self._widen(x))
        seen = split if witness is None else tiles.split(_sharding.without_reduced(witness)).astype(split.dtype)
        return {k: tiles.merge(v) for k, v in self._measure(split, tiles, x.dtype, seen).items()}

    def _widen(self, x: Array) -> Array:
        """Cast the values to the dtype in which bounds are measured and values divided."""
        if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
            raise TypeError(
                f"only bfloat16, float16, float32 and float64 arrays are quantized, got {x.dtype}; cast it first"
            )
        return x.astype(jnp.float32) if ARITHMETICS[self.arithmetic].wide and x.dtype != jnp.float64 else x

    def _measure(self, split: Array, tiles: Tiles, dtype: np.dtype, witness: Array) -> Bounds:
        if not split.size:
            shape = [1 if a in tiles.axes else d for a, d in enumerate(split.shape)]
            names = ("min", "max") if self.calibration.asymmetric else ("absmax",)
            return {name: jnp.zeros(shape, split.dtype) for name in names}

        def round_trip(bounds: Bounds) -> Array:
            scale, zero_point, outer, _ = self._scale(bounds, dtype)
            scale = scale if outer is None else scale * outer
            arithmetic = ARITHMETICS[self.arithmetic]
            codes = arithmetic.encode(split, self.format, scale, zero_point, None)
            return arithmetic.decode(codes, self.format, scale, zero_point, split.dtype)

        mask = tiles.mask() if tiles.padding else None
        # A largest magnitude is exact in the dtype of the values, and TPU's compiler then measures it where they are
        # computed, not in a pass over values that are widened first.
        values = split.astype(dtype) if self.calibration == _ABSMAX else split
        bounds = self.calibration.measure(values, axes=tiles.axes, mask=mask, round_trip=round_trip)
        bounds = {name: bound.astype(split.dtype) for name, bound in bounds.items()}
        if self.calibration.finite:
            return bounds
        # XLA's CPU backend loses NaN in the maximum of an array that is not small (jaxlib 0.12.0, YNNPACK's
        # reduction), but not in a sum, which costs next to nothing there. A sum of huge values may be NaN although none
        # is. On TPUs and GPUs the maximum of NaN is NaN, and the sum would be a second reduction in each epilogue.
        witness = witness if witness.dtype == jnp.float64 else witness.astype(jnp.float32)
        total = jax.lax.expand_dims(jax.lax.reduce_sum(witness, tiles.axes), tiles.axes)
        has_nan = jax.lax.ne(total, total) & on_cpu()
        for name, bound in bounds.items():
            if name == "largest":
                continue
            bound = jnp.broadcast_to(bound, total.shape)
            magnitude = bound if name == "absmax" else jax.lax.abs(bound)
            limit = jnp.inf if bound.dtype == jnp.float16 else 1e30
            invalid = has_nan & jax.lax.lt(magnitude, jax.lax.full_like(bound, limit))
            bounds[name] = jnp.where(invalid, jnp.nan, bound)  # a scalar NaN, which `jax_debug_nans` does not see
        return bounds

    def _scale(self, bounds: Bounds, dtype: np.dtype) -> tuple[Array, Array | None, Array | None, np.dtype]:
        """The scale, the zero point and the outer scale, and the dtype in which the scale is stored."""
        arithmetic, fmt = ARITHMETICS[self.arithmetic], self.format
        stored = np.dtype(dtype)
        if self.scale_dtype:
            stored = jnp.dtype(self.scale_dtype)
        elif arithmetic.wide and isinstance(fmt, BlockFormat):
            stored = jnp.dtype(fmt.scale_dtype)
        elif arithmetic.wide and dtype == np.float16:
            # Scales of small tensors underflow in float16: 1e-3 / 127.5 is already subnormal.
            stored = np.dtype(np.float32)
        if "scale" in bounds:
            return bounds["scale"], bounds.get("zero_point"), None, stored
        return *arithmetic.scale(bounds, fmt, scale_dtype=stored, stochastic=not self.rounding.nearest), stored

    def scale_of(self, bounds: Bounds, dtype: DTypeLike) -> Bounds:
        """The scale, and the zero point if there is one, of bounds for values of a dtype.

        They can be passed to `quantize` in place of the bounds, with the same codes.

        >>> quantizer = Quantizer("int8")
        >>> quantizer.scale_of({"absmax": jnp.full((1, 1), 255.0)}, jnp.float32)["scale"].tolist()
        [[2.0]]
        """
        compute = self._widen(jnp.zeros((), dtype)).dtype
        given = {k: v.astype(compute) for k, v in bounds.items()}
        scale, zero_point, outer, stored = self._scale(given, np.dtype(dtype))
        if outer is not None:
            raise ValueError(
                f"{self.qtype.name} has a scale of its scales, so that its range cannot be fixed: use mxfp4"
            )
        return {"scale": scale.astype(stored)} | ({} if zero_point is None else {"zero_point": zero_point})

    def quantize(
        self,
        x: Float[Array, "..."],
        *,
        key: PRNGKeyArray | None = None,
        bounds: Bounds | None = None,
        measured: Bounds | None = None,
        check_finite: bool = True,
    ) -> QArray:
        """Quantize an array.

        Args:
          x: The values.
          key: A PRNG key, for stochastic rounding.
          bounds: The range of each group, as `measure` returns it, or its scale, as `scale_of` does; by default it is
            measured on `x`. Along an axis there may be one bound for all tiles.
          measured: What `measure` returned for `x`, if it was called; it shows whether all values are finite.
          check_finite: Whether the scale of a group with non-finite values is NaN although its bounds, which were not
            measured on `x`, are finite. If not, such values have arbitrary codes in formats without NaN.

        Returns:
          A `QArray` of the same shape.
        """
        # The other arithmetics round after each primitive in bfloat16, which a fused program does not.
        if bounds is None and measured is None and self.arithmetic == "float32" and is_eager(x, key):
            return _quantize_eagerly(self, check_finite, x, key)
        where, x, fmt, tiles = _sharding.explicit(x), _sharding.without_reduced(x), self.format, self.tiles(x.shape)
        split = tiles.split(self._widen(x))
        external = bounds is not None and bounds is not measured
        if bounds is None:
            bounds = self._measure(split, tiles, x.dtype, split)
        else:
            bounds = {k: tiles.split_scale(v) for k, v in bounds.items()}
            bounds = {k: v if k == "zero_point" else v.astype(split.dtype) for k, v in bounds.items()}
            if "min" in bounds and not fmt.asymmetric:
                raise ValueError(
                    f"bounds have a minimum and a maximum, but {fmt.name} has no zero point: give an absmax"
                )
        finite = None
        if (external or self.calibration.finite) and self.arithmetic == "float32":
            if fmt.has_nan:
                split = jnp.where(jnp.isfinite(split), split, jnp.nan)
            elif measured is not None and self.calibration == _ABSMAX:
                finite = jnp.isfinite(tiles.split_scale(measured["absmax"]))
            elif check_finite:
                shared = tuple(axis for axis, size in enumerate(next(iter(bounds.values())).shape) if size == 1)
                finite = jnp.all(jnp.isfinite(split), axis=shared, keepdims=True)
        scale, zero_point, outer, stored = self._scale(bounds, x.dtype)
        noise = self.rounding.noise(key, tiles.padded) if self.rounding.stochastic else None
        noise = None if noise is None else tiles.split(noise)
        divisor = scale if outer is None else scale * outer
        codes = ARITHMETICS[self.arithmetic].encode(split, fmt, divisor, zero_point, noise)
        if isinstance(self.rounding, Eden):
            scale = correct_scale(self.rounding, key, split, codes, fmt, scale, divisor, tiles)
        if finite is not None:
            # The scale of a group with non-finite values is NaN. Its codes do not depend on that, so that both are
            # computed in one pass over the values.
            scale = jnp.where(finite, scale, jnp.nan)
        arrays = (
            _sharding.restore_reduced(tiles.merge(codes), where) if where is not None else tiles.merge(codes),
            tiles.merge(scale.astype(stored)),
            None if zero_point is None else tiles.merge(zero_point),
            None if outer is None else tiles.merge(outer),
        )
        # As in Qwix, values have the dtype of an explicit scale dtype, if it is wide enough; else the input's.
        dtype = stored if self.scale_dtype and stored.itemsize >= 2 else np.dtype(x.dtype)
        return QArray.tree_unflatten((fmt, dtype, tiles.padding, None), arrays)

    def gradient(self, x: Float[Array, "..."], bounds: Bounds | None = None) -> Array | None:
        """The factor of the gradient that the format gives each value, see `Format.gradient`; None for one."""
        if type(self.qtype).gradient is Format.gradient:
            return None
        x, tiles = _sharding.without_reduced(x), self.tiles(x.shape)
        split = tiles.split(self._widen(x))
        if bounds is None:
            bounds = self._measure(split, tiles, x.dtype, split)
        else:
            bounds = {k: tiles.split_scale(v).astype(split.dtype) for k, v in bounds.items()}
        scale, _, outer, _ = self._scale(bounds, x.dtype)
        factor = self.format.gradient(split / (scale if outer is None else scale * outer))
        return None if factor is None else unpad(tiles.merge(factor), tiles.padding)

    def bits_per_value(self, shape: tuple[int, ...]) -> float:
        """Bits per value of a packed array of this shape, scales and padding included."""
        q = jax.eval_shape(lambda: self.quantize(jnp.zeros(shape), key=jax.random.key(0)).pack())
        return 8 * q.nbytes / max(1, q.size)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _quantize_eagerly(quantizer: Quantizer, check_finite: bool, x: Array, key: PRNGKeyArray | None) -> QArray:
    return quantizer.quantize(x, key=key, check_finite=check_finite)


def check_tile_size(axis: int, size: int | float) -> int | float:
    """A tile size as the user gave it, if it is a valid one."""
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise TypeError(f"the tile size of axis {axis} is a count of values or a fraction 1/n, got {size!r}")
    whole = isinstance(size, float) and 0 < size <= 1 and abs(1 / size - round(1 / size)) < 1e-6
    if size <= 0 or (isinstance(size, float) and not whole):
        raise ValueError(f"the tile size of axis {axis} is a positive integer, or 1/n as a float; got {size!r}")
    return size


def _is_registered(fmt: Format) -> bool:
    try:
        return get_format(fmt.name) == fmt
    except ValueError:
        return False
