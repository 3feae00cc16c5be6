"""Array annotations from jaxtyping, which is optional: without it they read as plain `Any`."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Num, PRNGKeyArray, Shaped, UInt8
else:
    try:
        from jaxtyping import Array, Bool, Float, Num, PRNGKeyArray, Shaped, UInt8
    except ModuleNotFoundError:

        class _Anything:
            def __class_getitem__(cls, _):
                return Any

        Array = jax.Array
        PRNGKeyArray = Any
        Bool = Float = Num = Shaped = UInt8 = _Anything

type Shape = tuple[Any, ...]
"""The shape of an array: integers, or symbolic sizes (`jax.export.symbolic_shape`)."""

type DTypeLike = str | type | np.dtype | jax.typing.DTypeLike

__all__ = ["Array", "Bool", "DTypeLike", "Float", "Num", "PRNGKeyArray", "Shape", "Shaped", "UInt8"]
