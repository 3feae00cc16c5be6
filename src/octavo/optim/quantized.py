"""Optimizers whose state is stored in few bits.

A moment is dequantized, updated by the optimizer's own formula and quantized again. For AdamW in each block of values:

    m = b1 * dequantize(m8) + (1 - b1) * g,    v = b2 * dequantize(v8) + (1 - b2) * g^2,
    update = m / (sqrt(v) + eps) with bias correction,    m8 = quantize(m),    v8 = quantize(v).

An elementwise transformation runs in a loop over chunks of each parameter, so that the float values of no more than a
chunk exist at a time.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from octavo import _sharding
from octavo._names import unknown_name
from octavo._tree import flatten_paths, path_str
from octavo.optim.moment import MOMENTS, SHARDS, ExpandedMoment, MomentFormat, is_moment, quantize_like

# The fields of Optax's states that are never negative.
_UNSIGNED = {"nu", "nu_max", "sum_of_squares"}
# Values in a chunk: they stay in a core's cache, and elsewhere fill the device.
_CHUNK, _CHUNK_ELSEWHERE = 2**16, 2**22


def quantize_state(
    transformation: optax.GradientTransformation,
    moments: str | MomentFormat = "dynamic8",
    *,
    elementwise: bool = True,
    min_size: int = 4096,
    exclude: str = "(?i)embed|norm",
    block_size: int | None = None,
) -> optax.GradientTransformation:
    """Store the state of a transformation in few bits.

    The state has the structure of the transformation's own state, with a quantized moment in place of each float array
    that has a parameter's path and shape. `dequantize_state` turns it into a state of the transformation itself.

    Args:
      transformation: The transformation. Its state is float between dequantization and quantization only.
      moments: The format of the moments: "dynamic8", "linear8", "dynamic4", "float8", or a `MomentFormat`.
      elementwise: Whether an update depends only on the same element of gradient, state and parameter, and neither on
        other elements nor on paths. If not, the moments of all parameters are dequantized at once.
      min_size: Moments with fewer values stay in float.
      exclude: A regular expression; moments of parameters whose path contains it stay in float. By default embeddings,
        whose gradients are sparse, and norms.
      block_size: The largest number of values with one scale, instead of the format's own.

    Returns:
      A transformation with the same updates, up to the error of quantization.

    >>> adam = quantize_state(optax.scale_by_adam())
    >>> state = adam.init({"w": jnp.ones((64, 64)), "bias": jnp.ones(64)})
    >>> state.mu["w"].qtype.name, state.nu["w"].qtype.name, state.mu["bias"].dtype.name
    ('dynamic8', 'udynamic8', 'float32')
    """
    fmt = _moment_format(moments, block_size)
    excluded = re.compile(exclude) if exclude else None

    def init(params: Any) -> Any:
        names = {name: leaf.shape for name, leaf in flatten_paths(params).items()}

        def quantize(path: Any, x: Any) -> Any:
            name = _param_name(path_str(path), x, names)
            if name is None or x.size < min_size or (excluded and excluded.search(name)):
                return x
            unsigned = not _UNSIGNED.isdisjoint(path_str(path).removesuffix(name).split("/"))
            return fmt.quantize(x, unsigned=unsigned)

        # XLA takes seconds to fold the maximum of an array of zeros into a constant.
        state = jax.lax.optimization_barrier(transformation.init(params))
        return jax.tree_util.tree_map_with_path(quantize, state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if elementwise:
            return _update_by_parameter(transformation, updates, state, params)
        return _update(transformation.update, updates, state, params)

    return optax.GradientTransformation(init, update)


def dequantize_state(state: Any) -> Any:
    """The state of an optimizer with all moments in float, as the optimizer without `quantize_state` has it.

    Args:
      state: A state with quantized moments, or any pytree that holds some.

    Returns:
      The same pytree with float arrays in place of the moments.

    >>> adam = optax.scale_by_adam()
    >>> params = {"w": jnp.ones((64, 64))}
    >>> state = dequantize_state(quantize_state(adam).init(params))
    >>> jax.tree.structure(state) == jax.tree.structure(adam.init(params))
    True
    """
    return jax.tree.map(lambda x: x.dequantize() if is_moment(x) else x, state, is_leaf=is_moment)


def quantize_state_like(state: Any, like: Any) -> Any:
    """The inverse of `dequantize_state`.

    Args:
      state: A state with float moments.
      like: A state of the same optimizer with quantized moments, which may be abstract (of `jax.eval_shape`).

    Returns:
      The state with its moments quantized as in `like`.

    >>> adam = quantize_state(optax.scale_by_adam())
    >>> state = adam.init({"w": jnp.ones((64, 64))})
    >>> quantize_state_like(dequantize_state(state), like=state).mu["w"].qtype.name
    'dynamic8'
    """
    return jax.tree.map(lambda old, x: quantize_like(x, old) if is_moment(old) else x, like, state, is_leaf=is_moment)


def _moment_format(moments: str | MomentFormat, block_size: int | None) -> MomentFormat:
    if isinstance(moments, str) and moments not in MOMENTS:
        raise ValueError(f"unknown format of moments {moments!r}: {unknown_name(moments, MOMENTS)}")
    fmt = MOMENTS[moments] if isinstance(moments, str) else moments
    return fmt if block_size is None else fmt.replace(block_size=block_size)


def _param_name(path: str, x: Any, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """The parameter that a float array of the state has the path and shape of."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    parts = path.split("/")
    names = ("/".join(parts[start:]) for start in range(len(parts) + 1))
    return next((name for name in names if shapes.get(name) == x.shape), None)


def _update(update: Callable[..., Any], grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    # With barriers the update takes half the time on CPUs: XLA computes each value once.
    floats = jax.lax.optimization_barrier(dequantize_state(state))
    updates, new = jax.lax.optimization_barrier(update(grads, floats, params))
    return updates, quantize_state_like(new, state)


def _update_by_parameter(transformation: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Update each parameter with the part of the state that belongs to it, in chunks where it is quantized."""
    names = {name: leaf.shape for name, leaf in flatten_paths(grads).items()}
    paths, structure = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_moment)
    leaves = [leaf for _, leaf in paths]
    owners = [_param_name(path_str(path), _abstract(leaf), names) for path, leaf in paths]
    given = {} if params is None else flatten_paths(params)
    updates = {}
    for name, grad in flatten_paths(grads).items():
        mine = [i for i, owner in enumerate(owners) if owner in (None, name)]
        # In flattened order, the state of a parameter alone has the same arrays.
        alone = jax.tree.structure(jax.eval_shape(transformation.init, grad))
        part = jax.tree.unflatten(alone, [leaves[i] for i in mine])
        updates[name], new = _update_in_chunks(transformation.update, grad, part, given.get(name))
        for i, leaf in zip(mine, jax.tree.leaves(new, is_leaf=is_moment), strict=True):
            if owners[i] is not None or name == next(reversed(names)):
                leaves[i] = leaf
    return jax.tree.unflatten(jax.tree.structure(grads), updates.values()), jax.tree.unflatten(structure, leaves)


def _abstract(leaf: Any) -> Any:
    q = leaf.codes if isinstance(leaf, ExpandedMoment) else leaf
    return jax.ShapeDtypeStruct(q.shape, q.dtype)


# Chunks.


def _update_in_chunks(update: Callable[..., Any], grad: Any, state: Any, param: Any) -> tuple[Any, Any]:
    moments = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_moment) if is_moment(leaf)]
    axis, rows, count = _chunks(moments, grad.shape) if moments else (0, 0, 1)
    if count == 1:
        return _update(update, grad, state, param)
    size, ndim = grad.shape[axis], grad.ndim
    sliced = lambda x: getattr(x, "ndim", 0) == ndim  # noqa: E731  The rest is shared, as the number of steps.
    is_view = lambda x: getattr(x, "ndim", 0) == ndim + 1  # noqa: E731

    def get(view: Any, i: Any) -> Any:
        length = rows * view.shape[axis] * view.shape[axis + 1] // size
        return _merge(jax.lax.dynamic_slice_in_dim(view, i * length, length, axis + 1), axis)

    def put(view: Any, chunk: Any, i: Any) -> Any:
        chunk = _split(chunk, axis, size)
        return jax.lax.dynamic_update_slice_in_dim(view, chunk, i * chunk.shape[axis + 1], axis + 1)

    def one(i: Any, out: Any, state: Any) -> tuple[Any, Any]:
        return _update(update, *jax.tree.map(lambda x: get(x, i) if is_view(x) else x, (out, state, view)))

    def body(i: Any, carry: Any) -> Any:
        # The updates take the place of the gradient. Shared values are updated once, after the loop.
        return jax.tree.map(lambda x, y: put(x, y, i) if is_view(x) else x, carry, one(i, *carry))

    split = lambda tree: jax.tree.map(lambda x: _split(x, axis, size) if sliced(x) else x, tree)  # noqa: E731
    view, views = split(param), split((grad, state))
    views = (views[0].astype(jax.eval_shape(one, 0, *views)[0].dtype), views[1])
    shared = one(0, *views)
    found = jax.lax.fori_loop(0, count, body, views)
    return jax.tree.map(lambda x, y: _merge(x, axis) if is_view(x) else y, found, shared)


def _chunks(moments: list[Any], shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The axis of the loop, the rows of a shard that form a chunk, and the number of chunks."""
    arrays = [m.codes if isinstance(m, ExpandedMoment) else m for m in moments]
    tiles = [math.lcm(*(q.tile_shape[axis] for q in arrays)) for axis in range(len(shape))]
    if len(shape) < 2 and any(q.packed is not None for q in arrays):
        return 0, 0, 1  # Packed codes are not cut.
    axes = range(max(1, len(shape) - 1))
    groups = {axis: shape[axis] // math.gcd(shape[axis], SHARDS) // tiles[axis] for axis in axes}
    axis = max(axes, key=lambda axis: (groups[axis], -axis))
    size = _CHUNK if jax.default_backend() == "cpu" else _CHUNK_ELSEWHERE
    wanted = max(1, math.prod(shape) // size)
    count = next(n for n in range(min(wanted, groups[axis]), 0, -1) if groups[axis] % n == 0)
    return axis, groups[axis] // count * tiles[axis], count


def _split(x: Any, axis: int, size: int) -> Any:
    """Split an axis into the shards of the gradient's axis, of size `size`, and the rows of each."""
    shards = math.gcd(size, SHARDS)
    cuts = [(n,) if a != axis else (shards, n // shards) for a, n in enumerate(x.shape)]
    return _sharding.split(x, cuts)


def _merge(x: Any, axis: int) -> Any:
    return _sharding.merge(x, [2 if a == axis else 1 for a in range(x.ndim - 1)])
