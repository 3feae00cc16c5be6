"""Quantization objects for Flax Linen layers: each has the operations that a layer takes instead of JAX's own.

All of them hold a config or rules; only Flax's own float8 operations, which keep amax histories themselves, do not.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp

from octavo.frameworks.linen_ops import ConvGeneralDilated, DotGeneral, Einsum
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
      static: Whether activations have static ranges, which mode "calibrate" collects.
      replicate_scale: Whether stored scales are replicated on all devices.
    """

    config: Any = None
    quant_mode: str = "train"
    static: bool = False
    replicate_scale: bool = False

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


class AqtQuantization(Quantization):
    """AQT's numerics: `config` is one of `octavo.compat.aqt`, or the rules of a mixed-precision table."""


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

    def einsum(self, mesh_axes: Sequence[str] = (), dtype: Any = jnp.float32) -> Any:
        del mesh_axes
        return Fp8Einsum(dtype)


class NANOOFp8Quantization(_TrainingOnly):
    """Delayed scaling for the fnuz formats of AMD's MI300: Flax's own `dot_general`, and Octavo's einsum."""

    def dot_general_cls(self, mesh_axes: Sequence[str] = ()) -> Callable[..., Any]:
        del mesh_axes
        return nn.NANOOFp8DotGeneralOp

    def einsum(self, mesh_axes: Sequence[str] = (), dtype: Any = jnp.float32) -> Any:
        del mesh_axes
        return Fp8Einsum(dtype, functools.partial(Einsum, recipe("nanoo_fp8", exclude=None)))


class Fp8Einsum(nn.Module):
    """Flax's einsum with amax histories, computed in `dtype`."""

    dtype: Any = jnp.float32
    op: Callable[..., Any] = nn.Fp8Einsum

    @nn.compact
    def __call__(self, subscripts: str, lhs: Any, rhs: Any, **kwargs: Any) -> Any:
        # The right operand is the weight; Flax takes the dtype of the computation from it.
        lhs, rhs = (x.astype(self.dtype) for x in (lhs, rhs))
        return self.op(name="fp8_einsum")(subscripts, lhs, rhs, **kwargs)
