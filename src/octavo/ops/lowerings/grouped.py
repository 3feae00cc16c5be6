"""Ragged dots of arrays: rows sorted by group with one matrix per group, and the transpose, in every lowering.

With group sizes `s`, the s[i] rows from s[0] + ... + s[i-1] on belong to group i, and rows beyond the last group to
none. Two operations suffice, as each is the gradient of the other:

* rows x groups: [m, k] x [g, k, n] -> [m, n], each row times the matrix of its group; rows of no group give zero;
* rows x rows: [m, k] x [m, n] -> [g, k, n], for each group the matmul over its rows; empty groups give zero.

"plain" is `lax.ragged_dot_general`, which XLA lowers on CPUs to a dense matmul with every group. "rows" loops over
blocks of rows and multiplies each by the matrix of its own group only. "auto" is tokamax's kernel on TPUs and GPUs
where it is installed, "rows" on CPUs, and "plain" elsewhere.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from octavo._typing import Array
from octavo.ops.lowerings import check_name, tokamax
from octavo.ops.lowerings.xla import integer_dot
from octavo.ops.operands import Dims, MatmulOptions, wider

ITERATIONS = "octavo.iterations."
_ROWS_BY_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


class Rows(NamedTuple):
    """The group of each of `count` rows.

    `sizes` are the group sizes, [g], or with `sharding` [shards, groups of a device]: each shard is sorted separately.
    """

    count: int
    sizes: Array
    sharding: Any = None
    """An `octavo.distributed.ExpertSharding`."""

    @property
    def ends(self) -> Array:
        return jnp.cumsum(self.sizes.astype(jnp.int32), axis=-1)

    @property
    def group(self) -> Array:
        """The group of each row; the last group for rows of none."""
        return _bucket(self.count, self.ends)

    @property
    def owned(self) -> Array:
        """Whether each row belongs to a group, [rows, 1]."""
        ends = self.ends.reshape(-1, self.sizes.shape[-1])[:, -1:]
        place = jnp.arange(self.count // len(ends), dtype=jnp.int32)[None]
        return (place < ends).reshape(self.count, 1)

    def pick(self, part: Array) -> Array:
        """Gather the entry of each row's group: [groups, n] -> [rows, n]."""
        if self.sharding is None:
            return part[self.group]
        count = self.count // self.sharding.num_shards
        return self.sharding.pick(part, self.sizes, lambda sizes: Rows(count, sizes).group)

    def keep(self, x: Array) -> Array:
        """Set rows of no group to zero, even if they are NaN."""
        return jnp.where(self.owned, x, jnp.zeros_like(x))

    def blocks(self, size: int) -> "Blocks":
        """Blocks of `size` rows for each group; the last block of a group may extend into the next group."""
        sizes, ends = self.sizes.astype(jnp.int32), self.ends
        counts = -(-sizes // size)
        last = jnp.cumsum(counts)
        at_most = self.count // size + self.sizes.shape[0]
        group = _bucket(at_most, last)
        start = (ends - sizes)[group] + (jnp.arange(at_most, dtype=jnp.int32) - (last - counts)[group]) * size
        return Blocks(size, group, start, ends[group], last[-1])


class Blocks(NamedTuple):
    """Blocks of rows: each one's group, first row and end of its group; only the first `count` are valid."""

    size: int
    group: Array
    start: Array
    end: Array
    count: Array


def _bucket(count: int, ends: Array) -> Array:
    place = jnp.sum((jnp.arange(count, dtype=jnp.int32)[:, None] >= ends[None, :]).astype(jnp.int32), axis=1)
    return jnp.minimum(place, ends.shape[0] - 1)


def group_absmax(x: Array, rows: Rows) -> Array:
    """The absmax of each column of each group: [m, n] -> [g, n]."""
    if rows.sharding is not None:
        return rows.sharding.absmax(lambda x, sizes: group_absmax(x, Rows(x.shape[0], sizes)), x, rows.sizes)
    if not rows.count:
        return jnp.zeros((rows.sizes.shape[0], x.shape[1]), x.dtype)
    blocks = rows.blocks(64)
    index = blocks.start[:, None] + jnp.arange(blocks.size, dtype=jnp.int32)[None, :]
    real = (jnp.arange(len(blocks.group), dtype=jnp.int32) < blocks.count)[:, None] & (index < blocks.end[:, None])
    picked = jnp.abs(x)[jnp.minimum(index, rows.count - 1)]
    most = jnp.max(jnp.where(real[:, :, None], picked, jnp.zeros_like(picked)), axis=1)
    # Only one row per block is left, so the scatter, slow on CPUs and TPUs, is small.
    return jnp.zeros((rows.sizes.shape[0], x.shape[1]), x.dtype).at[blocks.group].max(most)


def rows_by_groups(lhs: Array, rhs: Array, rows: Rows, options: MatmulOptions, *, contract: int) -> Array:
    """[m, k] x [g, k, n] -> [m, n], or with `contract` 2 of [g, n, k]: int8 to int32, floats to float32.

    The result is undefined for rows of no group.
    """
    if lhs.dtype == jnp.int8:
        return _rows_by_groups(lhs, rhs, rows.sizes, contract, options)
    return _float_dot(contract, options, *_alike(lhs, rhs), rows.sizes)


def rows_by_rows(lhs: Array, rhs: Array, rows: Rows, options: MatmulOptions) -> Array:
    """[m, k] x [m, n] -> [g, k, n]: int8 to int32, floats to float32."""
    if lhs.dtype == jnp.int8:
        return _rows_by_rows(lhs, rhs, rows.sizes, options)
    return _float_dot(None, options, *_alike(lhs, rhs), rows.sizes)


def _alike(lhs: Array, rhs: Array) -> tuple[Array, Array]:
    if lhs.dtype == rhs.dtype or lhs.dtype.itemsize == rhs.dtype.itemsize == 1:
        return lhs, rhs
    common = wider(lhs.dtype, rhs.dtype)
    return lhs.astype(common), rhs.astype(common)


def _rows_by_groups(lhs: Array, rhs: Array, sizes: Array, contract: int, options: MatmulOptions) -> Array:
    numbers = lax.RaggedDotDimensionNumbers((((1,), (contract,)), ((), ())), (0,), (0,))

    # In jax 0.12, vmap of a ragged dot requires every operand to be batched along its first axis.
    @jax.custom_batching.sequential_vmap
    def plain(lhs: Array, rhs: Array, sizes: Array) -> Array:
        return lax.ragged_dot_general(
            lhs, rhs, sizes, numbers, precision=options.precision, preferred_element_type=_accumulator(lhs)
        )

    blocks = functools.partial(_blocks_by_groups, contract=contract, precision=options.precision)
    return _choose(options, plain, blocks, lhs, rhs, sizes, numbers)


def _rows_by_rows(lhs: Array, rhs: Array, sizes: Array, options: MatmulOptions) -> Array:
    @jax.custom_batching.sequential_vmap
    def plain(lhs: Array, rhs: Array, sizes: Array) -> Array:
        # Rows of no group may hold anything; do not rely on kernels to ignore them.
        rows = Rows(lhs.shape[0], sizes)
        kinds = {"precision": options.precision, "preferred_element_type": _accumulator(lhs)}
        return lax.ragged_dot_general(rows.keep(lhs), rows.keep(rhs), sizes, _ROWS_BY_ROWS, **kinds)

    blocks = functools.partial(_blocks_by_blocks, precision=options.precision)
    return _choose(options, plain, blocks, lhs, rhs, sizes, _ROWS_BY_ROWS)


def _accumulator(x: Array) -> Any:
    return jnp.int32 if x.dtype == jnp.int8 else jnp.float32


def _choose(
    options: MatmulOptions, plain: Any, blocks: Any, lhs: Array, rhs: Array, sizes: Array, numbers: Any
) -> Array:
    name = options.lowering
    if name in ("plain", "rows"):
        return (plain if name == "plain" else blocks)(lhs, rhs, sizes)
    check_name(name)
    if name == "kernel":
        raise ValueError(f"lowering={name!r}: ragged products have no kernel; lowering='auto' takes another way")
    reason = tokamax.unsupported(lhs, rhs)
    if name == "tokamax" and reason is not None:
        raise ValueError(f"lowering='tokamax': {reason}; lowering='auto' takes another way where it must")
    if reason is None:
        kinds = {"precision": options.precision, "dtype": _accumulator(lhs)}
        kernel = functools.partial(tokamax.ragged_dot, numbers=numbers, **kinds)
        return lax.platform_dependent(lhs, rhs, sizes, cpu=blocks, tpu=kernel, cuda=kernel, default=plain)
    return lax.platform_dependent(lhs, rhs, sizes, cpu=blocks, default=plain)


def _blocks_by_groups(lhs: Array, rhs: Array, sizes: Array, *, contract: int, precision: Any) -> Array:
    rows = Rows(lhs.shape[0], sizes)
    blocks = rows.blocks(_block_size(rows))
    lhs = jnp.pad(lhs, ((0, blocks.size), (0, 0)))

    def step(i: Array, out: Array) -> Array:
        # The extra rows of a block belong to later groups, whose blocks overwrite them.
        mine = lax.dynamic_slice_in_dim(lhs, blocks.start[i], blocks.size)
        matrix = lax.dynamic_index_in_dim(rhs, blocks.group[i], keepdims=False)
        product = _block_dot(mine, matrix, Dims(2, 2, (1,), (contract - 1,)), precision)
        return lax.dynamic_update_slice_in_dim(out, product, blocks.start[i], axis=0)

    out = _zeros((lhs.shape[0], rhs.shape[3 - contract]), lhs, rhs, sizes)
    with jax.named_scope(iterations(rows.count, blocks.size)):
        return lax.fori_loop(0, blocks.count, step, out)[: rows.count]


def _blocks_by_blocks(lhs: Array, rhs: Array, sizes: Array, *, precision: Any) -> Array:
    rows = Rows(lhs.shape[0], sizes)
    blocks = rows.blocks(_block_size(rows))
    lhs, rhs = (jnp.pad(x, ((0, blocks.size), (0, 0))) for x in (lhs, rhs))

    def step(i: Array, out: Array) -> Array:
        own = (blocks.start[i] + jnp.arange(blocks.size, dtype=jnp.int32) < blocks.end[i])[:, None]
        left, right = (lax.dynamic_slice_in_dim(x, blocks.start[i], blocks.size) for x in (lhs, rhs))
        left, right = (jnp.where(own, x, jnp.zeros_like(x)) for x in (left, right))
        product = _block_dot(left, right, Dims(2, 2, (0,), (0,)), precision)
        before = lax.dynamic_index_in_dim(out, blocks.group[i], keepdims=False)
        return lax.dynamic_update_index_in_dim(out, before + product, blocks.group[i], axis=0)

    out = _zeros((sizes.shape[0], lhs.shape[1], rhs.shape[1]), lhs, rhs, sizes)
    with jax.named_scope(iterations(rows.count, blocks.size)):
        return lax.fori_loop(0, blocks.count, step, out)


def iterations(rows: int, block: int) -> str:
    """The named scope with the iteration count of a loop over blocks if every row has a group and all blocks are full.

    The actual trip count depends on the group sizes; FLOP counts use this one.

    >>> iterations(1000, 128)
    'octavo.iterations.8'
    """
    return f"{ITERATIONS}{-(-rows // block)}"


def _block_size(rows: Rows) -> int:
    """About the mean group size: larger blocks waste rows, smaller ones give too many small dots. At most 128."""
    mean = -(-rows.count // rows.sizes.shape[0])
    return min(128, max(8, 1 << (mean - 1).bit_length()))


def _block_dot(lhs: Array, rhs: Array, dims: Dims, precision: Any) -> Array:
    if lhs.dtype == jnp.int8:
        return integer_dot(lhs, rhs, dims, lowering="rows")
    lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    return lax.dot_general(lhs, rhs, dims.numbers, precision=precision)


def _zeros(shape: tuple[int, ...], *like: Array) -> Array:
    """A zero accumulator: under shard_map, varying over every axis over which an operand varies."""
    zeros = jnp.zeros(shape, _accumulator(like[0]))
    varying = frozenset().union(*(jax.typeof(x).mat.varying for x in like))
    return lax.pcast(zeros, tuple(varying), to="varying") if varying else zeros


# A while loop has no reverse-mode derivative, but each operation is linear in either operand.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _float_dot(contract: int | None, options: MatmulOptions, lhs: Array, rhs: Array, sizes: Array) -> Array:
    """`rows_by_groups` of floats, or without `contract` their `rows_by_rows`."""
    if contract is None:
        return _rows_by_rows(lhs, rhs, sizes, options)
    return _rows_by_groups(lhs, rhs, sizes, contract, options)


def _float_dot_fwd(contract: int | None, options: MatmulOptions, lhs: Array, rhs: Array, sizes: Array):
    return _float_dot(contract, options, lhs, rhs, sizes), (lhs, rhs, sizes)


def _float_dot_bwd(contract: int | None, options: MatmulOptions, saved: Any, g: Array):
    lhs, rhs, sizes = saved
    rows = Rows(lhs.shape[0], sizes)
    if contract is None:
        dlhs = rows_by_groups(rhs, g, rows, options, contract=2)
        drhs = rows.keep(rows_by_groups(lhs, g, rows, options, contract=1))
    else:
        dlhs = rows_by_groups(g, rhs, rows, options, contract=3 - contract)
        drhs = rows_by_rows(*((lhs, g) if contract == 1 else (g, lhs)), rows, options)
    return rows.keep(dlhs).astype(lhs.dtype), drhs.astype(rhs.dtype), None


_float_dot.defvjp(_float_dot_fwd, _float_dot_bwd)
