"""The quantization config of a matmul and its two gradients: six operands.

A matmul `out = lhs @ rhs` has the gradients `dlhs = g @ rhs.T` and `drhs = lhs.T @ g`. In both, the cotangent `g`
is the first operand and the residual (the operand saved by the forward pass) the second.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from octavo._config import Config
from octavo.calibration import Calibration, CalibrationLike, Tracker, get_calibration
from octavo.numerics import Format, FormatLike, Rounding, get_format, get_rounding
from octavo.qarray import Quantizer

_DEQUANT = ("output", "input", "other")
_RESIDUALS = ("reuse", "requantize", "original")


@dataclasses.dataclass(frozen=True, repr=False)
class Operand(Config):
    """The quantization of one operand of one matmul, independent of its axes.

    By default there is one scale per index of the axes that are not contracted.

    Args:
      qtype: the format of the codes.
      tile: the tile size along a contracted axis: a count of values, or the fraction 1/n of the axis. A mapping has
        sizes by axis of the operand, contracted or not.
      tile_axis: which contracted axis has tiles: -1 the last; 0 the first, which is where a batch is sharded; None all.
      square: use tiles of the same size along the last remaining axis as well.
      per_tensor: one scale for the tensor, or with `tile` one for all rows of a tile.
      channelwise_axes: the axes of the operand that have a scale per index, in place of those that are not contracted;
        "contracted" for one scale per index of the contracted (and batch) axes. Scales that vary along the contraction
        are applied before the matmul, which then runs in float.
      calibration: the method that chooses the range.
      rounding: "nearest" or "stochastic".
      scale_dtype: the dtype of scales.
      arithmetic: the dtype in which codes are computed.
      dequant: where the scale is applied: to the "output" of a low-precision matmul; to this "input" before a float
        matmul (fake quantization); or to the "other" input, in which case scales run along the contracted axes.
      tracker: the tracker from whose state the range is read, as for delayed scaling.
      check_finite: whether a non-finite value makes its group NaN where the range is not measured (fixed or static). On
        TPUs the check is a pass over each operand; without it, such values have arbitrary codes in integer formats.

    >>> Operand("int4", tile=32).quantizer(2, contracting=(0,))
    Quantizer('int4', channelwise_axes=(1,), tiled_axes={0: 32})
    """

    qtype: Format
    tile: int | float | tuple[tuple[int, int | float], ...] | None = None
    tile_axis: int | None = -1
    square: bool = False
    per_tensor: bool = False
    calibration: Calibration = "absmax"  # pyrefly: ignore
    rounding: Rounding = "nearest"  # pyrefly: ignore
    scale_dtype: str | None = None
    arithmetic: str = "float32"
    dequant: str = "output"
    tracker: Tracker | None = None
    check_finite: bool = True
    channelwise_axes: tuple[int, ...] | str | None = None
    _quantizer: Quantizer = dataclasses.field(init=False, repr=False, compare=False)

    def __init__(
        self,
        qtype: FormatLike,
        tile: int | float | Mapping[int, int | float] | tuple[tuple[int, int | float], ...] | None = None,
        tile_axis: int | None = -1,
        square: bool = False,
        per_tensor: bool = False,
        calibration: CalibrationLike = "absmax",
        rounding: Rounding | str = "nearest",
        scale_dtype: str | None = None,
        arithmetic: str = "float32",
        dequant: str = "output",
        tracker: Tracker | None = None,
        check_finite: bool = True,
        channelwise_axes: Sequence[int] | str | None = None,
    ):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        fmt = get_format(qtype)
        put("qtype", fmt)
        by_axis = isinstance(tile, Mapping | tuple | list)
        put("tile", fmt.tile if tile is None else tuple(sorted(dict(tile).items())) if by_axis else tile)
        put("tile_axis", tile_axis)
        put("square", square)
        put("per_tensor", per_tensor)
        put("calibration", get_calibration(calibration))
        put("rounding", get_rounding(rounding))
        put("scale_dtype", scale_dtype)
        put("arithmetic", arithmetic)
        put("dequant", dequant)
        put("tracker", tracker)
        put("check_finite", check_finite)
        axes = channelwise_axes
        put("channelwise_axes", axes if axes is None or isinstance(axes, str) else tuple(axes))
        if dequant not in _DEQUANT:
            raise ValueError(f"dequant is one of {_DEQUANT}, got {dequant!r}")
        if tile_axis not in (0, -1, None):
            raise ValueError(f"tile_axis is -1, the last contracted axis, 0, the first, or None, all; got {tile_axis}")
        if isinstance(axes, str) and axes != "contracted":
            raise ValueError(f"channelwise_axes are axes of the operand, or 'contracted'; got {axes!r}")
        if axes is not None and (per_tensor or dequant == "other" or fmt.tile is not None):
            raise ValueError("channelwise_axes need dequant='output' or 'input', no per_tensor and no block format")
        if square and self.tile is None:
            raise ValueError("square tiles need a tile size: Operand('fp8', tile=128, square=True)")
        if by_axis and (square or tile_axis != -1 or fmt.tile is not None):
            raise ValueError("tiles by axis have no tile_axis, are not square and not those of a block format")
        if dequant == "other" and (self.tile is not None or per_tensor):
            raise ValueError("dequant='other' has one scale per contracted index: no tile, and not per tensor")
        if tracker is not None and self.calibration.asymmetric:
            raise ValueError("a remembered range is symmetric: use calibration='absmax' with a tracker")
        # Raises for fields that no Quantizer supports.
        tiles: Any = {0: self.tile} if self.tile is not None and not by_axis else self.tile
        template = Quantizer(
            self.qtype,
            calibration=self.calibration,
            rounding=self.rounding,
            scale_dtype=self.scale_dtype,
            arithmetic=self.arithmetic,
            tiled_axes=tiles,
        )
        put("_quantizer", template)

    def quantizer(self, ndim: int, *, contracting: Sequence[int], batch: Sequence[int] = ()) -> Quantizer:
        """The Quantizer for an operand with these axes."""
        remaining = [a for a in range(ndim) if a not in contracting and a not in batch]
        tiled: dict[int, int | float] = {}
        if isinstance(self.tile, tuple):
            if outside := [axis for axis, _ in self.tile if not -ndim <= axis < ndim]:
                raise ValueError(f"tile={dict(self.tile)}: the operand has {ndim} axes, not {outside}")
            tiled = {axis % ndim: size for axis, size in self.tile}
        elif self.tile is not None and contracting:
            tiled = dict.fromkeys(contracting if self.tile_axis is None else [contracting[self.tile_axis]], self.tile)
            if self.square and remaining:
                tiled[remaining[-1]] = self.tile
        if self.dequant == "other" or self.channelwise_axes == "contracted":
            channelwise = [a for a in (*batch, *contracting) if a not in tiled]
        elif isinstance(self.channelwise_axes, tuple):
            axes = self.channelwise_axes
            if outside := [a for a in axes if not -ndim <= a < ndim]:
                raise ValueError(
                    f"channelwise_axes={self.channelwise_axes}: the operand has {ndim} axes, not {outside}"
                )
            channelwise = [a % ndim for a in axes if a % ndim not in tiled]
        else:
            channelwise = [] if self.per_tensor else [a for a in (*batch, *remaining) if a not in tiled]
        if not tiled and self.qtype.tile is not None:
            tiled[-1] = self.qtype.tile
        return self._quantizer.with_axes(tuple(sorted(channelwise)), tuple(tiled.items()))


@dataclasses.dataclass(frozen=True, repr=False)
class Matmul(Config):
    """One of the three matmuls of a training step.

    Args:
      lhs: the left operand, in a gradient the cotangent; None for float.
      rhs: the right operand, in a gradient the residual; None for float.
      residual: the residual of a gradient. "reuse" uses the forward's codes and moves their scale into the cotangent,
        or requantizes them where tiles make that impossible; "requantize" quantizes the forward's low-bit value again,
        by `rhs`, along this matmul's contraction; "original" saves the float value, quantized by `rhs` if given.
      rotate: the block size of a Hadamard rotation of both operands along the last contracted axis, which spreads
        outliers and cancels out in the matmul.
      random_signs: whether the rotation is a random one, drawn for each call: values are multiplied by random signs.
      smooth: SmoothQuant's alpha: for each contracted index k, `lhs` is divided and `rhs` multiplied by
        max|lhs_k|**alpha / max|rhs_k|**(1 - alpha) before they are quantized; or both exponents, as (alpha, alpha) for
        AQT's mid-quantization.
      accumulator: the dtype in which floats, and the partial sums of tiles, are accumulated (float32 by default); the
        integers of one tile always accumulate in int32.

    >>> DotConfig(fwd=Matmul(lhs=Operand("int8"), rhs=Operand("int4"))).fwd.rhs.qtype.name
    'int4'
    """

    lhs: Operand | None = None
    rhs: Operand | None = None
    residual: str = "reuse"
    rotate: int | None = None
    accumulator: str | None = None
    smooth: float | tuple[float, float] | None = None
    random_signs: bool = False

    def __post_init__(self):
        if self.random_signs and self.rotate is None:
            raise ValueError("random_signs make a rotation random: give its block size, such as rotate=32")
        if self.smooth is not None:
            self._check_smooth(self.smooth)
        if self.residual not in _RESIDUALS:
            raise ValueError(f"residual is one of {_RESIDUALS}, got {self.residual!r}")
        if self.rotate is not None and (self.rotate < 2 or self.rotate & (self.rotate - 1)):
            raise ValueError(f"a Hadamard rotation has blocks of a power of two, got {self.rotate}")
        if self.residual == "requantize" and self.rhs is None:
            raise ValueError("residual='requantize' needs rhs, the operand to quantize by")
        if self.accumulator not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"accumulator is float32, bfloat16 or float16, got {self.accumulator!r}")
        if self.lhs and self.rhs and self.lhs.dequant == self.rhs.dequant == "other":
            raise ValueError("only one operand's scale can be moved into the other")

    def _check_smooth(self, alpha: Any) -> None:
        both = tuple(alpha) if isinstance(alpha, tuple | list) else (alpha,)
        if len(both) > 2 or not all(0 <= a <= 1 for a in both):
            raise ValueError(f"smooth is SmoothQuant's alpha, from 0 to 1, or the exponents of both sides; got {alpha}")
        if self.lhs is None and self.rhs is None:
            raise ValueError("smooth makes operands easier to quantize, but this matmul quantizes none: smooth=None")
        object.__setattr__(self, "smooth", both if len(both) == 2 else both[0])

    @property
    def stochastic(self) -> bool:
        """Whether it needs a random key: an operand is rounded stochastically or rotated at random."""
        return self.random_signs or any(
            operand is not None and operand.rounding.stochastic for operand in (self.lhs, self.rhs)
        )


@dataclasses.dataclass(frozen=True, repr=False)
class DotConfig(Config):
    """The quantization of a matmul and its two gradients; every recipe compiles to DotConfigs.

    Args:
      fwd: the forward matmul.
      dlhs: the gradient of the left operand.
      drhs: the gradient of the right operand.
      clip_gradient: whether the gradient of values outside the calibrated range is zero.
      sparsity: (n, m) keeps the n largest of every m weights along the contracted axis of `rhs`.
      lowering: the lowering of the matmuls, one of `octavo.ops.lowerings()`.

    >>> DotConfig.qt("int8").fwd.lhs.qtype.name
    'int8'
    """

    fwd: Matmul = Matmul()
    dlhs: Matmul = Matmul(residual="original")
    drhs: Matmul = Matmul(residual="original")
    clip_gradient: bool = True
    sparsity: tuple[int, int] | None = None
    lowering: str = "auto"
    tracked: dict[str, Operand] = dataclasses.field(init=False, repr=False, compare=False)
    """The operands with trackers: "lhs" and "rhs" of the forward, the cotangents of "dlhs" and "drhs"."""
    stochastic: bool = dataclasses.field(init=False, repr=False, compare=False)
    """Whether an operand is rounded stochastically, so that its matmul needs a key."""

    def __post_init__(self):
        object.__setattr__(self, "stochastic", any(m.stochastic for m in (self.fwd, self.dlhs, self.drhs)))
        operands = {"lhs": self.fwd.lhs, "rhs": self.fwd.rhs, "dlhs": self.dlhs.lhs, "drhs": self.drhs.lhs}
        tracked = {name: o for name, o in operands.items() if o is not None and o.tracker is not None}
        object.__setattr__(self, "tracked", tracked)
        if self.fwd.residual != "reuse":
            raise ValueError("the forward matmul has no residual; set it on dlhs and drhs")
        if self.fwd.rotate and not self.dlhs.residual == self.drhs.residual == "original":
            raise ValueError("a rotated forward leaves rotated codes behind: use residual='original' on dlhs and drhs")
        moved = any(o is not None and o.dequant == "other" for o in (self.fwd.lhs, self.fwd.rhs))
        if moved and not self.dlhs.residual == self.drhs.residual == "original":
            raise ValueError("dequant='other' mixes the operands' scales: use residual='original' on dlhs and drhs")
        for name, gradient in (("dlhs", self.dlhs), ("drhs", self.drhs)):
            if gradient.residual == "reuse" and gradient.smooth is not None:
                raise ValueError(f"{name} is smoothed, so it cannot reuse codes: use residual='original'")
            if gradient.residual == "reuse" and gradient.rotate:
                raise ValueError(f"{name} rotates its operands, so it cannot reuse codes: use residual='requantize'")
        if self.sparsity is not None:
            n, m = self.sparsity
            if not 0 < n < m:
                raise ValueError(f"sparsity (n, m) keeps n of m weights, 0 < n < m; got {self.sparsity}")
            object.__setattr__(self, "sparsity", (n, m))
        if self.fwd.smooth is not None and not self.dlhs.residual == self.drhs.residual == "original":
            raise ValueError(
                "a smoothed forward leaves smoothed codes behind: use residual='original' on dlhs and drhs"
            )

    def with_operands(self, **changes: Operand | Mapping[str, Any] | None) -> "DotConfig":
        """A copy with some operands replaced, or some of their fields.

        A name is an operand (`fwd_lhs`, `fwd_rhs`, `dlhs_lhs`, `dlhs_rhs`, `drhs_lhs`, `drhs_rhs`) or a matmul (`fwd`,
        `dlhs`, `drhs`) for both of its operands. A mapping changes fields of an operand; an Operand, or None for
        float, replaces it. Fields given for a matmul do not change its float operands.

        >>> DotConfig.qat("int8").with_operands(fwd={"per_tensor": True}, fwd_rhs={"qtype": "int4"}).fwd.rhs.qtype.name
        'int4'
        """
        sides = {f"{m}_{s}": (m, s) for m in ("fwd", "dlhs", "drhs") for s in ("lhs", "rhs")}
        operands = {name: getattr(getattr(self, m), s) for name, (m, s) in sides.items()}
        for name, change in changes.items():
            if name not in (*sides, "fwd", "dlhs", "drhs"):
                raise ValueError(f"{name!r} is no operand: use one of {tuple(sides)}, or fwd, dlhs, drhs for both")
            for each in [name] if name in sides else [f"{name}_lhs", f"{name}_rhs"]:
                if not isinstance(change, Mapping):
                    operands[each] = change
                elif operands[each] is not None:
                    operands[each] = operands[each].replace(**change)
                elif each == name:
                    raise ValueError(f"{name} is left in float and has no fields to change: give an Operand")
        matmuls = {
            m: getattr(self, m).replace(lhs=operands[f"{m}_lhs"], rhs=operands[f"{m}_rhs"])
            for m in ("fwd", "dlhs", "drhs")
        }
        return self.replace(**matmuls)

    @staticmethod
    def qt(qtype: FormatLike = "int8", bwd: FormatLike | None = None, **operand: Any) -> "DotConfig":
        """Quantized training: all three matmuls in low precision, with the forward's codes as residuals."""
        both = Operand(qtype, **operand)
        gradient = Matmul(Operand(qtype if bwd is None else bwd, **operand))
        return DotConfig(Matmul(both, both), gradient, gradient)

    @staticmethod
    def qat(qtype: FormatLike = "int8", **operand: Any) -> "DotConfig":
        """Quantization-aware training: low-precision forward, straight-through gradients in float."""
        both = Operand(qtype, **operand)
        return DotConfig(Matmul(both, both))

    @staticmethod
    def weight_only(qtype: FormatLike = "int8", **operand: Any) -> "DotConfig":
        """Only the right operand in low precision; gradients in float."""
        return DotConfig(Matmul(None, Operand(qtype, **operand)))
