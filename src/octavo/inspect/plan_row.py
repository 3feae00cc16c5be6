"""One row of a plan: what the rules do to a matmul."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from octavo.ops import Matmul, Operand, lowering_of
from octavo.qarray import QArray
from octavo.transform.site import Site, operand_axes
from octavo.transform.softmax import softmax_operand


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """What the rules do to one matmul.

    Attributes:
        path: The path of its module.
        op: The operation, such as "dot_general".
        weight: The name of the parameter that is an operand, if one is.
        shapes: The shapes of both operands, as text.
        rule: The index of the rule that applies.
        fwd: The types of the operands in the forward pass.
        dlhs: The types of cotangent and residual in the gradient with respect to the left operand.
        drhs: The same for the right operand.
        scales: The shapes of the scales of both operands.
        lowering: How the forward matmul runs; empty where that depends on the platform.
        bytes_before: The bytes of the weight in float; of both operands if there is no weight.
        bytes_after: The same as the matmul reads it.
        flops: The FLOPs of all executions in the forward pass.
        times: The number of executions.
        reason: Why it stays in float, if it does.
        note: Why the weight is stored in float although it is multiplied in low precision, if it is; what a matmul of
            two activations is recognized as, if its rule is for attention.
        collective_bytes: The bytes of the weight that a device sends; on the first row of that weight, if known.
    """

    path: str
    op: str
    weight: str | None
    shapes: str
    rule: int | None
    fwd: str
    dlhs: str
    drhs: str
    scales: str
    lowering: str
    bytes_before: int
    bytes_after: int
    flops: int
    times: int
    reason: str | None
    note: str | None = None
    collective_bytes: int | None = None


def make_row(site: Site, rule: int | None) -> PlanRow:
    """The row of a site; `rule` is the index of its rule."""
    config, operands, (lhs, rhs) = site.config, _operands(site), site.weights
    # The bytes of the weight, or of both operands.
    chosen = [1] if rhs else [0] if lhs else [0, 1]
    before = sum(
        math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in ((site.lhs, site.rhs)[i] for i in chosen)
    )
    after = before if site.note else sum(_nbytes(operands[i]) for i in chosen)
    return PlanRow(
        path=site.path,
        op=site.op if site.gradient is None else f"{site.op} ({site.gradient})",
        weight=site.leaf,
        shapes=f"{_shape(site.lhs[0])} x {_shape(site.rhs[0])}",
        rule=rule,
        fwd=_types(config.fwd) if config else f"{site.lhs[1]} x {site.rhs[1]}",
        dlhs=_gradient(config.dlhs, config.fwd.rhs) if config else "",
        drhs=_gradient(config.drhs, config.fwd.lhs) if config else "",
        scales=" ".join(_shape(x.scale.shape) if isinstance(x, QArray) else "-" for x in operands) if config else "",
        lowering=_lowering(site, operands) if config else "float",
        bytes_before=before * site.trips,
        bytes_after=after * site.trips,
        flops=site.flops,
        times=site.trips,
        reason=site.reason,
        note=site.note or _attention(site),
    )


def _attention(site: Site) -> str | None:
    """What a matmul is recognized as; None if its rule is not for attention."""
    if site.config is None or site.rule is None or not site.rule.attention or any(site.weights):
        return None
    if site.keys is not None:
        kernel = "" if site.flash is None else f"; no flash kernel: {site.flash}" if site.flash else "; a flash kernel"
        return f"scores: the mean of keys ({('lhs', 'rhs')[site.keys]}) is subtracted{kernel}"
    softmax = softmax_operand(site.origins)
    return "no softmax found" if softmax is None else f"{'rhs' if softmax[1] else 'lhs'} is a softmax"


def _name(operand: Operand | None) -> str:
    return "float" if operand is None else operand.qtype.name


def _types(matmul: Matmul) -> str:
    return f"{_name(matmul.lhs)} x {_name(matmul.rhs)}"


def _gradient(matmul: Matmul, saved: Operand | None) -> str:
    """The types of a gradient: of the cotangent, and of the residual as the matmul takes it."""
    if matmul.lhs is None and matmul.rhs is None and matmul.residual == "original":
        return "float"
    residual = saved if matmul.residual == "reuse" else matmul.rhs
    return f"{_name(matmul.lhs)} x {_name(residual)}"


def _operands(site: Site) -> list[Any]:
    """Both operands as the matmul takes them, as shapes: QArrays where they are quantized."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in (site.lhs, site.rhs)]
    if site.config is None:
        return arrays
    axes, fwd = operand_axes(site.params, site.lhs[0], site.rhs[0]), site.config.fwd
    for side, operand in enumerate((fwd.lhs, fwd.rhs)):
        if operand is not None:
            quantizer = operand.quantizer(arrays[side].ndim, **axes[side])
            quantize = lambda x, quantizer=quantizer: quantizer.quantize(x, key=jax.random.key(0))  # noqa: E731
            arrays[side] = jax.eval_shape(quantize, arrays[side])
    return arrays


def _lowering(site: Site, operands: list[Any]) -> str:
    assert site.config is not None
    if site.op not in ("dot_general", "einsum"):
        return "int8" if all(isinstance(x, QArray) and x.qvalue.dtype == jnp.int8 for x in operands) else ""
    return lowering_of(site.config, operands[0], operands[1], site.params["dimension_numbers"])


def _nbytes(x: Any) -> int:
    packed = jax.eval_shape(lambda q: q.pack(), x) if isinstance(x, QArray) and x.qtype.bits < 8 else x
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(packed))


def _shape(shape: Sequence[int]) -> str:
    return "(" + ",".join(map(str, shape)) + ")"
