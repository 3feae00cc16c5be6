"""AQT's modules for Flax Linen, with its names, fields, modes and variables.

Each operand has a mode. CALIBRATE collects the ranges of `set_fwd_calibration`; CONVERT quantizes an operand once and
stores it, or its scale, in the collection "aqt"; SERVE takes what is stored there. Other modes quantize at every call.
Stored operands are QArrays: those of AQT's new freezer, whichever of its freezers is asked for.

>>> import functools
>>> from octavo.compat import aqt
>>> dot = functools.partial(AqtDotGeneral, aqt.config_v4(), rhs_quant_mode=QuantMode.CONVERT,
...     rhs_freeze_mode=FreezerMode.CALIBRATION_AND_VALUE)
>>> x = jnp.ones((2, 8))
>>> variables = nn.Dense(4, dot_general_cls=dot).init(jax.random.key(0), x)
>>> variables["aqt"]["AqtDotGeneral_0"]["qrhs"]["frozen"].qvalue.dtype
dtype('int8')
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta

from octavo import ops
from octavo._typing import Array
from octavo.calibration import RunningMean, widest
from octavo.ops import DotConfig, Operand
from octavo.qarray import QArray, Quantizer
from octavo.transform.site import operand_axes

__all__ = [
    "AqtConvGeneralDilated",
    "AqtDotGeneral",
    "AqtEinsum",
    "AxisTiling",
    "Cfg",
    "FreezerMode",
    "QuantMode",
    "TensorTiling",
    "aqt_promote_dtype",
]


class QuantMode(enum.Enum):
    """What an operation does with an operand."""

    TRAIN = 1
    CALIBRATE = 2
    CONVERT = 3
    SERVE = 4


class FreezerMode(enum.Enum):
    """What CONVERT stores of an operand: nothing, its scale, or its scale and its codes."""

    NONE = 1
    CALIBRATION = 2
    CALIBRATION_AND_VALUE = 3


@dataclasses.dataclass(frozen=True)
class AxisTiling:
    """Tiles along an axis, by their count or their size."""

    axis: int
    tile_count: int | None = None
    tile_size: int | None = None

    def __post_init__(self):
        if (self.tile_count is None) == (self.tile_size is None):
            raise ValueError("tiles have a tile_count or a tile_size, and not both")

    @property
    def tile(self) -> int | float:
        """The size, or the share of the axis."""
        return self.tile_size if self.tile_size is not None else 1 / (self.tile_count or 1)


@dataclasses.dataclass(frozen=True)
class TensorTiling:
    """The tiles of an operand."""

    contraction_axes: Sequence[AxisTiling] = ()
    remaining_axes: Sequence[AxisTiling] = ()

    @property
    def tiles(self) -> dict[int, int | float]:
        return {a.axis: a.tile for a in (*self.contraction_axes, *self.remaining_axes)}


@dataclasses.dataclass(frozen=True)
class Cfg:
    """The tiles of both operands of a dot_general, as AQT's `tiled_dot_general.Cfg`."""

    lhs: TensorTiling = TensorTiling()
    rhs: TensorTiling = TensorTiling()


def aqt_promote_dtype(lhs_in: Array, rhs_in: Array) -> tuple[Array, Array]:
    """Both operands in one float dtype, which AQT needs.

    >>> [x.dtype.name for x in aqt_promote_dtype(jnp.ones(2, jnp.bfloat16), jnp.ones(2))]
    ['float32', 'float32']
    """
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(lhs_in.dtype, rhs_in.dtype)
    return lhs_in.astype(dtype), rhs_in.astype(dtype)


class _AqtOp(nn.Module):
    """The operands of an operation: their modes and their variables.

    Attributes:
      cfg: The config; None for float.
      prng_name: The stream of the noise of stochastic rounding; None for no noise.
      lhs_quant_mode, rhs_quant_mode: The mode of each operand.
      lhs_apply_quant_mode, rhs_apply_quant_mode: Whether the mode counts; if not, a given QArray is taken.
      lhs_var_name, rhs_var_name: The names of the variables.
      lhs_qtensor, rhs_qtensor: QArrays in place of the operands.
      lhs_axis_metadata_wrapper, rhs_axis_metadata_wrapper: Box the stored arrays, for example with sharded axes.
      lhs_freeze_mode, rhs_freeze_mode: What CONVERT stores.
      quant_collection: The collection of what is stored and calibrated.
      use_legacy_freezer: Accepted for AQT: both freezers store QArrays.
    """

    cfg: DotConfig | None = None
    prng_name: str | None = "params"
    lhs_quant_mode: QuantMode = QuantMode.TRAIN
    lhs_apply_quant_mode: bool = True
    lhs_var_name: str = "qlhs"
    lhs_qtensor: QArray | None = None
    rhs_quant_mode: QuantMode = QuantMode.TRAIN
    rhs_apply_quant_mode: bool = True
    rhs_var_name: str = "qrhs"
    rhs_qtensor: QArray | None = None
    lhs_axis_metadata_wrapper: Any = None
    rhs_axis_metadata_wrapper: Any = None
    lhs_freeze_mode: FreezerMode = FreezerMode.NONE
    rhs_freeze_mode: FreezerMode = FreezerMode.NONE
    quant_collection: str = "aqt"
    use_legacy_freezer: bool = True

    def _prepare(
        self, config: DotConfig, operands: tuple[Any, Any], params: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The operands as they are multiplied, and the arguments `config`, `key` and `scaling` of the operation."""
        axes = operand_axes(params, operands[0].shape, operands[1].shape)
        found, scaling = [], {}
        for side, x, own in zip(("lhs", "rhs"), operands, axes, strict=True):
            operand = getattr(config.fwd, side)
            static = operand is not None and isinstance(operand.tracker, RunningMean)
            if static:
                config = config.with_operands(**{f"fwd_{side}": {"tracker": None}})
                operand = getattr(config.fwd, side)
            given = getattr(self, f"{side}_qtensor")
            if operand is None or isinstance(x, QArray):
                found.append(x)
            elif not getattr(self, f"{side}_apply_quant_mode"):
                found.append(x if given is None else given)
            else:
                quantizer = operand.quantizer(x.ndim, **own)
                bounds = self._range(side, quantizer, x) if static else None
                found.append(self._stored(side, quantizer, x, bounds))
                if bounds is not None and found[-1] is x:
                    scaling[side] = bounds
        key = None
        if config.stochastic and self.prng_name is not None and self.has_rng(self.prng_name):
            key = self.make_rng(self.prng_name)
        return found, {"config": config, "key": key, "scaling": scaling}

    def _range(self, side: str, quantizer: Quantizer, x: Array) -> dict[str, Array] | None:
        """The static range of an operand, which CALIBRATE collects; None while serving, where its scale is stored."""
        mode, tracker = getattr(self, f"{side}_quant_mode"), RunningMean()
        if mode is QuantMode.SERVE and not self.is_initializing():
            return None
        measured = {k: v.astype(jnp.float32) for k, v in quantizer.measure(jax.lax.stop_gradient(x)).items()}
        measured = widest(measured) if side == "lhs" else measured  # for batches of any size
        name = f"{getattr(self, f'{side}_var_name')}_range"
        stat = self.variable(self.quant_collection, name, tracker.init, measured)
        if self.is_initializing():
            return measured
        if mode is QuantMode.CALIBRATE:
            stat.value = tracker.update(stat.value, measured)
            return tracker.read(stat.value, measured)
        try:
            return tracker.read(stat.value)
        except ValueError as error:
            raise ValueError(
                f"{'/'.join(self.path)!r} has a static range of {side} that was never calibrated: apply the model with "
                f"{side}_quant_mode=QuantMode.CALIBRATE and mutable={self.quant_collection!r} first"
            ) from error

    def _stored(self, side: str, quantizer: Quantizer, x: Array, bounds: dict[str, Array] | None) -> Any:
        """The operand itself, or its codes: those that CONVERT stores, or that are stored."""
        mode, freeze = getattr(self, f"{side}_quant_mode"), getattr(self, f"{side}_freeze_mode")
        if mode not in (QuantMode.CONVERT, QuantMode.SERVE):
            return x
        if freeze is FreezerMode.NONE:
            raise ValueError(
                f"{side}_quant_mode={mode} stores the operand, but {side}_freeze_mode is NONE: use "
                "FreezerMode.CALIBRATION_AND_VALUE for weights, CALIBRATION for activations"
            )
        name, wrapper = getattr(self, f"{side}_var_name"), getattr(self, f"{side}_axis_metadata_wrapper")
        value = freeze is FreezerMode.CALIBRATION_AND_VALUE
        if (
            mode is QuantMode.SERVE
            and not self.is_initializing()
            and not self.has_variable(self.quant_collection, name)
        ):
            raise ValueError(
                f"{'/'.join(self.path)!r} serves {name!r} of the collection {self.quant_collection!r}, which was not "
                "given: apply the model in mode CONVERT with that collection mutable, and pass what it returns"
            )

        def make() -> dict[str, Any]:
            q = quantizer.quantize(x, bounds=bounds)
            kept = q if value else {"scale": q.scale}
            return {"frozen": kept if wrapper is None else jax.tree.map(wrapper, kept)}

        stored = self.variable(self.quant_collection, name, make)
        shape = getattr(meta.unbox(stored.value)["frozen"], "shape", x.shape)
        if shape != x.shape:
            raise ValueError(
                f"{'/'.join(self.path)!r} stores one operand of shape {shape}, but multiplies another of {x.shape}: a "
                "module that several layers share stores one weight; give each layer its own, by dot_general_cls"
            )
        if mode is QuantMode.CONVERT:
            stored.value = make()
        frozen = meta.unbox(stored.value)["frozen"]
        return frozen if value else quantizer.quantize(x, bounds=dict(frozen))


class AqtDotGeneral(_AqtOp):
    """A quantized `dot_general` for layers that take one, as AQT's module of this name.

    Attributes:
      tiling_cfg: Tiles of both operands in the forward, each with its own scales.
    """

    tiling_cfg: Cfg | None = None

    @nn.compact
    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        **kwargs: Any,
    ) -> Array:
        kinds = {"precision": precision, "preferred_element_type": preferred_element_type, **kwargs}
        if self.cfg is None:
            return jax.lax.dot_general(lhs, rhs, dimension_numbers, **kinds)
        config = self.cfg if self.tiling_cfg is None else _tiled(self.cfg, self.tiling_cfg)
        (lhs, rhs), options = self._prepare(config, (lhs, rhs), {"dimension_numbers": dimension_numbers})
        return ops.dot_general(lhs, rhs, dimension_numbers, **kinds, **options)


class AqtEinsum(_AqtOp):
    """A quantized einsum of two operands, which may be QArrays, as AQT's module of this name.

    Attributes:
      assert_eqn: The equation that is expected, for a module that is injected elsewhere.
      assert_lhs_shape, assert_rhs_shape: The shapes that are expected; None for any size.
      tile_sizes: The sizes of tiles by index.

    >>> from octavo.compat import aqt
    >>> einsum = AqtEinsum(aqt.config_v4(), tile_sizes={"i": 4})
    >>> einsum.init_with_output(jax.random.key(0), "bi,io->bo", jnp.ones((2, 8)), jnp.ones((8, 3)))[0].shape
    (2, 3)
    """

    assert_eqn: str | None = None
    assert_lhs_shape: Sequence[int | None] | None = None
    assert_rhs_shape: Sequence[int | None] | None = None
    tile_sizes: Mapping[str, int] | None = None

    @nn.compact
    def __call__(self, eqn: str, lhs_g: Any, rhs_g: Any) -> Array:
        if self.assert_eqn is not None and eqn != self.assert_eqn:
            raise ValueError(f"the equation is {eqn!r}, but assert_eqn is {self.assert_eqn!r}")
        for name, x in (("assert_lhs_shape", lhs_g), ("assert_rhs_shape", rhs_g)):
            wanted = getattr(self, name)
            if wanted is not None and (len(wanted) != x.ndim or any(
                w not in (None, n) for w, n in zip(wanted, x.shape, strict=False)
            )):  # fmt: skip
                raise ValueError(f"an operand of {eqn!r} has the shape {x.shape}, but {name} is {tuple(wanted)}")
        if self.cfg is None:
            return jnp.einsum(eqn, lhs_g, rhs_g)
        tiling = None if self.tile_sizes is None else _einsum_tiling(eqn, self.tile_sizes)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(_AqtOp) if f.name not in ("parent", "name")}
        dot = AqtDotGeneral(**fields, tiling_cfg=tiling)

        def product(lhs: Any, rhs: Any, numbers: Any, *, step: int, **kinds: Any) -> Array:
            del step
            return dot(lhs, rhs, numbers, **kinds)

        return ops.pairwise(product, eqn, lhs_g, rhs_g)


class AqtConvGeneralDilated(_AqtOp):
    """A quantized convolution for `nn.Conv`, as AQT's module of this name."""

    @nn.compact
    def __call__(self, lhs: Any, rhs: Any, window_strides: Any, padding: Any, **kwargs: Any) -> Array:
        if self.cfg is None:
            return jax.lax.conv_general_dilated(lhs, rhs, window_strides, padding, **kwargs)
        params = {"window_strides": window_strides, "dimension_numbers": kwargs.get("dimension_numbers")}
        (lhs, rhs), options = self._prepare(self.cfg, (lhs, rhs), params)
        return ops.conv_general_dilated(lhs, rhs, window_strides, padding, **kwargs, **options)


def _tiled(config: DotConfig, tiling: Cfg) -> DotConfig:
    """A config whose forward has these tiles."""
    changes: dict[str, Operand] = {}
    for side in ("lhs", "rhs"):
        operand, tiles = getattr(config.fwd, side), getattr(tiling, side).tiles
        if operand is not None and tiles:
            changes[f"fwd_{side}"] = operand.replace(tile=tiles)
    return config.with_operands(**changes)


def _einsum_tiling(eqn: str, sizes: Mapping[str, int]) -> Cfg:
    """The tiles of both operands of an einsum, by index."""
    terms = eqn.replace(" ", "").partition("->")[0].split(",")
    if unknown := [index for index in sizes if not any(index in term for term in terms)]:
        raise ValueError(f"tile_sizes names {unknown[0]!r}, which is not an index of {eqn!r}")
    left, right = (
        TensorTiling([AxisTiling(term.index(i), tile_size=n) for i, n in sizes.items() if i in term]) for term in terms
    )
    return Cfg(left, right)
