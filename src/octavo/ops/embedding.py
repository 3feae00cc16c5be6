"""Embedding lookup in a low-precision table."""

import jax.numpy as jnp

from octavo._typing import Array, Float, PRNGKeyArray, Shaped
from octavo.numerics import BlockFormat, FormatLike
from octavo.qarray import QArray, Quantizer, fake_quant


def embedding_lookup(
    table: Float[Array, "..."] | QArray,
    ids: Shaped[Array, "..."],
    *,
    quantizer: Quantizer | FormatLike | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "..."]:
    """Look up rows of an embedding table.

    The codes and scales of a QArray are gathered, and only the gathered rows are dequantized. A float table is
    fake-quantized: after the gather if each row has its own scales (`channelwise_axes=(0,)`) and rounding is to
    nearest, otherwise before it. The gradient is a scatter-add to the rows that were looked up, straight-through.

    Indices are as in `jnp.take(table, ids, axis=0, mode="fill")`: negative ones count from the end, and out-of-bounds
    ones give NaN and have no gradient.

    Args:
      table: the table [rows, ...].
      ids: integer row indices.
      quantizer: the quantizer of a float table; None leaves it in float.
      key: for stochastic rounding.

    Returns:
      The rows, of shape `ids.shape + table.shape[1:]`.

    >>> import octavo
    >>> table = octavo.quantize(jnp.asarray([[1.0, 2.0], [30.0, 40.0]]), "int8", channelwise_axes=(0,))
    >>> embedding_lookup(table, jnp.asarray([1, 5])).round(1).tolist()
    [[30.1..., 39.79...], [nan, nan]]
    """
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"rows are looked up by integers, got ids of dtype {ids.dtype}")
    if table.ndim == 0:
        raise ValueError("a table has rows: its rank is at least 1, got a scalar")
    if isinstance(table, QArray):
        if quantizer is not None:
            raise TypeError("the table is quantized already: leave the quantizer out, or dequantize the table first")
        return _rows_of_codes(table, ids)
    if quantizer is None:
        return _take(table, ids)
    quantizer = quantizer if isinstance(quantizer, Quantizer) else Quantizer(quantizer)
    if not _by_row(quantizer, table.shape, ids.size):
        return _take(fake_quant(table, quantizer, key=key), ids)
    rows = fake_quant(_take(table, ids.reshape(-1)), quantizer, key=key)
    return rows.reshape(*ids.shape, *table.shape[1:])


def _take(table: Array, ids: Array) -> Array:
    return jnp.take(table, ids, axis=0, mode="fill")


def _rows_of_codes(table: QArray, ids: Array) -> Array:
    size = table.shape[0]
    valid = (ids >= -size) & (ids < size)
    rows = table[jnp.where(valid, ids, 0)].dequantize()
    valid = valid.reshape(*ids.shape, *(1,) * (table.ndim - 1))
    return jnp.where(valid, rows, jnp.asarray(jnp.nan, rows.dtype))


def _by_row(quantizer: Quantizer, table: tuple[int, ...], count: int) -> bool:
    """Whether quantizing the table and quantizing the `count` gathered rows give the same values."""
    outer = isinstance(quantizer.qtype, BlockFormat) and quantizer.qtype.outer
    if outer or quantizer.rounding.stochastic:
        return False
    # At least two rows, because a single row always is one tile.
    return all(quantizer.tiles((max(2, rows), *table[1:])).sizes[0] == 1 for rows in (table[0], count))
