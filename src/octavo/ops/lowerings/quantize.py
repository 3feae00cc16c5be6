"""Quantizing an operand as one equation of a jaxpr.

It is some thirty operations, and a matmul with its gradients quantizes four operands. On one CPU the equation becomes a
custom call (`octavo.kernels.quantize_absmax`), which is bit-equal, and compiled before the program is. Elsewhere it
becomes its operations, as if they were written in its place.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from octavo import _sharding, kernels
from octavo._typing import Array, Shape
from octavo.calibration import AbsMax
from octavo.numerics import IntFormat
from octavo.qarray import QArray, Quantizer
from octavo.qarray.qarray import is_eager

_ABSMAX = AbsMax()


class Kernel(NamedTuple):
    """The static arguments of the custom call."""

    format: IntFormat
    scale_shape: Shape
    split: Shape
    """The shape of the values with each tiled axis as [tiles, tile size]."""
    split_scale: Shape

    @staticmethod
    def of(quantizer: Quantizer, x: Array, factor: Array | None) -> "Kernel | None":
        """Those that compute what a quantizer does with `x`, or with `x * factor`; None if there are none."""
        fmt = quantizer.format
        if not (isinstance(fmt, IntFormat) and fmt.storage == jnp.int8 and fmt.has_zero and fmt.unit == 1.0):
            return None
        plain = quantizer.calibration == _ABSMAX and not quantizer.rounding.stochastic and fmt.signed
        if not plain or quantizer.arithmetic != "float32" or fmt.bound < 4:
            return None
        dtypes = {x.dtype.name, quantizer.scale_dtype or "float32", "float32" if factor is None else factor.dtype.name}
        if dtypes != {"float32"} or not kernels.allowed():
            return None
        tiles = quantizer.tiles(x.shape)
        if tiles.padding or (quantizer.tiled_axes and factor is not None):
            return None
        split, scale = (x.shape, tiles.counts) if not quantizer.tiled_axes else _split(x.shape, tiles.counts)
        if not kernels.can_quantize(split, scale, None if factor is None else factor.shape):
            return None
        return Kernel(fmt, tiles.counts, split, scale)

    def attributes(self, factor: Shape | None) -> dict[str, Any]:
        fmt = self.format
        return kernels.quantize_attributes(
            self.split, self.split_scale, 1 / fmt.bound, fmt.qmin, fmt.qmax, factor=factor
        )


def _split(shape: Shape, counts: Shape) -> tuple[Shape, Shape]:
    """The shapes of values and scales where each axis is [tiles, tile size]."""
    if not all(isinstance(size, int) and size for size in shape):
        return (0,), (0,)
    values = [size for dim, count in zip(shape, counts, strict=True) for size in (count, dim // count)]
    return tuple(values), tuple(size for count in counts for size in (count, 1))


_primitive = core.Primitive("octavo_quantize")
_primitive.multiple_results = True


def one_equation(function: Callable[..., QArray], kernel: Kernel | None, *args: Any) -> QArray:
    """`function(*args)` as one equation, if it is traced.

    Args:
      function: A function of pytrees that is equal to, and has the hash of, others that compute the same.
      kernel: What computes it on one CPU, from the first two arrays of `args`: the values and, if any, a factor.
      *args: Its arguments.
    """
    # With explicit axes the types of results are those that operations infer, also from operands without a mesh.
    axes = jax.sharding.get_abstract_mesh().axis_types
    if is_eager(args) or _sharding.is_typed(args) or jax.sharding.AxisType.Explicit in axes:
        return function(*args)
    leaves, tree = jax.tree.flatten(args)
    out = _primitive.bind(*leaves, function=function, tree=tree, kernel=kernel)
    if kernel is not None:
        return QArray.tree_unflatten((kernel.format, out[1].dtype, (), None), (*out, None, None))
    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(_jitted(function, tree), *leaves)), out)


@functools.lru_cache(maxsize=1024)
def _jitted(function: Callable[..., Any], tree: Any) -> Callable[..., Any]:
    return jax.jit(lambda *leaves: function(*jax.tree.unflatten(tree, leaves)), inline=True)


def _operations(*leaves: Array, function: Callable[..., Any], tree: Any, kernel: Kernel | None) -> list[Array]:
    return jax.tree.leaves(_jitted(function, tree)(*leaves))


def _shapes(*avals: Any, kernel: Kernel | None, **params: Any) -> list[Any]:
    if kernel is not None:
        out = [(avals[0].shape, jnp.int8), (kernel.scale_shape, jnp.float32)]
    else:
        found = jax.eval_shape(functools.partial(_operations, kernel=kernel, **params), *avals)
        out = [(x.shape, x.dtype) for x in found]
    return [jax.core.ShapedArray(shape, jnp.dtype(dtype)) for shape, dtype in out]


def _batch(args: Any, dims: Any, **params: Any) -> tuple[list[Array], list[int]]:
    out = jax.vmap(functools.partial(_operations, **params), in_axes=dims)(*args)
    return out, [0] * len(out)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    # As if the operations were written in its place: what must not be differentiated twice raises by itself.
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(functools.partial(_operations, **params), tuple(primals), tuple(tangents))


def _lower_on_cpu(ctx: Any, *args: Any, kernel: Kernel | None, **params: Any) -> Any:
    module = ctx.module_context
    # XLA cannot partition a custom call, and a machine that runs an exported program may have no kernels.
    alone = getattr(module.axis_context, "num_devices", 0) == 1 and not module.lowering_parameters.for_export
    if kernel is None or not alone or not kernels.available():
        return _lower(ctx, *args, kernel=kernel, **params)
    used = min(len(args), 2)
    static = kernel.attributes(ctx.avals_in[1].shape if used == 2 else None)
    inner = ctx.replace(avals_in=ctx.avals_in[:used])
    return jax.ffi.ffi_lowering(kernels.QUANTIZE_TARGET)(inner, *args[:used], **static)


_lower = mlir.lower_fun(_operations, multiple_results=True)
_primitive.def_impl(_operations)
_primitive.def_abstract_eval(_shapes)
batching.primitive_batchers[_primitive] = _batch
ad.primitive_jvps[_primitive] = _jvp
mlir.register_lowering(_primitive, _lower)
mlir.register_lowering(_primitive, _lower_on_cpu, platform="cpu")
