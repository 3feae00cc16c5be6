"""Serving of weights that were multiplied by a factor for each input: the inputs are divided by it."""

from typing import Any

import jax.numpy as jnp

from octavo._typing import Array
from octavo.transform import PtqProvider
from octavo.transform.frame import Key
from octavo.transform.site import operand_axes


class InputScaleProvider(PtqProvider):
    """A `PtqProvider` whose inputs are scaled by an array that is stored with the weight, as `<weight>_<suffix>`.

    The scaled inputs are quantized, where the rule has a type for them, and multiplied by the codes of the weight.
    """

    creates_state = True
    suffix: str
    divides: bool
    """Whether inputs are divided by the array, rather than multiplied."""

    def dot_general(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any) -> Array:
        lhs, rhs = self._scaled(lhs, rhs)
        return super().dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)

    def einsum(self, subscripts: str, lhs: Any, rhs: Any, **kwargs: Any) -> Array:
        lhs, rhs = self._scaled(lhs, rhs)
        return super().einsum(subscripts, lhs, rhs, **kwargs)

    def _scaled(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        site, frame = self.operation
        axes = operand_axes(site.params, lhs.shape, rhs.shape)
        if site.leaf is None or len(axes[0]["contracting"]) != 1 or axes[0]["batch"]:
            return lhs, rhs
        side = 0 if site.weights[1] else 1
        x, (axis,) = (lhs, rhs)[side], axes[side]["contracting"]
        path, _, name = site.leaf.rpartition("/")
        factor = frame.read(Key("params", path, f"{name}_{self.suffix}"), lambda: jnp.ones(x.shape[axis], x.dtype))
        factor = factor.reshape([-1 if a == axis else 1 for a in range(x.ndim)]).astype(x.dtype)
        x = x / factor if self.divides else x * factor
        return (lhs, x) if side else (x, rhs)
