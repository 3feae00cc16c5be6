"""Quantizing an operand, and dequantizing one, as one equation of a jaxpr.

Quantizing is some thirty operations, and a matmul with its gradients quantizes four operands. On one CPU the equation
becomes a custom call (`octavo.kernels.quantize_groups`), which is bit-equal, and compiled before the program is.
Elsewhere it becomes its operations, as if they were written in its place.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from octavo import _sharding, kernels
from octavo._typing import Array, Shape
from octavo.calibration import AbsMax, FourOverSix
from octavo.numerics import E8M0, BlockFormat, Eden, FloatFormat, IntFormat, Nearest, Stochastic
from octavo.numerics.rounding import has_words
from octavo.qarray import QArray, Quantizer
from octavo.qarray.eden import scale_by_sums
from octavo.qarray.qarray import Tiles, is_eager

_ABSMAX = AbsMax()
_CODES = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")


class Kernel(NamedTuple):
    """The static arguments of the custom call that quantizes."""

    quantizer: Quantizer
    shape: Shape
    rounding: kernels.Rounding
    split: tuple[Shape, Shape]
    """The shapes of values and scales with each tiled axis as [tiles, tile size]."""
    has_factor: bool

    @property
    def tiles(self) -> Tiles:
        return self.quantizer.tiles(self.shape)

    @staticmethod
    def of(quantizer: Quantizer, x: Array, factor: Array | None, key: Any = None) -> "Kernel | None":
        """Those that compute what a quantizer does with `x`, or with `x * factor`; None if there are none."""
        rounding = _rounding(quantizer)
        if rounding is None or not kernels.allowed() or (quantizer.rounding.stochastic and not has_words(key)):
            return None
        dtypes = {x.dtype.name, quantizer.scale_dtype or "float32", "float32" if factor is None else factor.dtype.name}
        if dtypes != {"float32"} or (quantizer.scale_dtype and rounding.scales != "float32"):
            return None
        tiles = quantizer.tiles(x.shape)
        if tiles.padding or (quantizer.tiled_axes and factor is not None):
            return None
        split = _split(x.shape, tiles.counts) if quantizer.tiled_axes else (tuple(x.shape), tiles.counts)
        if rounding.scales == "float32" and x.ndim > 1 and all(count == 1 for count in tiles.counts):
            rounding, split = rounding._replace(mode="tensor"), (tuple(x.shape), (*x.shape[:-1], 1))
        if not kernels.can_quantize(*split, None if factor is None else factor.shape, rounding.codes):
            return None
        return Kernel(quantizer, tuple(x.shape), rounding, split, factor is not None)

    def outputs(self, x: Any) -> list[Any]:
        return self.rounding.outputs(x.shape, self.tiles.counts)[:3]

    def result(self, out: list[Array]) -> QArray:
        dtype = jnp.dtype(jnp.float32)
        return QArray.tree_unflatten((self.quantizer.format, dtype, (), None), (*out[:2], None, *(out[2:] or [None])))

    def run(self, *leaves: Array) -> list[Array]:
        """The arrays of a QArray, by the custom call."""
        tiles, eden = self.tiles, self.quantizer.rounding
        x, factor, key = leaves[0], leaves[1] if self.has_factor else None, leaves[-1]
        words = jax.random.key_data(key) if self.rounding.noise_bits else None
        static = {"rounding": self.rounding, "scale_shape": tiles.counts, "split": self.split}
        codes, scale, *more = kernels.quantize_groups(x, factor, words, **static)
        if not isinstance(eden, Eden):
            return [codes, scale, *more]
        outer, *sums = more
        wide, total, inner = (tiles.split_scale(part) for part in (scale.astype(jnp.float32), *sums))
        wide = scale_by_sums(eden, key, total, inner, self.quantizer.format, wide, tiles)
        return [codes, tiles.merge(wide).astype(scale.dtype), outer]


def _rounding(quantizer: Quantizer) -> kernels.Rounding | None:
    """How the custom call rounds as a quantizer does; None if it does not."""
    fmt, rounding, calibration = quantizer.format, quantizer.rounding, quantizer.calibration
    block = fmt if isinstance(fmt, BlockFormat) else None
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    integer = (
        isinstance(element, IntFormat) and element.storage == jnp.int8 and element.preserve_zero and element.signed
    )
    codes = element.dtype or "" if isinstance(element, FloatFormat) else "int8" if integer and block is None else ""
    if quantizer.arithmetic != "float32" or codes not in ("int8", *_CODES) or not isinstance(rounding, _KNOWN):
        return None
    if isinstance(element, IntFormat) and (element.unit != 1.0 or element.bound < 4):
        return None
    stochastic = not rounding.nearest
    bound = min(fmt.largest, -fmt.smallest) if stochastic else fmt.bound
    found = kernels.Rounding(codes, 1 / bound, fmt.smallest, fmt.largest)
    if isinstance(element, IntFormat):
        found = found._replace(low=element.qmin, high=element.qmax)
    if isinstance(rounding, Stochastic):
        if rounding.shared_axes:
            return None
        found = found._replace(noise_bits=rounding.bits)
    if block is not None and jnp.dtype(block.scale_dtype) == E8M0 and not block.outer:
        floor = "floor" if block.scale_rounding == "floor" else ""
        return found._replace(scales=E8M0.name, mode=floor) if calibration == _ABSMAX else None
    if block is not None:
        if (block.scale_dtype, block.scale_rounding, block.outer) != ("float8_e4m3fn", "nearest", True):
            return None
        mode = "sums" if isinstance(rounding, Eden) else ""
        outer_unit = 1 / (bound * block.largest_scale)
        found = found._replace(scales=block.scale_dtype, mode=mode, outer_unit=outer_unit)
        if isinstance(calibration, FourOverSix) and not mode and not stochastic and codes == "float4_e2m1fn":
            return found._replace(mode="four_over_six", headroom=calibration.headroom)
        if mode and codes != "float4_e2m1fn":
            return None
        plain = isinstance(calibration, AbsMax)
        return found._replace(factor=calibration.factor, headroom=calibration.headroom) if plain else None
    return found if calibration == _ABSMAX and not isinstance(rounding, Eden) else None


class Decoder(NamedTuple):
    """The static arguments of the custom call that dequantizes."""

    split: tuple[Shape, Shape]

    @staticmethod
    def of(q: QArray, dtype: Any) -> "Decoder | None":
        """Those that compute `q.dequantize(dtype)`; None if there are none."""
        scales = {np.dtype(E8M0).name: False, "float8_e4m3fn": True}
        if not isinstance(q.qtype, BlockFormat) or q.qtype.element.storage.name != "float4_e2m1fn":
            return None
        if q.packed or q.padding or q.zero_point is not None or jnp.dtype(dtype) != jnp.float32:
            return None
        name = q.scale.dtype.name
        if name not in scales or scales[name] != (q.outer_scale is not None) or not kernels.allowed():
            return None
        if q.outer_scale is not None and (q.outer_scale.size != 1 or q.outer_scale.dtype != jnp.float32):
            return None
        split = _split(q.shape, tuple(q.scale.shape))
        return Decoder(split) if kernels.can_quantize(*split, None, "float4_e2m1fn") else None

    def outputs(self, codes: Any) -> list[Any]:
        return [jax.ShapeDtypeStruct(codes.shape, jnp.float32)]

    def result(self, out: list[Array]) -> Array:
        return out[0]

    def run(self, *leaves: Array) -> list[Array]:
        return [kernels.dequantize_float4(*leaves, split=self.split)]


def quantize_array(quantizer: Quantizer, x: Array) -> QArray:
    """`quantizer.quantize(x)` as one equation, where a custom call computes it on CPUs."""
    kernel = Kernel.of(quantizer, x, None)
    return quantizer.quantize(x) if kernel is None else one_equation(_Quantize(quantizer), kernel, x)


class _Quantize(NamedTuple):
    quantizer: Quantizer

    def __call__(self, x: Array) -> QArray:
        return self.quantizer.quantize(x)


def dequantize_operand(q: QArray, dtype: Any = None) -> Array:
    """`q.dequantize(dtype)` as one equation, where a custom call computes it on CPUs."""
    dtype = jnp.dtype(q.dtype if dtype is None else dtype)
    kernel = Decoder.of(q, dtype)
    return q.dequantize(dtype) if kernel is None else one_equation(_Dequantize(dtype), kernel, q)


class _Dequantize(NamedTuple):
    dtype: Any

    def __call__(self, q: QArray) -> Array:
        return q.dequantize(self.dtype)


def _split(shape: Shape, counts: Shape) -> tuple[Shape, Shape]:
    """The shapes of values and scales where each axis is [tiles, tile size]."""
    if not all(isinstance(size, int) and size for size in shape):
        return (0,), (0,)
    values = [size for dim, count in zip(shape, counts, strict=True) for size in (count, dim // count)]
    return tuple(values), tuple(size for count in counts for size in (count, 1))


_KNOWN, _ABSMAX = (Nearest, Stochastic, Eden), AbsMax()
_primitive = core.Primitive("octavo_quantize")
_primitive.multiple_results = True


def one_equation(function: Callable[..., Any], kernel: Kernel | Decoder | None, *args: Any) -> Any:
    """`function(*args)` as one equation, if it is traced.

    Args:
      function: A function of pytrees that is equal to, and has the hash of, others that compute the same.
      kernel: What computes it on one CPU, from the arrays of `args`.
      *args: Its arguments.
    """
    # With explicit axes the types of results are those that operations infer, also from operands without a mesh.
    axes = jax.sharding.get_abstract_mesh().axis_types
    if is_eager(args) or _sharding.is_typed(args) or jax.sharding.AxisType.Explicit in axes:
        return function(*args)
    leaves, tree = jax.tree.flatten(args)
    out = _primitive.bind(*leaves, function=function, tree=tree, kernel=kernel)
    if kernel is not None:
        return kernel.result(out)
    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(_jitted(function, tree), *leaves)), out)


@functools.lru_cache(maxsize=1024)
def _jitted(function: Callable[..., Any], tree: Any) -> Callable[..., Any]:
    return jax.jit(lambda *leaves: function(*jax.tree.unflatten(tree, leaves)), inline=True)


def _operations(*leaves: Array, function: Callable[..., Any], tree: Any, kernel: Any) -> list[Array]:
    return jax.tree.leaves(_jitted(function, tree)(*leaves))


def _shapes(*avals: Any, kernel: Any, **params: Any) -> list[Any]:
    if kernel is not None:
        out = kernel.outputs(avals[0])
    else:
        out = jax.eval_shape(functools.partial(_operations, kernel=kernel, **params), *avals)
    return [jax.core.ShapedArray(x.shape, jnp.dtype(x.dtype)) for x in out]


def _batch(args: Any, dims: Any, **params: Any) -> tuple[list[Array], list[int]]:
    out = jax.vmap(functools.partial(_operations, **params), in_axes=dims)(*args)
    return out, [0] * len(out)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    # As if the operations were written in its place: what must not be differentiated twice raises by itself.
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(functools.partial(_operations, **params), tuple(primals), tuple(tangents))


def _lower_on_cpu(ctx: Any, *args: Any, kernel: Any, **params: Any) -> Any:
    if kernel is None or not kernels.runs_alone(ctx):
        return _lower(ctx, *args, kernel=kernel, **params)
    return mlir.lower_fun(kernel.run, multiple_results=True)(ctx, *args)


_lower = mlir.lower_fun(_operations, multiple_results=True)
_primitive.def_impl(_operations)
_primitive.def_abstract_eval(_shapes)
batching.primitive_batchers[_primitive] = _batch
ad.primitive_jvps[_primitive] = _jvp
mlir.register_lowering(_primitive, _lower)
mlir.register_lowering(_primitive, _lower_on_cpu, platform="cpu")
