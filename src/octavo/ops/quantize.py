"""Quantizing the operands of one matmul: rotation, ranges, codes, where gradients pass, and moving scales."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo import _sharding
from octavo._typing import Array, PRNGKeyArray
from octavo.calibration import AbsMax, Bounds
from octavo.numerics import Format
from octavo.ops.config import DotConfig, Matmul, Operand
from octavo.ops.hadamard import random_signs, rotate
from octavo.ops.lowerings.quantize import Kernel, one_equation
from octavo.ops.lowerings.xla import row_major
from octavo.ops.operands import ArrayOrQArray, Axes, Dims
from octavo.ops.product import Scaling
from octavo.ops.telemetry import measure_fit
from octavo.qarray import QArray, Quantizer, inside
from octavo.qarray.qarray import is_eager


class Scaled(NamedTuple):
    """An array and a scale that was moved into it, not yet multiplied."""

    value: Array
    scale: Array
    negated: Array | None = None
    """Minus the scale, if it is an expression of its own."""

    def product(self) -> Array:
        return self.value.astype(jnp.float32) * _sharding.reshard_for_broadcast(self.scale, self.value)


def quantize_operands(matmul: Matmul, lhs: Any, rhs: Any, dims: Dims, keys: Any, scaling: Scaling, names: Any):
    """Rotate and quantize both operands of a matmul; also returns measured bounds and telemetry."""
    seen: dict[str, Bounds] = {}
    if matmul.rotate is not None and dims.lhs_contract:
        axes = dims.lhs_contract[-1], dims.rhs_contract[-1]
        signs = random_signs(jax.random.fold_in(keys[0], 1), lhs.shape[axes[0]]) if matmul.random_signs else None
        lhs, rhs = (rotate(x, matmul.rotate, axis=axis, signs=signs) for x, axis in zip((lhs, rhs), axes, strict=True))
    left = (matmul.lhs, dims.lhs_contract, dims.lhs_batch, keys[0], scaling, names[0], seen)
    right = (matmul.rhs, dims.rhs_contract, dims.rhs_batch, keys[1], scaling, names[1], seen)
    if matmul.rhs is not None and matmul.rhs.dequant == "other":
        moved, rhs = move_scale(_quantize_operand(rhs, *right), lhs, dims, from_left=False)
        return _quantize_operand(moved, *left), rhs, seen
    lhs = _quantize_operand(lhs, *left)
    if matmul.lhs is not None and matmul.lhs.dequant == "other":
        rhs, lhs = move_scale(lhs, rhs, dims, from_left=True)
    return lhs, _quantize_operand(rhs, *right), seen


def _quantize_operand(
    x: Any,
    operand: Operand | None,
    contract: Axes,
    batch: Axes,
    key: PRNGKeyArray | None,
    scaling: Scaling,
    name: Any,
    seen: dict[str, Any],
) -> Any:
    """An operand as codes if it is to be quantized; adds measured bounds and telemetry to `seen`."""
    # The gradient of a product with a vector is an outer product: no axis is contracted, along which blocks could lie.
    if operand is None or isinstance(x, QArray) or (not contract and operand.qtype.tile is not None):
        return x.product() if isinstance(x, Scaled) else x
    value, factor = (x.value, x.scale) if isinstance(x, Scaled) else (x, None)
    quantizer = operand.quantizer(value.ndim, contracting=contract, batch=batch)
    if operand.calibration.learned and name not in scaling and bool(name):
        raise ValueError(
            "lsq learns the scale of a weight and keeps it as state, which only a rule can do: give it as "
            "weight_calibration_method of a rule, and another calibration here, such as mse"
        )
    rounding = Quantization(operand, quantizer, bool(batch), name == "lhs")
    key = key if quantizer.rounding.stochastic else None
    if not scaling and operand.tracker is None:
        return one_equation(rounding, Kernel.of(quantizer, value, factor, key), x, key)
    q, array, measured = rounding.run(x, key, scaling.get(name))
    if operand.tracker is not None:
        seen[name] = measured
    if scaling:
        seen.update(measure_fit(scaling, name, array, q))
    return q


class Quantization(NamedTuple):
    """The static arguments of quantizing one operand."""

    operand: Operand
    quantizer: Quantizer
    has_batch: bool
    is_lhs: bool

    def __call__(self, x: Any, key: PRNGKeyArray | None) -> QArray:
        """The operand as codes, with a range that does not depend on state."""
        return self.run(x, key, None)[0]

    def run(
        self, x: Any, key: PRNGKeyArray | None, given: dict[str, Array] | None
    ) -> tuple[QArray, Array, Bounds | None]:
        """The operand as codes, the array that was rounded, and its bounds if they were measured first."""
        operand, quantizer = self.operand, self.quantizer
        array = x.product() if isinstance(x, Scaled) else materialize(x, operand)
        bounds, measured, dynamic = given, None, isinstance(operand.calibration, AbsMax) and given is None
        if isinstance(x, Scaled) and dynamic:
            # -(g s) has the range of g s. XLA fuses this multiplication into the reduction; if it were the same
            # expression as the one that is rounded, g s would be materialized in float32 for both uses.
            negated = -x.scale if x.negated is None else x.negated
            bounds = measured = quantizer.measure(Scaled(x.value, row_major(negated)).product(), witness=x.value)
            array = self._in_rows(x).product()
        elif operand.tracker is not None:
            # Codes that do not depend on these bounds are rounded in the pass that measures them: TPU's compiler joins
            # both if they read the same widened values.
            wide = array if operand.tracker.reads_current or array.dtype.itemsize > 2 else array.astype(jnp.float32)
            measured = quantizer.measure(wide)
            bounds = operand.tracker.read(given or operand.tracker.init(measured), measured)
        elif dynamic and self.is_lhs and x.dtype.itemsize <= 2 and (rows := self._in_rows(x)) is not x:
            bounds = measured = quantizer.measure(array)
            array = rows
        # Materialized once, in row-major order: otherwise CPUs fuse the quantization into later transposes of the
        # codes.
        q = quantizer.quantize(array, key=key, bounds=bounds, measured=measured, check_finite=operand.check_finite)
        return jax.tree.map(row_major, q), array, measured

    def _in_rows(self, x: Any) -> Any:
        """The narrow values of a linear layer, copied on TPUs to the layout in which they are rounded.

        Attention writes them with transposed heads. TPU's compiler would widen them before it copies them to the layout
        of the codes. Their range is measured as they are written. Where it is not measured, codes have the layout of a
        matmul that writes them, and no copy is wanted.
        """
        value = x.value if isinstance(x, Scaled) else x
        operand = self.operand
        plain = operand.tile is None and operand.arithmetic == "float32" and value.ndim <= 3 and not self.has_batch
        if not plain or value.dtype.itemsize > 2 or is_eager(value):
            return x
        value = row_major(value, platform="tpu", copied=True)
        return x._replace(value=value) if isinstance(x, Scaled) else value


def materialize(x: Array, operand: Operand | None) -> Array:
    """A float32 array that CPUs compute once, before it is quantized.

    They write it for the reduction in any case. What computed it would be fused into the quantization too: twice the
    work, and a kernel of its own to compile for each site, where equal kernels are compiled once. Narrower floats are
    left alone: fused, they are not rounded in between. With a peer's arithmetic, programs are fused as the peer's are.
    """
    return row_major(x) if x.dtype == jnp.float32 and operand and operand.arithmetic == "float32" else x


def fake_quant_operand(operand: Operand | None, x: ArrayOrQArray) -> ArrayOrQArray:
    """The operand, dequantized if its config says so."""
    return x.dequantize() if isinstance(x, QArray) and operand and operand.dequant == "input" else x


def gradient_mask(
    config: DotConfig,
    operand: Operand | None,
    x: ArrayOrQArray,
    contract: Axes,
    batch: Axes,
    given: dict[str, Array] | None,
) -> Array | None:
    """The mask of values within the calibrated range, where gradients pass, or the format's own factors; None for 1."""
    if operand is None or config.fwd.rotate or isinstance(x, QArray):
        return None
    if operand.calibration.learned and given is not None:
        return None  # what learns the range also needs the gradients of values outside of it
    own = type(operand.qtype).gradient is not Format.gradient
    clips = config.clip_gradient and (given is not None or operand.calibration.may_clip)
    if not own and not clips:
        return None
    quantizer, bounds = operand.quantizer(x.ndim, contracting=contract, batch=batch), given
    if operand.tracker is not None:
        measured = quantizer.measure(x)
        bounds = operand.tracker.read(given or operand.tracker.init(measured), measured)
    mask, factor = inside(quantizer, x, bounds) if clips else None, quantizer.gradient(x, bounds) if own else None
    return mask if factor is None else factor if mask is None else factor * mask.astype(factor.dtype)


def full_scale(q: QArray) -> Array:
    """Both levels of scales multiplied, in float32."""
    scale = q.scale.astype(jnp.float32)
    return scale if q.outer_scale is None else scale * q.outer_scale.astype(jnp.float32)


def without_scale(q: QArray) -> QArray:
    """The same codes with a scale of one: if traced, a NumPy array, by which `Codes` does not multiply."""
    return q._replace(scale=(jnp if is_eager(q) else np).ones((1,) * q.ndim, np.float32), outer_scale=None)


def move_scale(q: QArray, other: Array, dims: Dims, *, from_left: bool) -> tuple[Scaled, QArray]:
    """The other operand with the scale of `q`, and `q` without it."""
    mine = (*dims.lhs_batch, *dims.lhs_contract) if from_left else (*dims.rhs_batch, *dims.rhs_contract)
    theirs = (*dims.rhs_batch, *dims.rhs_contract) if from_left else (*dims.lhs_batch, *dims.lhs_contract)
    return Scaled(other, _across(full_scale(q), mine, theirs, other.ndim)), without_scale(q)


def smooth(
    lhs: ArrayOrQArray, rhs: ArrayOrQArray, dims: Dims, alpha: float | tuple[float, float]
) -> tuple[Array, Array]:
    """Smooth outliers of both operands along the contraction, without changing their matmul.

    Xiao et al., SmoothQuant (2022), equation 4, for each contracted index k (and each batch):

        s_k = max|lhs_k|**alpha / max|rhs_k|**(1 - alpha),   lhs_k / s_k,   rhs_k * s_k

    A pair for alpha is both exponents.
    """
    alpha, beta = alpha if isinstance(alpha, tuple) else (alpha, 1 - alpha)
    if isinstance(lhs, QArray) or isinstance(rhs, QArray):
        raise TypeError("smooth scales float operands before they are quantized; a QArray is quantized already")
    wide = jnp.float64 if jnp.float64 in (lhs.dtype, rhs.dtype) else jnp.float32
    lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    mine, theirs = (*dims.lhs_batch, *dims.lhs_contract), (*dims.rhs_batch, *dims.rhs_contract)
    left = jnp.max(jnp.abs(lhs), axis=dims.lhs_remaining, keepdims=True, initial=0)
    right = jnp.max(jnp.abs(rhs), axis=dims.rhs_remaining, keepdims=True, initial=0)
    right = _sharding.reshard_for_broadcast(_across(right, theirs, mine, lhs.ndim), left)
    s = left**alpha / right**beta
    # A non-finite value affects only its own row.
    s = jnp.where((s > 0) & jnp.isfinite(s), s, 1)
    # An index that is all zeros in one operand contributes nothing: do not let it widen the other's range.
    used = ((left != 0) & (right != 0)).astype(wide)
    return lhs * (used / s), rhs * _sharding.reshard_for_broadcast(_across(used * s, mine, theirs, rhs.ndim), rhs)


def _across(part: Array, mine: tuple[int, ...], theirs: tuple[int, ...], ndim: int) -> Array:
    """An array over the batch and contracted axes of one operand, broadcastable against the other."""
    order = [a for _, a in sorted(zip(theirs, mine, strict=True))]
    sizes = dict(zip(sorted(theirs), (part.shape[a] for a in order), strict=True))
    long = [a for a in order if part.shape[a] not in (0, 1)]
    if long != sorted(long):
        part = jnp.transpose(part, (*order, *(a for a in range(part.ndim) if a not in mine)))
    return part.reshape([sizes.get(a, 1) for a in range(ndim)])
