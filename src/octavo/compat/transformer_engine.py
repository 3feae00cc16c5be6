"""Transformer Engine's own matmuls for layers that operations are injected into, where it is installed and a GPU is."""

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
"""The class of Transformer Engine for each of the recipes that are named after it, and its arguments."""


@dataclasses.dataclass(frozen=True)
class TransformerEngineQuantization(Quantization):
    """Transformer Engine's matmul for the recipe `name`; products that it does not take run in Octavo's own way.

    It takes a product without batch axes: einsums, which experts and attention are, and convolutions are Octavo's.
    """

    name: str = ""

    def dot_general_cls(self, mesh_axes: Sequence[str] = ()) -> Callable[..., Any]:
        own = super().dot_general_cls(mesh_axes)
        kind, arguments = RECIPES[self.name]
        recipe = getattr(importlib.import_module("transformer_engine.common.recipe"), kind)(**arguments)
        flax = importlib.import_module("transformer_engine.jax.flax")
        return functools.partial(_DotGeneral, flax.make_dot_general_cls(recipe), own)


class _DotGeneral(nn.Module):
    """Transformer Engine's operation, or the other one for a product with batch axes."""

    theirs: Callable[..., Any]
    own: Callable[..., Any]

    @nn.compact
    def __call__(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any) -> Any:
        _, (batch, _) = dimension_numbers
        op = self.own() if batch else self.theirs()
        return op(lhs, rhs, dimension_numbers, *args, **kwargs)


def is_usable() -> bool:
    """Whether Transformer Engine can be used: it is installed for JAX, and the devices are NVIDIA's.

    >>> is_usable()
    False
    """
    if jax.default_backend() != "gpu" or importlib.util.find_spec("transformer_engine") is None:
        return False
    return importlib.util.find_spec("transformer_engine.jax") is not None
