"""Transformer Engine's matmuls for Flax Linen layers, where it is installed and there is a GPU."""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax

from octavo.compat.quantization import Quantization

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "te_fp8_delayedscaling": ("DelayedScaling", {}),
    "te_fp8_currentscaling": ("Float8CurrentScaling", {}),
    "te_mxfp8": ("MXFP8BlockScaling", {}),
    "te_nvfp4": ("NVFP4BlockScaling", {}),
    "te_nvfp4_no_rht": ("NVFP4BlockScaling", {"disable_rht": True}),
}
"""Transformer Engine's class, and its arguments, for each recipe named after it."""


@dataclasses.dataclass(frozen=True)
class TransformerEngineQuantization(Quantization):
    """Transformer Engine's matmul for the recipe `name`.

    It takes matmuls without batch axes. Einsums, which experts and attention use, and convolutions are Octavo's.
    """

    name: str = ""

    def dot_general_cls(self, mesh_axes: Sequence[str] = ()) -> Callable[..., Any]:
        own = super().dot_general_cls(mesh_axes)
        kind, arguments = RECIPES[self.name]
        recipe = getattr(importlib.import_module("transformer_engine.common.recipe"), kind)(**arguments)
        flax = importlib.import_module("transformer_engine.jax.flax")
        return functools.partial(_DotGeneral, flax.make_dot_general_cls(recipe), own)


class _DotGeneral(nn.Module):
    """Transformer Engine's operation, or Octavo's for a matmul with batch axes."""

    theirs: Callable[..., Any]
    own: Callable[..., Any]

    @nn.compact
    def __call__(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any) -> Any:
        _, (batch, _) = dimension_numbers
        op = self.own() if batch else self.theirs()
        return op(lhs, rhs, dimension_numbers, *args, **kwargs)


def is_usable() -> bool:
    """Whether Transformer Engine is installed for JAX and the devices are GPUs.

    >>> is_usable()
    False
    """
    if jax.default_backend() != "gpu" or importlib.util.find_spec("transformer_engine") is None:
        return False
    return importlib.util.find_spec("transformer_engine.jax") is not None
