"""Pallas kernels that take QArrays: `pallas_call`, and a `dot_general` for inside of them.

Codes are blocked as the caller says, and their scales in step with them: an axis with one scale for all values keeps
it, and of an axis with several, each block of values has its own.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from octavo._typing import Array, DTypeLike
from octavo.qarray import QArray

_LANES, _SUBLANES = 128, 8
"""The last two axes of a block on TPUs are multiples of these, or those of the array."""


@jax.tree_util.register_pytree_with_keys_class
class QArrayRef(QArray):
    """The block of a QArray in a kernel: references to codes and scales. Indexing it reads them."""

    def __getitem__(self, index: Any) -> QArray:
        loaded = QArray.tree_unflatten(self.tree_flatten_with_keys()[1], [_load(x) for _, x in self._parts()])
        return loaded if index is Ellipsis else loaded[index]

    def _parts(self) -> list[tuple[Any, Any]]:
        return self.tree_flatten_with_keys()[0]

    def dequantize(self, dtype: DTypeLike | None = None) -> jax.Array:
        return self[...].dequantize(dtype)


def _load(x: Any) -> Any:
    return None if x is None else x[...]


def pallas_call(
    kernel: Callable[..., None],
    out_shape: Any,
    *,
    grid_spec: Any = None,
    grid: Any = (),
    in_specs: Any = pl.no_block_spec,
    out_specs: Any = pl.no_block_spec,
    scratch_shapes: Any = (),
    **kwargs: Any,
) -> Callable[..., Any]:
    """`pl.pallas_call` whose arguments may be QArrays; the spec of a QArray is that of its codes.

    Args:
        kernel: The kernel. For a QArray it gets a QArray of references, which `ref[...]` reads.
        out_shape: As for `pl.pallas_call`, like the following arguments.
        grid_spec: The grid and all specs together.
        grid: The grid.
        in_specs: The block of each argument.
        out_specs: The block of each result.
        scratch_shapes: Scratch memory.
        **kwargs: Other arguments of `pl.pallas_call`.

    Returns:
        A function of arrays and QArrays.

    >>> import octavo
    >>> def kernel(x, w, out):
    ...     out[...] = dot_general(x[...], w[...], (((1,), (0,)), ((), ())))
    >>> x, w = (octavo.quantize(jnp.ones(shape), "int8") for shape in ((4, 8), (8, 2)))
    >>> out = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    >>> bool(jnp.allclose(pallas_call(kernel, out, interpret=True)(x, w), 8, rtol=0.01))
    True
    """
    spec = pl.GridSpec(grid, in_specs, out_specs, scratch_shapes) if grid_spec is None else grid_spec

    def call(*args: Any) -> Any:
        scalars = getattr(spec, "num_scalar_prefetch", 0)
        given, blocks = args[scalars:], spec.in_specs
        if blocks is pl.no_block_spec:
            blocks = [pl.BlockSpec()] * len(given)
        pairs = [_blocked(x, block) for x, block in zip(given, blocks, strict=True)]
        flat, tree = jax.tree.flatten([pair.arrays for pair in pairs])
        flat_specs = tree.flatten_up_to([pair.specs for pair in pairs])
        inputs: dict[str, Any] = {"grid": spec.grid, "in_specs": flat_specs, "out_specs": spec.out_specs}
        inputs |= {"scratch_shapes": spec.scratch_shapes}
        if scalars:
            inputs["num_scalar_prefetch"] = scalars
        count = scalars + len(flat)

        def body(*refs: Any) -> None:
            own = tree.unflatten(refs[scalars:count])
            opened = [pair.restore(refs) for pair, refs in zip(pairs, own, strict=True)]
            kernel(*refs[:scalars], *opened, *refs[count:])

        return pl.pallas_call(body, out_shape, grid_spec=type(spec)(**inputs), **kwargs)(*args[:scalars], *flat)

    return call


@dataclasses.dataclass(frozen=True)
class _Blocked:
    """An argument as arrays with a spec each, and the function that makes the kernel's argument of their references."""

    arrays: Any
    specs: Any
    restore: Callable[[Any], Any]


def _blocked(x: Any, spec: Any) -> _Blocked:
    if not isinstance(x, QArray):
        return _Blocked([x], [spec], lambda refs: refs[0])
    if x.padding or x.packed is not None:
        raise ValueError(
            "the codes of a QArray in a kernel are neither packed nor padded: unpack it, or change its tiles"
        )
    parts = {name: part for name in ("scale", "zero_point", "outer_scale") if (part := getattr(x, name)) is not None}
    found = {name: _scale_block(x.qvalue.shape, part, spec) for name, part in parts.items()}
    arrays = [x.qvalue, *(array for array, _, _ in found.values())]
    static = x.tree_flatten_with_keys()[1]

    def restore(refs: Sequence[Any]) -> QArrayRef:
        loaded = {}
        for (name, (_, _, shape)), ref in zip(found.items(), refs[1:], strict=True):
            loaded[name] = ref if shape is None else ref[...].reshape(shape)
        names = ("scale", "zero_point", "outer_scale")
        return QArrayRef.tree_unflatten(static, [refs[0], *(loaded.get(name) for name in names)])

    return _Blocked(arrays, [spec, *(block for _, block, _ in found.values())], restore)


def _scale_block(shape: Sequence[int], scale: Array, spec: Any) -> tuple[Array, Any, tuple[int, ...] | None]:
    """The array and the spec of scales, and the shape of their block if the array was rearranged."""
    if spec is pl.no_block_spec or spec.block_shape is None:
        return scale, spec, None
    sizes = []
    for axis, (size, block, count) in enumerate(zip(shape, spec.block_shape, scale.shape, strict=True)):
        block = None if block is None else getattr(block, "block_size", block)
        if block is not None and count > 1 and (size % block or count * block % size):
            raise ValueError(
                f"blocks of {block} values along axis {axis} of {size} do not hold its {count} scales evenly: choose "
                f"a multiple of {size // count} that divides {size}"
            )
        sizes.append(block if block is None else 1 if count == 1 else count * block // size)

    def index(*args: Any) -> tuple[Any, ...]:
        return tuple(i if n > 1 else 0 for i, n in zip(spec.index_map(*args), scale.shape, strict=True))

    plain = dataclasses.replace(spec, block_shape=tuple(sizes), index_map=index)
    if _fits_tpu(sizes, scale.shape):
        return scale, plain, None
    # Blocks one after the other, each as one row, which is of the shape of the array's last two axes.
    whole = [1 if n is None else n for n in sizes]
    split = scale.reshape([n for dim, block in zip(scale.shape, whole, strict=True) for n in (dim // block, block)])
    rank = scale.ndim
    rows = split.transpose(*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))
    rows = rows.reshape(*rows.shape[:rank], 1, math.prod(whole))
    block = (*(None for _ in range(rank)), 1, math.prod(whole))
    moved = dataclasses.replace(plain, block_shape=block, index_map=lambda *args: (*index(*args), 0, 0))
    return rows, moved, tuple(n for n in sizes if n is not None)


def _fits_tpu(block: Sequence[int | None], shape: Sequence[int]) -> bool:
    units = (_SUBLANES, _LANES)[-len(block) :]
    ends = zip(block[-2:], shape[-2:], units, strict=True)
    return all((1 if n is None else n) % unit == 0 or (1 if n is None else n) == size for n, size, unit in ends)


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    preferred_element_type: DTypeLike | None = None,
    **kwargs: Any,
) -> Array:
    """`jax.lax.dot_general` of arrays and QArrays by primitives that Pallas lowers: a dot for each tile, then scales.

    Args:
        lhs: The left operand, without a zero point.
        rhs: The right operand; tiles along a contraction are those of the left one, or one of both has none.
        dimension_numbers: As for `jax.lax.dot_general`.
        preferred_element_type: The dtype of the result; by default that of the dequantized operands.
        **kwargs: Other arguments of `jax.lax.dot_general`.
    """
    operands: list[Any] = [x[...] if isinstance(x, QArrayRef) else x for x in (lhs, rhs)]
    result = preferred_element_type or jnp.result_type(*(x.dtype for x in operands))
    if not any(isinstance(x, QArray) for x in operands):
        return jax.lax.dot_general(operands[0], operands[1], dimension_numbers, preferred_element_type=result, **kwargs)
    contract, batch = (tuple(map(tuple, axes)) for axes in dimension_numbers)
    numbers: Any = (contract, batch)
    counts = [_tile_count(operands, axes) for axes in zip(*contract, strict=True)]
    codes, scales = zip(*map(_codes, operands), strict=True)
    if all(jnp.issubdtype(x.dtype, jnp.integer) for x in codes):
        total = jnp.int32
    else:
        total, wide = jnp.float32, next((x.dtype for x in codes if x.dtype.itemsize > 1), jnp.float32)
        codes = tuple(x if codes[0].dtype == codes[1].dtype else x.astype(wide) for x in codes)
    free = [[a for a in range(x.ndim) if a not in (*c, *b)] for x, c, b in zip(codes, contract, batch, strict=True)]
    acc: Any = None
    for tile in itertools.product(*map(range, counts)):
        parts = [_tile(x, axes, tile, counts) for x, axes in zip(codes, contract, strict=True)]
        out = jax.lax.dot_general(parts[0], parts[1], numbers, preferred_element_type=total, **kwargs)
        out = out.astype(jnp.float32)
        for side, scale in enumerate(scales):
            if scale is not None:
                own = _tile(scale, contract[side], tile, counts).astype(jnp.float32)
                own = own.transpose(*batch[side], *free[side], *contract[side])
                kept = len(batch[side]) + len(free[side])
                other = (1,) * len(free[1 - side])
                rows = own.shape[len(batch[side]) : kept]
                spread = (*own.shape[: len(batch[side])], *((*rows, *other) if side == 0 else (*other, *rows)))
                out = out * _repeated(own.reshape(spread), out.shape)
        acc = out if acc is None else acc + out
    return acc.astype(result)


def _codes(x: Any) -> tuple[Array, Array | None]:
    """The values that are multiplied, and their scales."""
    if not isinstance(x, QArray):
        return x, None
    if x.zero_point is not None:
        raise ValueError("a dot in a kernel takes symmetric operands: quantize with 'absmax', or dequantize it first")
    scale = x.scale if x.outer_scale is None else x.scale.astype(jnp.float32) * x.outer_scale.astype(jnp.float32)
    plain = x.qtype.name == x.qvalue.dtype.name or jnp.issubdtype(x.qvalue.dtype, jnp.signedinteger)
    return (x.qvalue if plain else x.qtype.decode(x.qvalue).astype(jnp.float32)), scale


def _tile_count(operands: Sequence[Any], axes: Sequence[int]) -> int:
    """The number of tiles of a contraction."""
    pairs = zip(operands, axes, strict=True)
    counts = {x.scale.shape[axis] for x, axis in pairs if isinstance(x, QArray)} - {1}
    if len(counts) > 1:
        raise ValueError(f"both operands have tiles along a contraction, of different sizes: {sorted(counts)} of them")
    return counts.pop() if counts else 1


def _tile(x: Array, axes: Sequence[int], tile: Sequence[int], counts: Sequence[int]) -> Array:
    for axis, index, count in zip(axes, tile, counts, strict=True):
        if x.shape[axis] > 1 and count > 1:
            size = x.shape[axis] // count
            x = jax.lax.slice_in_dim(x, index * size, (index + 1) * size, axis=axis)
    return x


def _repeated(scale: Array, shape: Sequence[int]) -> Array:
    """Scales of tiles along axes that are not contracted, one for each value; axes of size one stay so."""
    return functools.reduce(
        lambda x, axis: jnp.repeat(x, shape[axis] // x.shape[axis], axis=axis),
        [axis for axis, n in enumerate(scale.shape) if n not in (1, shape[axis])],
        scale,
    )
