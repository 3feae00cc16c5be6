"""The matmul of codes with scales. Qwix has a Pallas kernel for TPUs; here XLA or the platform computes it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from octavo.ops import dot_general
from octavo.qarray import QArray


@dataclasses.dataclass
class QuantizedMatmulConfig:
    """The blocks of Qwix's kernel; accepted, and not needed."""

    bm: int = 256
    bk: int = 512
    bn: int = 1024
    dtype: Any = jnp.float32


def can_use_qmm(x: jax.Array, sx: jax.Array, y: jax.Array, sy: jax.Array, *, bm: int, bk: int, bn: int) -> bool:
    """Whether `quantized_matmul` takes these operands: scales of rank two that tile them, blocks that divide them."""
    if sx.ndim != 2 or sy.ndim != 2 or x.shape[0] % bm or x.shape[1] % bk or y.shape[1] % bn:
        return False
    pairs = zip((*x.shape, *y.shape), (*sx.shape, *sy.shape), strict=True)
    return sx.shape[1] == sy.shape[0] and not any(size % count for size, count in pairs)


def can_use_qmm_in_dot_general(lhs: Any, rhs: Any, dimension_numbers: Any, *, config: QuantizedMatmulConfig) -> bool:
    """Whether `quantized_matmul` computes a dot of these operands."""
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        return False
    if lhs.zero_point is not None or rhs.zero_point is not None:
        return False
    (contract, batch) = dimension_numbers
    plain = tuple(map(tuple, contract)) == ((1,), (0,)) and not any(map(len, batch))
    blocks = {"bm": config.bm, "bk": config.bk, "bn": config.bn}
    return plain and can_use_qmm(lhs.qvalue, lhs.scale, rhs.qvalue, rhs.scale, **blocks)


def quantized_matmul_kernel(*refs: Any, **blocks: Any) -> None:
    """Not offered: the body of Qwix's kernel for TPUs."""
    raise NotImplementedError(
        "quantized_matmul_kernel is the body of a TPU kernel of Qwix's: call quantized_matmul, or write a kernel with "
        "octavo.compat.qwix.pallas"
    )


def quantized_matmul(
    x: jax.Array,
    sx: jax.Array,
    y: jax.Array,
    sy: jax.Array,
    *,
    bm: int,
    bk: int,
    bn: int,
    max_sublock_size_m: int = 128,
    max_sublock_size_n: int = 128,
    max_sublock_size_k: int = 128,
    accum_dtype: Any = jnp.float32,
    dtype: Any,
) -> jax.Array:
    """The matmul of codes x with scales sx and codes y with scales sy, all of rank two; blocks are not needed.

    >>> x, y = jnp.ones((2, 4), jnp.int8), jnp.ones((4, 2), jnp.int8)
    >>> scale = jnp.full((1, 1), 0.5)
    >>> quantized_matmul(x, scale, y, scale, bm=2, bk=4, bn=2, dtype=jnp.float32)[0].tolist()
    [1.0, 1.0]
    """
    del bm, bk, bn, max_sublock_size_m, max_sublock_size_n, max_sublock_size_k, accum_dtype
    return dot_general(QArray(x, sx), QArray(y, sy), (((1,), (0,)), ((), ()))).astype(dtype)
