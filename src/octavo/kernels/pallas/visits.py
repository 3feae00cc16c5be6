"""Which blocks of rows a grouped kernel goes to, and for which group: computed outside of it, as it steers its loads.

Rows lie sorted by group and are cut into blocks of one size. A block that holds rows of several groups is visited once
for each of them, and each visit counts the rows of its own group only.
"""

from typing import NamedTuple

import jax.numpy as jnp

from octavo._typing import Array, Shaped


class Visits(NamedTuple):
    """The group and the block of rows of every visit; where each group begins and ends; how many visits are real."""

    group: Shaped[Array, " v"]
    block: Shaped[Array, " v"]
    bounds: Shaped[Array, " b"]
    count: Shaped[Array, ""]


def to_blocks(sizes: Shaped[Array, " g"], rows: int, size: int) -> Visits:
    """Every block at least once, block by block; rows of no group make one more group, whose number is g.

    >>> visits = to_blocks(jnp.asarray([3, 0, 2]), rows=8, size=4)
    >>> n = int(visits.count)
    >>> visits.block[:n].tolist(), visits.group[:n].tolist()
    ([0, 0, 1, 1], [0, 2, 2, 3])
    """
    ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), rows)
    ends = jnp.concatenate([ends, jnp.full((1,), rows, jnp.int32)])
    return _visits(ends, rows, size, empty=0)


def to_groups(sizes: Shaped[Array, " g"], rows: int, size: int) -> Visits:
    """Every group at least once, group by group; rows of no group never.

    >>> visits = to_groups(jnp.asarray([3, 0, 2]), rows=8, size=4)
    >>> n = int(visits.count)
    >>> visits.block[:n].tolist(), visits.group[:n].tolist()
    ([0, 0, 0, 1], [0, 1, 2, 2])
    """
    return _visits(jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), rows), rows, size, empty=1)


def at_most(groups: int, rows: int, size: int) -> int:
    """A bound on the visits: each group but the first may begin inside of a block."""
    return -(-rows // size) + groups


def _visits(ends: Array, rows: int, size: int, *, empty: int) -> Visits:
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    blocks = -(-rows // size)
    first = jnp.minimum(starts // size, blocks - 1)
    counts = jnp.where(ends > starts, (ends + (size - 1)) // size - starts // size, empty)
    last = jnp.cumsum(counts)
    number = jnp.arange(at_most(ends.shape[0], rows, size), dtype=jnp.int32)
    group = jnp.sum((number[:, None] >= last[None, :]).astype(jnp.int32), axis=1)
    group = jnp.minimum(group, ends.shape[0] - 1)
    block = jnp.minimum(first[group] + number - (last - counts)[group], blocks - 1)
    return Visits(group, block, jnp.concatenate([starts[:1], ends]), last[-1])
