"""Names of `qwix.pallas`: QArrays in Pallas kernels. Its matmuls are for inside of kernels only.

>>> import octavo.compat.qwix.pallas as qpl
>>> qpl.get_current_rule("gmm") is None
True
"""

from typing import Any

import jax

from octavo.kernels.pallas import dot_general, pallas_call
from octavo.ops import pairwise
from octavo.qarray import QArray, dequantize, quantize
from octavo.transform import get_current_rule

__all__ = ["QArray", "dequantize", "dot", "dot_general", "einsum", "get_current_rule", "pallas_call", "quantize"]


def dot(a: Any, b: Any, precision: Any = None, preferred_element_type: Any = None, out_sharding: Any = None) -> Any:
    """`jax.numpy.dot` of arrays and QArrays: the last axis of `a` with the last but one of `b`."""
    numbers = (((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ()))
    options = {"precision": precision, "out_sharding": out_sharding}
    return dot_general(a, b, numbers, preferred_element_type, **options)


def einsum(*args: Any, preferred_element_type: Any = None, **kwargs: Any) -> jax.Array:
    """`jax.numpy.einsum` of arrays and QArrays."""

    def product(lhs: Any, rhs: Any, numbers: Any, *, step: int = 0, **options: Any) -> jax.Array:
        del step
        return dot_general(lhs, rhs, numbers, **options)

    subscripts, *operands = (x[...] if isinstance(x, QArray) else x for x in args)
    return pairwise(product, subscripts, *operands, preferred_element_type=preferred_element_type, **kwargs)
