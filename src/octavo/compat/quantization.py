"""Quantization objects for Flax Linen layers: each gives the operations that a layer takes instead of JAX's own.

All of them hold a config or rules; only Flax's own float8 operations, which keep amax histories themselves, do not.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from octavo.frameworks.linen_ops import ConvGeneralDilated, DotGeneral, Einsum
from octavo.rules import recipe

MODES = ("train", "calibrate", "convert", "serve")


def get_quant_mode(mode: str = "train") -> str:
    """A mode by its name.

    >>> get_quant_mode("serve")
    'serve'
    """
    if mode not in MODES:
        raise ValueError(f"a mode is one of {', '.join(MODES)}; got {mode!r}")
    return mode


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A config (or rules by the path of the layer) as operations for Flax Linen layers.

    `mesh_axes` are accepted where MaxText passes them: scales take their sharding from the parameter's own when it is
    converted, so they are not needed. `static` remembers the range of activations, which mode "calibrate" collects.
    """

    how: Any = None
    quant_mode: str = "train"
    static: bool = False
    replicate_scale: bool = False

    def __post_init__(self):
        object.__setattr__(self, "quant_mode", get_quant_mode(self.quant_mode))

    def dot_general_cls(self, mesh_axes: Sequence[str] = ()) -> Callable[..., Any]:
        """What `nn.Dense` and its like take as `dot_general_cls`."""
        del mesh_axes
        return functools.partial(DotGeneral, self.how, static=self.static)

    def einsum(self, mesh_axes: Sequence[str] = ()) -> Any:
        """A module that is called as `jnp.einsum` is."""
        del mesh_axes
        return Einsum(self.how, static=self.static)

    def conv_general_dilated_cls(self, mesh_axes: Sequence[str] = ()) -> Callable[..., Any]:
        """What `nn.Conv` takes as `conv_general_dilated_cls`."""
        del mesh_axes
        return functools.partial(ConvGeneralDilated, self.how, static=self.static)


class AqtQuantization(Quantization):
    """AQT's numerics: `how` is a config that `octavo.ops.aqt` makes, or the rules of a mixed-precision table."""


@dataclasses.dataclass(frozen=True)
class Fp8Quantization(Quantization):
    """Delayed scaling by Flax's own operations, for NVIDIA's float8 formats."""

    def dot_general_cls(self, mesh_axes: Sequence[str] = ()) -> Callable[..., Any]:
        del mesh_axes
        return nn.Fp8DirectDotGeneralOp

    def einsum(self, mesh_axes: Sequence[str] = (), dtype: Any = jnp.float32) -> Any:
        del mesh_axes
        return _Fp8Einsum(dtype)


@dataclasses.dataclass(frozen=True)
class NANOOFp8Quantization(Quantization):
    """Delayed scaling for the fnuz formats of AMD's MI300: Flax's own operation, and an einsum, which Flax has not."""

    def dot_general_cls(self, mesh_axes: Sequence[str] = ()) -> Callable[..., Any]:
        del mesh_axes
        return nn.NANOOFp8DotGeneralOp

    def einsum(self, mesh_axes: Sequence[str] = (), dtype: Any = jnp.float32) -> Any:
        del mesh_axes
        return _Fp8Einsum(dtype, functools.partial(Einsum, recipe("nanoo_fp8", exclude=None)))


class _Fp8Einsum(nn.Module):
    dtype: Any
    op: Callable[..., Any] = nn.Fp8Einsum

    @nn.compact
    def __call__(self, subscripts: str, lhs: Any, rhs: Any, **kwargs: Any) -> Any:
        # The right operand is the weight; Flax takes the dtype of the computation from it.
        lhs, rhs = (x.astype(self.dtype) for x in (lhs, rhs))
        return self.op(name="fp8_einsum")(subscripts, lhs, rhs, **kwargs)
