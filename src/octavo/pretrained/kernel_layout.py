"""Codes in the layout that the CPU kernels read."""

import numpy as np

from octavo.numerics import IntFormat, get_format
from octavo.ops.operands import element
from octavo.qarray import QArray


def packed_for_kernels(q: QArray) -> QArray:
    """The same values of an [out, in] matrix: 4-bit codes packed along the last axis, other small integers as int8, and
    scales in float16 if they are numbers of it.

    The arrays are NumPy's. Packing here takes less time than a program of XLA, which is compiled for each shape.

    >>> import jax.numpy as jnp, octavo
    >>> q = octavo.quantize(jnp.ones((2, 4)), "int4", channelwise_axes=(0,))
    >>> packed_for_kernels(q).qvalue.tolist()
    [[119, 119], [119, 119]]
    """
    q = _with_short_scales(q._map(np.asarray))
    fmt = element(q)
    if q.packed is not None or q.ndim != 2 or not isinstance(fmt, IntFormat):
        return q
    if fmt.bits == 4 and q.shape[1] % 2 == 0:
        codes = q.qvalue.astype(np.int8).view(np.uint8)
        low, high = codes[:, 0::2] & np.uint8(15), codes[:, 1::2] << np.uint8(4)
        return q._replace(qvalue=low | high, packed=(-1, q.shape[1]))
    is_plain = fmt.signed and fmt.has_zero and fmt.unit == 1.0 and fmt == q.qtype and q.zero_point is None
    if is_plain and fmt.bits in (2, 3, 5, 6, 7):
        return q._replace(qvalue=q.qvalue.astype(np.int8), qtype=get_format("int8"))
    return q


def _with_short_scales(q: QArray) -> QArray:
    if q.zero_point is not None or q.outer_scale is not None or q.scale.dtype != np.float32:
        return q
    with np.errstate(over="ignore"):
        short = q.scale.astype(np.float16)
    return q._replace(scale=short) if np.array_equal(short.astype(np.float32), q.scale, equal_nan=True) else q
