"""What is known about the tensors of a model that LiteRT quantizes, and how it is followed through equations."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from octavo.qarray import Quantizer
from octavo.rules import QuantizationRule
from octavo.transform.frame import Frame, Value
from octavo.transform.jaxpr import Equation, Literal, scope
from octavo.transform.site import Site
from octavo.transform.weights import CONSTANT

MARK = "litert_"
"""Functions whose names begin with it mark the inputs and outputs of the model and of its normalizations."""


@dataclasses.dataclass(eq=False)
class Tensor:
    """What readers of a value have to know.

    Attributes:
      rule: The rule by which it is quantized, if the operation that computed it has one for its result.
      fixed_range: Its range, if it does not depend on data.
      fusible: Whether adding a constant to it belongs to the operation that computed it.
      is_quantized: Whether its values are those of a quantized tensor already.
      quantized: The fake-quantized values, by rule.
      source: The node that it is broadcast from.
    """

    rule: QuantizationRule | None = None
    fixed_range: tuple[float, float] | None = None
    fusible: bool = False
    is_quantized: bool = False
    quantized: dict[QuantizationRule, Any] = dataclasses.field(default_factory=dict)
    source: "tuple[Node, Equation] | None" = None


class Node(NamedTuple):
    """A value and its tensor."""

    value: Value
    tensor: Tensor

    @property
    def is_activation(self) -> bool:
        return not self.value.origin.leaves and not self.value.origin.constant


class Place(NamedTuple):
    """An operation: the path of its module and its name there, and its rule."""

    path: str
    op_id: str
    rule: QuantizationRule | None


_VALUES_KEPT = (
    "reshape", "transpose", "broadcast_in_dim", "slice", "squeeze", "rev", "dynamic_slice", "stop_gradient",
    "convert_element_type", "concatenate", "gather", "split", "copy", "copy_p",
)  # fmt: skip
_LINEAR = ("mul", "add", "sub", "div", "neg")


def follow_tensor(eqn: Equation, nodes: Sequence[Node]) -> Tensor:
    """The tensor of a result that is not quantized here."""
    name, tensors = eqn.primitive.name, [n.tensor for n in nodes if isinstance(n.value.data, jax.Array)]
    activations = [n for n in nodes if n.is_activation]
    if name in _VALUES_KEPT:
        last = {
            field: next((v for t in reversed(tensors) if (v := getattr(t, field))), None)
            for field in ("rule", "fixed_range", "fusible")
        }
        quantized = bool(activations) and all(t.is_quantized for t in tensors)
        source = (nodes[0], eqn) if _is_broadcast(eqn, nodes) else None
        return Tensor(last["rule"], last["fixed_range"], bool(last["fusible"]), quantized, source=source)
    if name in _LINEAR and len(activations) == 1 and not (name == "div" and activations[0] is nodes[1]):
        tensor = activations[0].tensor
        return Tensor(tensor.rule, fusible=tensor.fusible)
    return Tensor()


def _is_broadcast(eqn: Equation, nodes: Sequence[Node]) -> bool:
    """Whether an equation only makes an operand fit the other one of the next operation."""
    if eqn.primitive.name not in ("broadcast_in_dim", "reshape") or len(nodes) != 1:
        return False
    shape, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape  # pyrefly: ignore
    if eqn.invars[0].aval.size != eqn.outvars[0].aval.size:  # pyrefly: ignore
        return bool(shape)
    leading = len(new) - len(shape)
    return not nodes[0].is_activation and leading > 0 and new == (1,) * leading + shape


def is_flattened(site: Site, params: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether the right operand is a weight with several output axes; a tensor of LiteRT has scales along one."""
    if not site.weights[1] or len(shape) <= 2 or "window_strides" in params:
        return False
    contract, batch = params["dimension_numbers"]
    return tuple(contract[1]) == (0,) and not any(map(len, batch))


def activation_quantizer(rule: QuantizationRule, fixed: tuple[float, float] | None, axes: Any) -> Quantizer:
    assert rule.act_qtype is not None
    method = rule.act_calibration_method or "minmax"
    if fixed is not None:
        return Quantizer(rule.act_qtype, (), calibration=f"fixed,{fixed[0]!r},{fixed[1]!r}")
    return Quantizer(rule.act_qtype, tuple(axes), calibration=method)


def result_tensor(rule: QuantizationRule | None, fixed_range: tuple[float, float] | None = None) -> Tensor:
    static = rule is not None and rule.act_qtype is not None and rule.act_static_scale
    return Tensor(rule if static else None, fixed_range)


def fill_zeros(eqn: Equation) -> Equation:
    """A lookup whose indices out of bounds give zeros: a quantized tensor has no NaN."""
    if eqn.primitive.name == "gather" and eqn.params.get("fill_value", 0) is None:
        return eqn.replace(params={**eqn.params, "fill_value": 0})
    if eqn.primitive.name == "jit":
        body = eqn.params["jaxpr"]
        return eqn.replace(params={**eqn.params, "jaxpr": body.replace(eqns=[fill_zeros(e) for e in body.eqns])})
    return eqn


def mark_of(eqn: Equation) -> str | None:
    name = eqn.params.get("name") if eqn.primitive.name == "jit" else None
    return name.removeprefix(MARK) if isinstance(name, str) and name.startswith(MARK) else None


def inside_frame(eqn: Equation, frame: Frame) -> Frame:
    return frame.inner(scope(eqn), new=frame.new)


def constant_node(x: Any) -> Node:
    return Node(Value(x, CONSTANT), Tensor())


def read_node(env: Mapping[Any, Node], atom: Any) -> Node:
    return constant_node(atom.val) if isinstance(atom, Literal) else env[atom]


def with_data(node: Node, data: Any) -> Node:
    return Node(node.value._replace(data=data), Tensor())
