"""Quantization objects for Flax Linen layers: each has the operations that a layer takes instead of JAX's own.

All of them hold a config or rules; only Flax's own float8 operations, which keep amax histories themselves, do not.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from flax.linen import fp8_ops

from octavo.frameworks.linen_ops import ConvGeneralDilated, DotGeneral, Einsum
from octavo.ops import DotConfig
from octavo.rules import recipe

MODES = ("train", "calibrate", "convert", "serve")


def get_quant_mode(mode: str = "train") -> str:
    """Check that a mode exists.

    >>> get_quant_mode("serve")
    'serve'
    """
    if mode not in MODES:
        raise ValueError(f"a mode is one of {', '.join(MODES)}; got {mode!r}")
    return mode


class AqtDotGeneral(DotGeneral):
    """`DotGeneral` by AQT's name, under which its variables are stored."""


class AqtEinsum(Einsum):
    """`Einsum` by AQT's name, under which its variables are stored."""

    dot: ClassVar[type[DotGeneral]] = AqtDotGeneral
    dot_name: ClassVar[str] = "AqtDotGeneral_{}"


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Operations for Flax Linen layers.

    In mode "convert" they store the codes of each weight in the collection "aqt"; in "serve" they multiply the codes
    that are there, and `mesh_axes` are the names of their axes. In the other modes codes and scales are computed from
    the weight at every call, and sharded like it.

    Attributes:
      config: A `DotConfig`, or rules by the path of the layer.
      quant_mode: One of `MODES`.
      replicate_scale: Whether stored scales are replicated on all devices.
      static: Whether activations have static ranges, which mode "calibrate" collects.
    """

    config: Any = None
    quant_mode: str = "train"
    replicate_scale: bool = False
    static: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self):
        object.__setattr__(self, "quant_mode", get_quant_mode(self.quant_mode))

    def dot_general_cls(self, mesh_axes: Sequence[str] = ()) -> Callable[..., Any]:
        """The `dot_general_cls` of `nn.Dense` and similar layers."""
        return functools.partial(AqtDotGeneral, *self._fields(mesh_axes))

    def einsum(self, mesh_axes: Sequence[str] = ()) -> Any:
        """A module with the signature of `jnp.einsum`."""
        return AqtEinsum(*self._fields(mesh_axes))

    def conv_general_dilated_cls(self, mesh_axes: Sequence[str] = ()) -> Callable[..., Any]:
        """The `conv_general_dilated_cls` of `nn.Conv`."""
        return functools.partial(ConvGeneralDilated, *self._fields(mesh_axes))

    def _fields(self, mesh_axes: Sequence[str]) -> tuple[Any, ...]:
        return self.config, self.static, self.quant_mode, tuple(mesh_axes), self.replicate_scale


@dataclasses.dataclass(frozen=True)
class AqtQuantization(Quantization):
    """AQT's numerics: `config` is one of `octavo.compat.aqt`, or the rules of a mixed-precision table.

    Attributes:
      quant_dg: MaxText's name of `config`.
    """

    quant_dg: Any = dataclasses.field(default=None, kw_only=True, repr=False)

    def __post_init__(self):
        super().__post_init__()
        if self.config is not None and self.quant_dg is not None and self.config != self.quant_dg:
            raise ValueError("config and quant_dg are two names of one argument: pass one of them")
        config = self.quant_dg if self.config is None else self.config
        if not isinstance(config, DotConfig | tuple | list):
            raise TypeError(
                f"quant_dg is a config of octavo.compat.aqt, such as aqt.config_v3(), or rules, such as "
                f"octavo.rules.mixed_precision(table); got {type(config).__module__}.{type(config).__name__}"
            )
        object.__setattr__(self, "config", config)
        object.__setattr__(self, "quant_dg", config)


@dataclasses.dataclass(frozen=True)
class _TrainingOnly(Quantization):
    def __post_init__(self):
        super().__post_init__()
        if self.quant_mode in ("convert", "serve"):
            raise ValueError(
                f"Flax's float8 operations quantize at every call and store no weights: {self.quant_mode!r} is for "
                "AQT's configs; octavo.convert and octavo.served convert any model"
            )


class Fp8Quantization(_TrainingOnly):
    """Delayed scaling by Flax's own operations, for NVIDIA's float8 formats."""

    def dot_general_cls(self, mesh_axes: Sequence[str] = ()) -> Callable[..., Any]:
        del mesh_axes
        return nn.Fp8DirectDotGeneralOp

    def einsum(self, mesh_axes: Any = (), dtype: Any = None) -> Any:
        """A module that computes in `dtype`, which may also come first, as in MaxText; the axes do not matter."""
        return _InDtype(_dtype(mesh_axes, dtype), nn.Fp8Einsum)


class NANOOFp8Quantization(_TrainingOnly):
    """Delayed scaling for the fnuz formats of AMD's MI300: Flax's own `dot_general`, and Octavo's einsum."""

    def dot_general_cls(self, mesh_axes: Sequence[str] = ()) -> Callable[..., Any]:
        del mesh_axes
        return nn.NANOOFp8DotGeneralOp

    def einsum(self, mesh_axes: Any = (), dtype: Any = None) -> Any:
        """A module that computes in `dtype`, which may also come first, as in MaxText; the axes do not matter."""
        return _InDtype(_dtype(mesh_axes, dtype), functools.partial(Einsum, recipe("nanoo_fp8", exclude=None)))


def _dtype(first: Any, dtype: Any) -> Any:
    if dtype is None:
        dtype = jnp.float32 if isinstance(first, tuple | list) else first
    return jnp.dtype(dtype)


def _dot_general(lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any) -> Any:
    """Flax's, which has precisions of its own for both passes, and warns if it is given others."""
    del args, kwargs
    return fp8_ops.dot_general_with_precision(lhs, rhs, dimension_numbers)


class Fp8Einsum(fp8_ops.Fp8DotGeneralBase):
    """An einsum of operands rounded to float8, whose amax histories are the module's own variables.

    Attributes:
      dtype: The dtype of the computation.
    """

    dtype: Any = jnp.float32

    def __call__(self, eqn: str, lhs: Any, rhs: Any, **kwargs: Any) -> Any:
        sides = ((lhs, self.input_scale, self.input_amax_history), (rhs, self.kernel_scale, self.kernel_amax_history))
        rounded = [
            fp8_ops.in_qdq(self.dtype, self.e4m3_dtype, jnp.asarray(x, self.dtype), scale.value, history.value)
            for x, scale, history in sides
        ]
        out = jnp.einsum(eqn, *rounded, _dot_general=_dot_general, **kwargs)
        scale, history = self.output_grad_scale.value, self.output_grad_amax_history.value
        return fp8_ops.out_qdq(self.dtype, self.e5m2_dtype, out, scale, history)


class _InDtype(nn.Module):
    """An einsum with amax histories, computed in a dtype."""

    dtype: Any
    op: Callable[..., Any]

    @nn.compact
    def __call__(self, subscripts: str, lhs: Any, rhs: Any, **kwargs: Any) -> Any:
        # The right operand is the weight; Flax takes the dtype of the computation from it.
        lhs, rhs = (x.astype(self.dtype) for x in (lhs, rhs))
        return self.op(name="fp8_einsum")(subscripts, lhs, rhs, **kwargs)
