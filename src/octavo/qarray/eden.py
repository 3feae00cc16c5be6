"""The scales of MS-EDEN, which make a quantized and rotated tensor unbiased.

Panferov et al., Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient Estimation,
arXiv:2601.22813. All scales of a block of rotated values z, whose quantized values are q, are multiplied by

    c = sum(z * z) / sum(z * q)

and rounded stochastically. Over random rotations, the expected value of c q is z. The authors' kernel sums in units of
each tile's scale; in units of the values, as here, the inner product of c q and z is exact.
"""

import jax.numpy as jnp

from octavo._typing import Array, PRNGKeyArray
from octavo.numerics import BlockFormat, Eden, Format, Stochastic, get_format
from octavo.qarray.qarray import Tiles


def correct_scale(
    rounding: Eden,
    key: PRNGKeyArray | None,
    x: Array,
    codes: Array,
    fmt: Format,
    scale: Array,
    divisor: Array,
    tiles: Tiles,
) -> Array:
    """The corrected and stochastically rounded scales of nearest codes; arrays are in the split form of `tiles`."""
    scaled = x * (1 / jnp.where(divisor == 0, 1, divisor))
    total = jnp.sum(scaled * scaled, axis=tiles.axes, keepdims=True)
    inner = jnp.sum(scaled * fmt.decode(codes), axis=tiles.axes, keepdims=True)
    return scale_by_sums(rounding, key, total, inner, fmt, scale, tiles)


def scale_by_sums(
    rounding: Eden, key: PRNGKeyArray | None, total: Array, inner: Array, fmt: Format, scale: Array, tiles: Tiles
) -> Array:
    """The same from the sums of z * z and z * q of each tile, in units of its scale."""
    assert isinstance(fmt, BlockFormat)
    square = scale * scale
    total, inner = tiles.merge(total * square), tiles.merge(inner * square)
    for axis, (size, count) in enumerate(zip(tiles.sizes, tiles.counts, strict=True)):
        if size > 1:
            total, inner = (_sum_groups(a, axis, min(rounding.block // size, count)) for a in (total, inner))
    ratio = jnp.where(inner > 0, total / jnp.where(inner > 0, inner, 1), 1)
    corrected = scale * tiles.split_scale(ratio)
    noise = Stochastic().noise(key, corrected.shape)
    return get_format(fmt.scale_dtype).round(corrected.astype(jnp.float32), noise).astype(scale.dtype)


def _sum_groups(x: Array, axis: int, size: int) -> Array:
    """Sums over groups of neighbours along an axis, each in the place of every member."""
    if size <= 1:
        return x
    if x.shape[axis] % size:
        raise ValueError(
            f"MS-EDEN corrects {size} scales together, which {x.shape[axis]} scales are not a multiple of: choose "
            "rounding='eden,N' with the block N of the rotation"
        )
    groups = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.broadcast_to(jnp.sum(groups, axis=axis + 1, keepdims=True), groups.shape).reshape(x.shape)
