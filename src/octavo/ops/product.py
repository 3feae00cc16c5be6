"""One custom_vjp for every bilinear operation, whose six operands are quantized according to a DotConfig.

A `Product` is a bilinear map `out = f(lhs, rhs)`. Its two transposes are bilinear maps of the cotangent and a residual:
`dlhs = f_lhs(g, rhs)` and `drhs = f_rhs(g, lhs)`. A `Product` implements the axes and the operation itself;
quantization, residuals, masks and moving scales between operands are implemented here, once, for `dot_general`,
convolutions and ragged dots (`octavo.ops.products`).
"""

import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo import _sharding
from octavo._typing import Array, PRNGKeyArray
from octavo.calibration import Bounds
from octavo.ops.codes import ArrayOrQArray
from octavo.ops.config import DotConfig, Matmul, Operand
from octavo.ops.dims import Dims
from octavo.ops.hadamard import rotate
from octavo.ops.layout import explicit_shardings
from octavo.ops.marker import mark
from octavo.ops.scales import Scaled, move_scale, smooth
from octavo.ops.sparsity import nm_mask
from octavo.ops.telemetry import measure_fit
from octavo.ops.vjp import (
    Scaling,
    check_scaling,
    dequantize_if_fake_quant,
    finish,
    gradient_mask,
    jit_if_tracing,
    masked,
    once_differentiable,
    quantize_operand,
    save,
    split_operand_keys,
    tangent_probe,
    trackers_of,
    updated_scaling,
    vary_alike,
    without_reduced,
)
from octavo.qarray import QArray


class Product:
    """A bilinear map: the axes of its operands, its computation, and its transposes.

    Subclasses are frozen dataclasses, so that a product is hashable and compares by value. Operands that are not
    differentiated (`extra`: the group sizes of a ragged dot) follow the other two.
    """

    op: ClassVar[str]
    """The name of the operation in rules."""
    primitive: ClassVar[str]
    """The JAX primitive of this operation."""
    has_placement: ClassVar[bool] = True
    """Whether the weight can be all-gathered, and its gradient reduced, in low precision."""
    has_explicit_shardings: ClassVar[bool] = True
    """Whether gradients are resharded on meshes with explicit axes."""
    residual_dtype: ClassVar[Any] = jnp.float32
    """The dtype of a dequantized residual; None for the operand's dtype."""

    @property
    def dims(self) -> Dims:
        """The axes of both operands, for quantizing them."""
        raise NotImplementedError

    @property
    def params(self) -> dict[str, Any]:
        """The equivalent parameters of the JAX primitive."""
        raise NotImplementedError

    def check(self, config: DotConfig) -> None:
        """Raise if this operation does not support the config."""
        raise NotImplementedError

    def out_shape(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, ...]:
        raise NotImplementedError

    def transpose(self, of_lhs: bool) -> "Transpose":
        """The map from (cotangent, residual) to the gradient of an operand."""
        raise NotImplementedError

    def multiply(
        self,
        lhs: ArrayOrQArray,
        rhs: ArrayOrQArray,
        *extra: Array,
        dtype: Any,
        precision: Any,
        lowering: str,
        accumulator: str | None,
        out_sharding: Any,
    ) -> Array:
        raise NotImplementedError


class Transpose(Product):
    """A transposed product: its operands are the cotangent and a residual."""

    def arrange_residual(self, residual: ArrayOrQArray) -> ArrayOrQArray:
        """The residual in the layout in which it is quantized and multiplied."""
        return residual

    def fold(self, g: Array, residual: QArray, *extra: Array, quantized: bool) -> Any:
        """(cotangent, residual) with a scale along the contraction moved into the cotangent; None if impossible.

        `quantized`: whether the cotangent is quantized, so that both operands are codes.
        """
        raise NotImplementedError

    def quantize(
        self,
        matmul: Matmul,
        g: Any,
        residual: ArrayOrQArray,
        extra: tuple[Array, ...],
        keys: Any,
        scaling: Scaling,
        name: str,
    ) -> tuple[ArrayOrQArray, ArrayOrQArray, dict[str, Any], tuple[Array, ...]]:
        """Quantize both operands; also returns measured bounds and telemetry, and scales of the result."""
        del extra
        left, right, seen = quantize_operands(matmul, g, residual, self.dims, keys, scaling, (name, None))
        return left, right, seen, ()

    def gradient_dtype(self, out: Any, operand: Any, accumulator: str | None) -> Any:
        """The dtype in which a gradient is computed before it is cast to its operand's dtype."""
        del out, operand, accumulator
        return jnp.float32

    def reduce(
        self,
        reduction: Any,
        lhs: ArrayOrQArray,
        rhs: ArrayOrQArray,
        extra: Any,
        scaling: Scaling,
        scales: Any,
        options: Any,
    ) -> tuple[Array, dict[str, Any]] | None:
        """The gradient reduced over devices in low precision, and updates of `scaling`; None if nothing is reduced."""
        raise NotImplementedError


class Placement(NamedTuple):
    """The low-precision collectives of a weight, from `octavo.distributed`.

    `gather` (a `WeightGather`) all-gathers its codes; `reduction` (a `GradReduce`) reduces its gradient over devices in
    low precision.
    """

    gather: Any = None
    reduction: Any = None


UNPLACED = Placement()
"""The placement of a weight whose collectives, if any, are left to XLA."""


class Call(NamedTuple):
    """The static arguments of one quantized product."""

    product: Product
    config: DotConfig
    dtype: np.dtype
    precision: Any = None
    out_sharding: Any = None
    placement: Placement = UNPLACED
    operand_shardings: tuple[Any, Any] = (None, None)
    """On a mesh with explicit axes: the required shardings of the gradients."""

    @property
    def options(self) -> dict[str, Any]:
        return {"precision": self.precision, "lowering": self.config.lowering}

    @property
    def params(self) -> dict[str, Any]:
        return self.product.params

    def run(self, *args: Any) -> Array:
        """The forward pass for these arguments; operands may be QArrays."""
        return _primal(self, *args)


def quantized_product(
    call: Call,
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    *extra: Array,
    key: PRNGKeyArray | None,
    scaling: Scaling | None,
) -> Array:
    """Apply a product to two float arrays, quantizing its operands and those of its gradients."""
    config, product, scaling = call.config, call.product, scaling or {}
    if isinstance(lhs, QArray) or isinstance(rhs, QArray):
        raise TypeError("a config quantizes float operands; QArrays are quantized already: leave the config out")
    product.check(config)
    check_scaling(config, scaling, call.placement.reduction)
    lhs, rhs = vary_alike(lhs, rhs)
    if config.sparsity is not None:
        n, m = config.sparsity
        kept = nm_mask(_sharding.without_reduced(rhs), n, m, axis=product.dims.rhs_contract[-1])
        rhs = masked(rhs, _sharding.restore_reduced(kept, _sharding.explicit(rhs)))
    if product.has_explicit_shardings:
        call = call._replace(operand_shardings=explicit_shardings(lhs, rhs))
    return _product(call, lhs, rhs, extra, key, scaling)


def init_product_scaling(config: DotConfig, product: Product, lhs: Any, rhs: Any, reduction: Any = None) -> Scaling:
    """The initial state of every tracker of a config, and of error feedback, for operands of these shapes."""
    out = jax.ShapeDtypeStruct(product.out_shape(lhs.shape, rhs.shape), jnp.float32)
    dims, dlhs, drhs = product.dims, product.transpose(True).dims, product.transpose(False).dims
    sides = {
        "lhs": (config.fwd.lhs, lhs, dims.lhs_contract, dims.lhs_batch),
        "rhs": (config.fwd.rhs, rhs, dims.rhs_contract, dims.rhs_batch),
        "dlhs": (config.dlhs.lhs, out, dlhs.lhs_contract, dlhs.lhs_batch),
        "drhs": (config.drhs.lhs, out, drhs.lhs_contract, drhs.lhs_batch),
    }
    state = {}
    for name, tracker in trackers_of(config).items():
        operand, x, contract, batch = sides[name]
        assert operand is not None
        quantizer = operand.quantizer(len(x.shape), contracting=contract, batch=batch)
        bounds = jax.eval_shape(lambda x=x, q=quantizer: q.measure(jnp.zeros(x.shape)))
        state[name] = tracker.init({k: jnp.zeros(v.shape, v.dtype) for k, v in bounds.items()})
    return state if reduction is None else state | reduction.init_error(lhs.shape if reduction.left else rhs.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: Call, lhs: Array, rhs: Array, extra: Any, key: PRNGKeyArray | None, scaling: Scaling) -> Array:
    return mark(_primal(call, lhs, rhs, extra, key, scaling), call, (lhs, rhs, extra, key, scaling))


@jit_if_tracing
def _primal(
    call: Call, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Any, key: PRNGKeyArray | None, scaling: Scaling
) -> Array:
    return _forward(call, *without_reduced(lhs, rhs), extra, key, scaling)[0]


def _forward(
    call: Call, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Any, key: PRNGKeyArray | None, scaling: Scaling
):
    keys, config, product = split_operand_keys(key), call.config, call.product
    if config.smooth is not None:
        lhs, rhs = smooth(lhs, rhs, product.dims, config.smooth)
    left, right, seen = quantize_operands(config.fwd, lhs, rhs, product.dims, keys[:2], scaling, ("lhs", "rhs"))
    whole = left, right
    if (gather := _gather(call)) is not None:
        left, right = (gather.shard_codes(left), right) if gather.left else (left, gather.shard_codes(right))
        whole = (gather.all_gather(left), right) if gather.left else (left, gather.all_gather(right))
    out = product.multiply(
        dequantize_if_fake_quant(config.fwd.lhs, whole[0]),
        dequantize_if_fake_quant(config.fwd.rhs, whole[1]),
        *extra,
        dtype=call.dtype,
        accumulator=config.fwd.accumulator,
        out_sharding=call.out_sharding,
        **call.options,
    )
    return out, (left, right, seen, keys, (lhs, rhs))


def _gather(call: Call) -> Any:
    return call.placement.gather if call.product.has_placement else None


@jit_if_tracing
def _product_fwd(call: Call, lhs: Array, rhs: Array, extra: Any, key: PRNGKeyArray | None, scaling: Scaling):
    lhs, rhs = without_reduced(lhs, rhs)
    out, (left, right, seen, keys, smoothed) = _forward(call, lhs, rhs, extra, key, scaling)
    config, dims = call.config, call.product.dims
    # Only residuals that the gradients read are saved, in low precision where a gradient uses codes.
    rhs_saved = rhs if config.dlhs.residual == "original" else right
    lhs_saved = lhs if config.drhs.residual == "original" else left
    axes = (dims.lhs_contract, dims.lhs_batch), (dims.rhs_contract, dims.rhs_batch)
    masks = [
        gradient_mask(config, operand, x, each, scaling.get(name))
        for operand, x, each, name in zip((config.fwd.lhs, config.fwd.rhs), smoothed, axes, ("lhs", "rhs"), strict=True)
    ]
    saved, probes = save((lhs_saved, rhs_saved, masks)), (tangent_probe(lhs), tangent_probe(rhs))
    return out, (saved, extra, seen, keys, scaling, probes)


@jit_if_tracing
def _product_bwd(call: Call, residuals: Any, g: Array):
    (lhs, rhs, masks), extra, seen, keys, scaling, like = residuals
    g, shardings = once_differentiable(_sharding.without_reduced(g), *like), call.operand_shardings
    # A masked gradient is reduced first: the values of an unreduced array cannot be masked.
    summed = [x if m is None else _sharding.plain(x) for x, m in zip(shardings, masks, strict=True)]
    wanted = [_sharding.gradient_sharding(x) for x in summed]
    dlhs, seen_dlhs = _gradient(call, True, g, rhs, extra, keys[2:4], scaling, like[0].dtype, wanted[0])
    drhs, seen_drhs = _gradient(call, False, g, lhs, extra, keys[4:6], scaling, like[1].dtype, wanted[1])
    grads = [finish(*each) for each in zip((dlhs, drhs), like, masks, shardings, strict=True)]
    return *grads, (None,) * len(extra), None, updated_scaling(call.config, scaling, seen | seen_dlhs | seen_drhs)


_product.defvjp(_product_fwd, _product_bwd)


def _gradient(
    call: Call,
    of_lhs: bool,
    g: Any,
    residual: ArrayOrQArray,
    extra: Any,
    keys,
    scaling: Scaling,
    dtype: Any,
    sharding: Any,
):
    """One of the two gradients, and the bounds and telemetry measured for it."""
    config, transpose = call.config, call.product.transpose(of_lhs)
    matmul, forward = (config.dlhs, config.fwd.rhs) if of_lhs else (config.drhs, config.fwd.lhs)
    g, residual, matmul = _use_residual(transpose, matmul, forward, g, residual, extra)
    name = "dlhs" if of_lhs else "drhs"
    left, right, seen, scales = transpose.quantize(
        matmul, g, transpose.arrange_residual(residual), extra, keys, scaling, name
    )
    if (gather := _gather(call)) is not None and gather.left != of_lhs:
        right = gather.all_gather(right)
    left, right = dequantize_if_fake_quant(matmul.lhs, left), dequantize_if_fake_quant(matmul.rhs, right)
    options = call.options | {"accumulator": matmul.accumulator}
    reduction = call.placement.reduction if call.product.has_placement else None
    if reduction is not None and reduction.left == of_lhs:
        if any(x is not None for x in call.operand_shardings):
            raise NotImplementedError("a mesh with explicit axes adds up gradients in float: leave reduce_qtype out")
        reduced = transpose.reduce(reduction, left, right, extra, scaling, scales, options)
        if reduced is not None:
            return reduced[0], seen | reduced[1]
    if scales:
        options["scales"] = scales
    dtype = transpose.gradient_dtype(call.dtype, dtype, matmul.accumulator)
    return transpose.multiply(left, right, *extra, dtype=dtype, out_sharding=sharding, **options), seen


def _use_residual(
    transpose: Transpose, matmul: Matmul, forward: Operand | None, g: Array, residual: ArrayOrQArray, extra: Any
) -> tuple[Any, ArrayOrQArray, Matmul]:
    """The cotangent, the residual as an operand, and the config of what remains to be quantized."""
    if not isinstance(residual, QArray):
        return g, residual, matmul.replace(rhs=None) if matmul.residual == "reuse" else matmul
    if matmul.residual != "reuse":
        return g, residual.dequantize(transpose.residual_dtype), matmul
    folded = transpose.fold(g, residual, *extra, quantized=matmul.lhs is not None)
    if folded is None:
        # A scale along the contraction that cannot be moved: requantize along the new contraction.
        return g, residual.dequantize(transpose.residual_dtype), matmul.replace(rhs=matmul.rhs or forward)
    return *folded, matmul.replace(rhs=None)


def quantize_operands(matmul: Matmul, lhs: Any, rhs: ArrayOrQArray, dims: Dims, keys, scaling: Scaling, names):
    """Rotate and quantize both operands of a matmul; also returns measured bounds and telemetry."""
    seen: dict[str, Bounds] = {}
    if matmul.rotate is not None:
        assert not isinstance(lhs, QArray)
        assert not isinstance(rhs, QArray)
        lhs = rotate(lhs, matmul.rotate, axis=dims.lhs_contract[-1])
        rhs = rotate(rhs, matmul.rotate, axis=dims.rhs_contract[-1])

    def quantized(operand: Operand | None, x: Any, left: bool) -> ArrayOrQArray:
        if operand is None or isinstance(x, QArray):
            return x.product() if isinstance(x, Scaled) else x
        contract, batch = (dims.lhs_contract, dims.lhs_batch) if left else (dims.rhs_contract, dims.rhs_batch)
        name, key = (names[0], keys[0]) if left else (names[1], keys[1])
        q, measured = quantize_operand(operand, x, contract, batch, key, scaling.get(name))
        if measured is not None:
            seen[name] = measured
        seen.update(measure_fit(scaling, name, x.product() if isinstance(x, Scaled) else x, q))
        return q

    if matmul.rhs is not None and matmul.rhs.dequant == "other":
        rhs = quantized(matmul.rhs, rhs, False)
        assert isinstance(rhs, QArray)
        assert not isinstance(lhs, QArray)
        moved, rhs = move_scale(rhs, lhs, dims, from_left=False)
        return quantized(matmul.lhs, moved, True), rhs, seen
    lhs = quantized(matmul.lhs, lhs, True)
    if matmul.lhs is not None and matmul.lhs.dequant == "other":
        assert isinstance(lhs, QArray)
        assert not isinstance(rhs, QArray)
        moved, lhs = move_scale(lhs, rhs, dims, from_left=True)
        return lhs, quantized(matmul.rhs, moved, False), seen
    return lhs, quantized(matmul.rhs, rhs, False), seen
