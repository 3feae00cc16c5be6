"""A matmul in a function: its path, its operands, and its rule."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.ops import DotConfig, Placement
from octavo.ops.product import UNPLACED
from octavo.qarray import Quantizer
from octavo.rules import QuantizationRule
from octavo.transform.weights import Origin, stored_quantizer


@dataclasses.dataclass(frozen=True)
class Site:
    """A matmul and what the rules decide about it."""

    path: str
    op: str
    op_id: str
    lhs: tuple[tuple[int, ...], str]
    rhs: tuple[tuple[int, ...], str]
    out: tuple[tuple[int, ...], str]
    origins: tuple[Origin, Origin]
    numbers: Any
    trips: int
    flops: int
    quantized: tuple[bool, bool]
    """Which operands are QArrays already."""
    gradient: str | None = None
    """ "dlhs" or "drhs" where the function holds its own backward pass."""
    rule: QuantizationRule | None = None
    config: DotConfig | None = None
    placement: Placement = UNPLACED
    reason: str | None = None
    """The reason why it stays in float, if it does."""

    @property
    def weights(self) -> tuple[bool, bool]:
        """Which operands count as weights: parameters, and constants multiplied by an activation."""
        left, right = self.origins
        lhs, rhs = left.is_weight, right.is_weight
        if not lhs and not rhs:
            lhs, rhs = left.constant and not right.constant, right.constant and not left.constant
        return lhs and not rhs, rhs

    @property
    def leaf(self) -> str | None:
        """The parameter that is an operand, if one is."""
        lhs, rhs = self.weights
        origin = self.origins[1] if rhs else self.origins[0] if lhs else None
        return origin.leaves[0] if origin is not None and origin.leaves else None

    @property
    def candidates(self) -> tuple[str, ...]:
        """The paths that a rule may match: that of the module, and that of the parameter."""
        return (self.path,) if self.leaf is None else (self.path, self.leaf)


def site_quantizer(site: Site, shapes: Mapping[str, tuple[int, ...]]) -> Quantizer | None:
    """The quantizer of the stored parameter of a site; None if there is no parameter or it stays in float."""
    lhs, rhs = site.weights
    if site.config is None or not (lhs or rhs):
        return None
    operand = site.config.fwd.rhs if rhs else site.config.fwd.lhs
    origin = site.origins[1] if rhs else site.origins[0]
    if operand is None or not origin.is_stored or site.leaf is None:
        return None
    if site.config.fwd.rotate is not None or site.config.sparsity is not None:
        # The codes are those of the rotated or masked weight, so the stored weight stays in float.
        return None
    shape = (site.rhs if rhs else site.lhs)[0]
    how = operand.quantizer(len(shape), **operand_axes(site, right=rhs))
    return stored_quantizer(how, origin, shape, len(shapes[site.leaf]))


def operand_axes(site: Site, *, right: bool) -> dict[str, tuple[int, ...]]:
    """Which axes of an operand are contracted and which are batch axes."""
    side = 1 if right else 0
    if site.op == "conv_general_dilated":
        spec = site.numbers.rhs_spec if right else site.numbers.lhs_spec
        return {"contracting": tuple(a for a in range(len(spec)) if a != spec[0]), "batch": ()}
    numbers = getattr(site.numbers, "dot_dimension_numbers", site.numbers)
    return {"contracting": tuple(numbers[0][side]), "batch": tuple(numbers[1][side])}
