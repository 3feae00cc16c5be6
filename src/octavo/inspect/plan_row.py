"""One row of a plan: what the rules do to a matmul."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from octavo.ops import DotConfig, Matmul, Operand, lowering_of
from octavo.qarray import QArray
from octavo.transform.site import Site, operand_axes


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
    collective_bytes: int | None = None


def make_row(site: Site, rule: int | None) -> PlanRow:
    """The row of a site; `rule` is the index of its rule."""
    config = site.config
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in (site.lhs, site.rhs))
    before, after = (size * site.trips for size in _bytes(site))
    return PlanRow(
        path=site.path,
        op=site.op if site.gradient is None else f"{site.op} ({site.gradient})",
        weight=site.leaf,
        shapes=f"{_shape(lhs.shape)} x {_shape(rhs.shape)}",
        rule=rule,
        fwd=_types(config.fwd) if config else f"{site.lhs[1]} x {site.rhs[1]}",
        dlhs=_gradient(config, config.dlhs, config.fwd.rhs) if config else "",
        drhs=_gradient(config, config.drhs, config.fwd.lhs) if config else "",
        scales=_scales(site) if config else "",
        lowering=_lowering(site, lhs, rhs) if config else "float",
        bytes_before=before,
        bytes_after=after,
        flops=site.flops,
        times=site.trips,
        reason=site.reason,
    )


def _name(operand: Operand | None) -> str:
    return "float" if operand is None else operand.qtype.name


def _types(matmul: Matmul) -> str:
    return f"{_name(matmul.lhs)} x {_name(matmul.rhs)}"


def _gradient(config: DotConfig, matmul: Matmul, saved: Operand | None) -> str:
    """The types of a gradient: of the cotangent, and of the residual as the matmul takes it."""
    if matmul.lhs is None and matmul.rhs is None and matmul.residual == "original":
        return "float"
    residual = saved if matmul.residual == "reuse" else matmul.rhs
    return f"{_name(matmul.lhs)} x {_name(residual)}"


def _quantized(operand: Operand | None, shape: tuple[int, ...], dtype: str, axes: dict[str, Any]) -> Any:
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if operand is None:
        return x
    quantizer = operand.quantizer(len(shape), **axes)
    return jax.eval_shape(lambda a: quantizer.quantize(a, key=jax.random.key(0)), x)


def _sides(site: Site) -> tuple[Any, Any]:
    assert site.config is not None
    fwd = site.config.fwd
    left = _quantized(fwd.lhs, *site.lhs, operand_axes(site, right=False))
    return left, _quantized(fwd.rhs, *site.rhs, operand_axes(site, right=True))


def _scales(site: Site) -> str:
    shapes = [_shape(x.scale.shape) if isinstance(x, QArray) else "-" for x in _sides(site)]
    return " ".join(shapes)


def _lowering(site: Site, lhs: Any, rhs: Any) -> str:
    assert site.config is not None
    if site.op not in ("dot_general", "einsum"):
        return "int8" if all(isinstance(x, QArray) and x.qvalue.dtype == jnp.int8 for x in _sides(site)) else ""
    return lowering_of(site.config, *_sides(site), site.numbers)


def _bytes(site: Site) -> tuple[int, int]:
    """The bytes of the weight, or of both operands, before and after."""
    lhs, rhs = site.weights
    chosen = [1] if rhs else [0] if lhs else [0, 1]
    types = (site.lhs, site.rhs)
    before = sum(math.prod(types[i][0]) * jnp.dtype(types[i][1]).itemsize for i in chosen)
    if site.config is None:
        return before, before
    sides = _sides(site)
    return before, sum(_nbytes(sides[i]) for i in chosen)


def _nbytes(x: Any) -> int:
    if isinstance(x, QArray):
        packed = jax.eval_shape(lambda q: q.pack(), x) if x.qtype.bits < 8 else x
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(packed))
    return math.prod(x.shape) * x.dtype.itemsize


def _shape(shape: Sequence[int]) -> str:
    return "(" + ",".join(map(str, shape)) + ")"
