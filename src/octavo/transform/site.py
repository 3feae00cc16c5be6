"""A matmul in a function: its path, its operands, and what the rules decide about it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from octavo.ops import Conv, ConvDims, Dims, Dot, DotConfig, Placement, Product, Ragged
from octavo.ops.product import UNPLACED
from octavo.qarray import Quantizer
from octavo.rules import QuantizationRule
from octavo.transform.jaxpr import KERNELS
from octavo.transform.matmul_flops import matmul_flops
from octavo.transform.weights import Origin, stored_quantizer

GEOMETRY = ("lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count", "batch_group_count")
"""The parameters of a convolution after its strides and padding."""


@dataclasses.dataclass(frozen=True)
class Site:
    """A matmul and what the rules decide about it."""

    path: str
    op: str
    op_id: str
    lhs: tuple[tuple[int, ...], str]
    """The shape and dtype of the left operand."""
    rhs: tuple[tuple[int, ...], str]
    out: tuple[tuple[int, ...], str]
    origins: tuple[Origin, Origin]
    weights: tuple[bool, bool]
    """Which operands count as weights: parameters, and constants multiplied by an activation."""
    leaf: str | None
    """The parameter that is an operand, if one is."""
    rule_paths: tuple[str, ...]
    """The paths that a rule may match: that of the module, and that of the parameter unless paths are strict."""
    params: Mapping[str, Any]
    """The parameters of the JAX primitive."""
    trips: int
    quantized: tuple[bool, bool]
    """Which operands are QArrays already."""
    gradient: str | None = None
    """ "dlhs" or "drhs" where the function holds its own backward pass."""
    rule: QuantizationRule | None = None
    config: DotConfig | None = None
    placement: Placement = UNPLACED
    reason: str | None = None
    """The reason why it stays in float, if it does."""
    opaque: bool = False
    """Whether it is a kernel, or in a call that is not rewritten."""
    scope: str = ""
    """The path of the operation itself, by its named scopes; for operations with configs of their own."""
    keys: int | None = None
    """Which operand of attention's scores is centered: 0 the left, 1 the right; None of other matmuls."""
    flash: str | None = None
    """Of scores on a TPU: why their attention is no flash kernel, empty if it is one."""
    note: str | None = None
    """The reason why its weight is stored in float although it is multiplied in low precision, if it is."""

    @property
    def is_adapted(self) -> bool:
        """Whether the provider's operation runs although the weight may stay in float."""
        return self.rule is not None and self.rule.adapts and self.leaf is not None and self.gradient is None

    @property
    def flops(self) -> int:
        """The FLOPs of all executions; 0 for a kernel, whose FLOPs are unknown."""
        if self.op in KERNELS:
            return 0
        # With expert parallelism every device has a buffer for all rows, but each row is computed by one expert.
        sharding = self.params.get("sharding")
        copies = 1 if sharding is None else sharding.num_devices(sharding.experts)
        return self.trips * matmul_flops(self.params, self.lhs[0], self.rhs[0], self.out[0]) // copies


def site_quantizer(site: Site, shapes: Mapping[str, tuple[int, ...]]) -> Quantizer | None:
    """The quantizer of the stored parameter of a site; None if there is no parameter or it stays in float."""
    if site.config is None or site.leaf is None:
        return None
    side = 1 if site.weights[1] else 0
    operand, origin = (site.config.fwd.lhs, site.config.fwd.rhs)[side], site.origins[side]
    if operand is None or not origin.is_stored:
        return None
    if site.config.fwd.rotate is not None or site.config.sparsity is not None:
        # The codes are those of the rotated or masked weight, so the stored weight stays in float.
        return None
    shape = (site.lhs, site.rhs)[side][0]
    quantizer = operand.quantizer(len(shape), **operand_axes(site.params, site.lhs[0], site.rhs[0])[side])
    return stored_quantizer(quantizer, origin, shape, len(shapes[site.leaf]))


def float_note(site: Site, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why the parameter of a site stays in float although its rule has a type for it; None if it does not."""
    side = 1 if site.weights[1] else 0
    if site.config is None or site.leaf is None or site.quantized[side]:
        return None
    operand, origin = (site.config.fwd.lhs, site.config.fwd.rhs)[side], site.origins[side]
    if operand is None or site_quantizer(site, shapes) is not None:
        return None
    reason = "its tiles do not fit the stored layout"
    if site.config.fwd.rotate is not None or site.config.sparsity is not None:
        reason = "it is rotated or masked before it is quantized"
    elif not origin.is_stored:
        reason = "it is scaled, concatenated or otherwise computed from before the matmul"
    return f"{', '.join(origin.leaves)} stored in float: {reason}"


def operand_axes(params: Mapping[str, Any], lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[dict[str, Any], ...]:
    """The contracted and batch axes of both operands, of these shapes, of a matmul with these parameters."""
    if "window_strides" in params:
        numbers = jax.lax.conv_dimension_numbers(lhs, rhs, params.get("dimension_numbers"))
        specs = numbers.lhs_spec, numbers.rhs_spec
        return tuple({"contracting": tuple(a for a in range(len(s)) if a != s[0]), "batch": ()} for s in specs)
    ragged = params.get("ragged_dot_dimension_numbers")
    contract, batch = params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    sides = zip(contract, batch, (len(lhs), len(rhs)), strict=True)
    return tuple({"contracting": tuple(a % n for a in c), "batch": tuple(a % n for a in b)} for c, b, n in sides)


def matmul_product(params: Mapping[str, Any], lhs: tuple[int, ...], rhs: tuple[int, ...]) -> Product:
    """The `Product` of a matmul with these parameters, for operands of these shapes."""
    if "window_strides" in params:
        geometry = {name: params[name] for name in GEOMETRY if name in params}
        return Conv(ConvDims.of(lhs, rhs, params["window_strides"], params["padding"], **geometry))
    if "ragged_dot_dimension_numbers" in params:
        return Ragged()
    return Dot(Dims.of(params["dimension_numbers"], len(lhs), len(rhs)))
