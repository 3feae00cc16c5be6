"""Evaluating a traced model with its tensors fake-quantized as LiteRT quantizes them.

A tensor of LiteRT has one scale, which belongs to the tensor and not to the operations that read it. So an operation
only says by which rule its result is quantized, and the next operation quantizes it, unless it is fused with the one
before: a matmul, the addition of its bias and a relu are one operation. Operations have the names that they have in
Qwix, and so have their statistics.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from octavo.frameworks.litert_functions import find_call
from octavo.frameworks.litert_tensors import (
    Node,
    Place,
    Tensor,
    activation_quantizer,
    constant_node,
    fill_zeros,
    follow_tensor,
    inside_frame,
    is_flattened,
    mark_of,
    read_node,
    result_tensor,
    with_data,
)
from octavo.ops import marked_product
from octavo.qarray import Quantizer
from octavo.rules import QuantizationRule, find
from octavo.transform import control_flow
from octavo.transform.evaluate import evaluate_equation
from octavo.transform.frame import Frame, Key, Value
from octavo.transform.jaxpr import (
    CUSTOM,
    MATMULS,
    Equation,
    Jaxpr,
    bind,
    custom_body,
    equation_context,
    has_matmul,
    library_function,
    scope,
)
from octavo.transform.resolve import find_site, next_op_id, scope_path
from octavo.transform.site import Site, operand_axes
from octavo.transform.state import QUANT_STATS
from octavo.transform.weights import ACTIVATION, Origin, propagate


class FakeQuant(NamedTuple):
    """How a provider quantizes a value: a weight, an activation by its own range, and one by a static range."""

    weight: Callable[[Any, Quantizer, Origin, str], Any]
    dynamic: Callable[[Any, Quantizer], Any]
    static: Callable[[Any, Quantizer, Key, Frame], Any]


@dataclasses.dataclass
class Evaluation:
    """The evaluation of one jaxpr, and of those that it calls.

    Attributes:
      fake_quant: The fake quantizations of the provider.
      per_tensor: Whether a weight has one scale.
      flat_weights: Whether a weight of several output axes is reshaped, so that its scales have one axis.
      input_range: The range of the model's inputs, if it is fixed.
      output_range: The range of its outputs.
    """

    fake_quant: FakeQuant
    per_tensor: bool
    flat_weights: bool
    input_range: tuple[float, float] | None
    output_range: tuple[float, float] | None

    def run(self, jaxpr: Jaxpr, nodes: Sequence[Node], frame: Frame, *, plain: bool = False) -> list[Node]:
        """The results; with `plain`, nothing is quantized and tensors are only followed."""
        env: dict[Any, Node] = dict(zip(jaxpr.invars, nodes, strict=True))
        env.update((var, constant_node(x)) for var, x in zip(jaxpr.constvars, jaxpr.consts, strict=True))
        number, region = 0, None
        while number < len(jaxpr.eqns):
            eqn = jaxpr.eqns[number]
            mark = mark_of(eqn)
            call = None if plain or region or mark else find_call(jaxpr.eqns, number)
            with equation_context(eqn):
                if mark is not None and mark.startswith("begin_"):
                    region, env[eqn.outvars[0]] = self._begin(mark, eqn, read_node(env, eqn.invars[0]), frame)
                elif mark is not None and mark.startswith("end_"):
                    node = read_node(env, eqn.invars[0])
                    env[eqn.outvars[0]], region = Node(node.value, region or Tensor()), None
                elif call is not None:
                    body = jaxpr.eqns[number : number + call.length]
                    env[call.output] = self._call(call, body, env, frame)
                    number += call.length - 1
                else:
                    given = [read_node(env, atom) for atom in eqn.invars]
                    step = self._follow if plain or region else self._step
                    env.update(zip(eqn.outvars, step(eqn, given, frame), strict=True))
            number += 1
        return [read_node(env, atom) for atom in jaxpr.outvars]

    def _step(self, eqn: Equation, nodes: list[Node], frame: Frame) -> list[Node]:
        """An equation, quantized if it is an operation of LiteRT."""
        name, library = eqn.primitive.name, library_function(eqn)
        if (mark := mark_of(eqn)) is not None:
            return [self._input(nodes[0]) if mark == "input" else self._output(mark, eqn, nodes[0], frame)]
        if name in MATMULS:
            return [self._matmul(eqn, nodes, frame)]
        op = _LIBRARY.get(library) if library is not None else _PRIMITIVES.get(name)
        if op is not None:
            floats = [n for n in nodes[: op.operands] if n.is_activation]
            return [op.run(self, op, eqn, nodes, frame)] if floats else self._follow(eqn, nodes, frame)
        if name == "jit":
            quantized = library is None or has_matmul(eqn.params["jaxpr"], True)
            return self.run(eqn.params["jaxpr"], nodes, inside_frame(eqn, frame), plain=not quantized)
        if name in control_flow.REWRITES or (name in CUSTOM and marked_product(custom_body(eqn)) is not None):
            return [Node(v, Tensor()) for v in evaluate_equation(eqn, [n.value for n in nodes], frame)]
        return self._follow(eqn, nodes, frame)

    def _follow(self, eqn: Equation, nodes: list[Node], frame: Frame) -> list[Node]:
        """An equation as it is."""
        if eqn.primitive.name == "jit":
            return self.run(eqn.params["jaxpr"], nodes, inside_frame(eqn, frame), plain=True)
        outs = bind(eqn, [n.value.data for n in nodes])
        origins = propagate(eqn, [n.value.origin for n in nodes])
        return [Node(Value(*pair), follow_tensor(eqn, nodes)) for pair in zip(outs, origins, strict=True)]

    # Operations.

    def _place(self, op: str, eqn: Equation, nodes: Sequence[Node], frame: Frame, *, outer: bool = False) -> Place:
        """The place of an operation; with `outer` it belongs to the module around the one that the equation is in."""
        names = "/".join(filter(None, (frame.scope, scope(eqn))))
        origins = (*(n.value.origin for n in nodes), ACTIVATION, ACTIVATION)[:2]
        path = scope_path(names, (origins[0], origins[1]), frame.context)
        path = path.rpartition("/")[0] if outer else path
        provider = frame.context.provider
        rule = find(provider.rules, path, op, weights=any(n.value.origin.leaves for n in nodes))
        if rule is not None:
            provider._used.add(rule)
            provider._matched = True
        return Place(path, next_op_id(path, op, frame), None if rule is None or rule.leaves_alone else rule)

    def _quantize(
        self, node: Node, place: Place, frame: Frame, side: str = "", rule: QuantizationRule | None = None
    ) -> Node:
        """An operand, fake-quantized: a weight by the rule of the operation, an activation by that of its tensor."""
        rule = place.rule if rule is None else rule
        value, tensor = node
        if rule is None or not isinstance(value.data, jax.Array) or value.data.dtype not in (jnp.float32, jnp.bfloat16):
            return node
        if tensor.source is not None:
            source, eqn = tensor.source
            low = self._quantize(source, place, frame, side, rule)
            return node if low is source else Node(value._replace(data=bind(eqn, [low.value.data])[0]), Tensor())
        if value.origin.is_stored:
            if rule.weight_qtype is None:
                return node
            quantizer = Quantizer(rule.weight_qtype, (), calibration=rule.act_calibration_method or "minmax")
            reader = f"{place.op_id} at {place.path!r}"
            return with_data(node, self.fake_quant.weight(value.data, quantizer, value.origin, reader))
        wanted = tensor.rule if rule.act_qtype is None or tensor.rule is not None else rule
        if rule.act_qtype is None or wanted is None or wanted.act_qtype is None or tensor.is_quantized:
            return node
        if wanted not in tensor.quantized:
            if not wanted.act_static_scale:  # dynamic ranges are those of matmuls with a weight
                return node
            quantizer = activation_quantizer(wanted, tensor.fixed_range, wanted.act_batch_axes or ())
            key = Key(QUANT_STATS, place.path, f"{place.op_id}{side}")
            tensor.quantized[wanted] = self.fake_quant.static(value.data, quantizer, key, frame)
        return with_data(node, tensor.quantized[wanted])

    def _matmul(self, eqn: Equation, nodes: list[Node], frame: Frame) -> Node:
        site = find_site(eqn, eqn.invars, [n.value for n in nodes], frame)
        provider = frame.context.provider
        provider._used.update(() if site.rule is None else (site.rule,))
        rule = None if site.rule is None or site.rule.leaves_alone or site.gradient is not None else site.rule
        params, data = dict(eqn.params), [n.value.data for n in nodes]
        if rule is not None and "ragged_dot_dimension_numbers" in params:
            raise NotImplementedError(
                f"{site.path!r}: LiteRT has no grouped matmul: exempt it by an earlier rule with skip=True"
            )
        shape = data[1].shape
        if flat := self.flat_weights and is_flattened(site, params, shape):
            data[1] = data[1].reshape(shape[0], -1)
            nodes = [nodes[0], nodes[1]._replace(value=nodes[1].value._replace(data=data[1]))]
        if rule is not None:
            data = self._operands(site, rule, params, nodes, frame)
        out = bind(eqn, data)[0]
        out = out.reshape(*out.shape[:-1], *shape[1:]) if flat else out
        origin = propagate(eqn, [n.value.origin for n in nodes])[0]
        return Node(Value(out, origin), dataclasses.replace(result_tensor(rule), fusible=True))

    def _operands(
        self, site: Site, rule: QuantizationRule, params: Mapping[str, Any], nodes: Sequence[Node], frame: Frame
    ) -> list[Any]:
        """Both operands of a matmul, fake-quantized."""
        axes = operand_axes(params, *(n.value.data.shape for n in nodes))
        place, weights = Place(site.path, site.op_id, rule), [bool(n.value.origin.leaves) for n in nodes]
        reader, found = f"{site.op_id} at {site.path!r}", []
        for side, node in enumerate(nodes):
            data = node.value.data
            channels = tuple(a for a in range(data.ndim) if a not in axes[side]["contracting"])
            if weights[side]:
                if rule.weight_qtype is not None:
                    method = rule.weight_calibration_method
                    quantizer = Quantizer(rule.weight_qtype, () if self.per_tensor else channels, calibration=method)
                    data = self.fake_quant.weight(data, quantizer, node.value.origin, reader)
            elif rule.act_qtype is not None and not rule.act_static_scale:
                if weights[1 - side]:  # only of a matmul with a weight
                    quantizer = activation_quantizer(rule, node.tensor.fixed_range, channels)
                    data = self.fake_quant.dynamic(data, quantizer)
            elif node.is_activation:
                data = self._quantize(node, place, frame, ("_lhs", "_rhs")[side]).value.data
            found.append(data)
        return found

    def _call(self, call: Any, eqns: Sequence[Equation], env: dict[Any, Node], frame: Frame) -> Node:
        """A function of JAX that is several equations."""
        node, op = env[call.input], _FUNCTIONS[call.name]
        if node.is_activation:
            place = self._place(op.name, eqns[0], [node], frame)
            node, rule = self._quantize(node, place, frame), place.rule
        else:
            rule = None
        local = collections.ChainMap({call.input: node}, env)
        for eqn in eqns:
            given = [read_node(local, atom) for atom in eqn.invars]
            local.update(zip(eqn.outvars, self._follow(eqn, given, frame), strict=True))
        out = local[call.output]
        if not node.is_activation:
            return out
        quantized = op.run is Evaluation.only_input and rule is not None and rule.act_qtype is not None
        return Node(out.value, dataclasses.replace(result_tensor(rule, op.fixed_range), is_quantized=quantized))

    def both(self, op: "Op", eqn: Equation, nodes: list[Node], frame: Frame) -> Node:
        """Operands and result have their own scales."""
        place = self._place(op.name, eqn, nodes[: op.operands], frame)
        fused = op.name == "add" and nodes[0].tensor.fusible and not nodes[1].is_activation
        if not fused and op.operands == 1:
            nodes = [self._quantize(nodes[0], place, frame), *nodes[1:]]
        elif not fused:
            low = [self._quantize(n, place, frame, side) for n, side in zip(nodes, ("_lhs", "_rhs"), strict=False)]
            nodes = [*low, *nodes[2:]]
        (out,) = self._follow(eqn, nodes, frame)
        return Node(out.value, dataclasses.replace(result_tensor(place.rule, op.fixed_range), fusible=fused))

    def only_input(self, op: "Op", eqn: Equation, nodes: list[Node], frame: Frame) -> Node:
        """The result has the scale of the first operand."""
        place = self._place(op.name, eqn, nodes[: op.operands], frame)
        quantized = place.rule is not None and place.rule.act_qtype is not None
        eqn = fill_zeros(eqn) if quantized else eqn
        (out,) = self._follow(eqn, [self._quantize(nodes[0], place, frame), *nodes[1:]], frame)
        return Node(out.value, dataclasses.replace(result_tensor(place.rule), is_quantized=quantized))

    def only_output(self, op: "Op", eqn: Equation, nodes: list[Node], frame: Frame) -> Node:
        """The operand has the scale of the result."""
        rule = self._place(op.name, eqn, nodes[: op.operands], frame).rule
        rule = nodes[0].tensor.rule if rule is None or rule.act_qtype is None else rule
        (out,) = self._follow(eqn, nodes, frame)
        return Node(out.value, result_tensor(rule))

    def in_float(self, op: "Op", eqn: Equation, nodes: list[Node], frame: Frame) -> Node:
        """LiteRT has no quantized operation."""
        self._place(op.name, eqn, nodes[: op.operands], frame)
        return Node(self._follow(eqn, nodes, frame)[0].value, Tensor())

    def silu(self, op: "Op", eqn: Equation, nodes: list[Node], frame: Frame) -> Node:
        """A sigmoid, whose range is known, and a multiplication."""
        place = self._place(op.name, eqn, nodes, frame)
        node = self._quantize(nodes[0], place, frame)
        gate = Node(node.value._replace(data=jax.nn.sigmoid(node.value.data)), Tensor(fixed_range=_UNIT))
        gate = self._quantize(gate, place, frame, "_sigmoid")
        return Node(node.value._replace(data=node.value.data * gate.value.data), result_tensor(place.rule))

    def concatenate(self, op: "Op", eqn: Equation, nodes: list[Node], frame: Frame) -> Node:
        """All operands have the scale of the result."""
        place = self._place(op.name, eqn, nodes, frame)
        ranges = {n.tensor.fixed_range for n in nodes}
        (out,) = self._follow(eqn, nodes, frame)
        return Node(out.value, result_tensor(place.rule, ranges.pop() if len(ranges) == 1 else None))

    # Inputs and outputs of the model and of its normalizations.

    def _input(self, node: Node) -> Node:
        return Node(node.value, Tensor(fixed_range=self.input_range)) if node.is_activation else node

    def _output(self, mark: str, eqn: Equation, node: Node, frame: Frame) -> Node:
        if node.is_activation:
            place = self._place(mark, eqn, [], frame)
            if self.output_range is not None:
                node.tensor.fixed_range = self.output_range
            if node.tensor.rule is not None:
                node = self._quantize(node, place, frame, rule=node.tensor.rule)
        return Node(node.value, Tensor())

    def _begin(self, mark: str, eqn: Equation, node: Node, frame: Frame) -> tuple[Tensor, Node]:
        """The input of a normalization, and the tensor that its result will be."""
        op, tensor = mark.removeprefix("begin_"), node.tensor
        if op == "dropout" or not node.is_activation:
            return dataclasses.replace(tensor, quantized={}), node
        if op == "batch_norm_op" and tensor.fusible:
            return dataclasses.replace(result_tensor(tensor.rule), fusible=True), node
        place = self._place(op, eqn, [node], frame, outer=True)
        return result_tensor(place.rule), self._quantize(node, place, frame)


class Op(NamedTuple):
    """An operation of LiteRT: its name in rules, how it is quantized, and the number of its operands."""

    name: str
    run: Callable[..., Node]
    operands: int = 1
    fixed_range: tuple[float, float] | None = None


_UNIT = (0.0, 255 / 256)
"""The range of a softmax and a sigmoid, whose scale is 1/256 in LiteRT."""
_SYMMETRIC = (-1.0, 127 / 128)
"""The range of a tanh, whose scale is 1/128."""

_both, _in, _out, _float = Evaluation.both, Evaluation.only_input, Evaluation.only_output, Evaluation.in_float
_PRIMITIVES = {
    "add": Op("add", _both, 2),
    "sub": Op("subtract", _both, 2),
    "mul": Op("multiply", _both, 2),
    "div": Op("truediv", _both, 2),
    "max": Op("maximum", _both, 2),
    "min": Op("minimum", _both, 2),
    "reduce_sum": Op("sum", _both),
    "tanh": Op("tanh", _both, fixed_range=_SYMMETRIC),
    "reduce_window_max": Op("max_pool", _in),
    "gather": Op("rewriting_take", _in, 2),
    "slice": Op("rewriting_take", _in),
    "dynamic_slice": Op("rewriting_take", _in, 2),
    "floor": Op("floor", _out),
    "concatenate": Op("concatenate", Evaluation.concatenate, 2),
    "sin": Op("sin", _float),
    "cos": Op("cos", _float),
    "eq": Op("equal", _float, 2),
}
_LIBRARY = {
    "silu": Op("silu", Evaluation.silu),
    "leaky_relu": Op("leaky_relu", _both),
    "_resize": Op("resize", _both),
    "_take": Op("take", _in, 2),
    "clip": Op("clip", _out),
    "_pad": Op("pad", _out),
    "relu": Op("call", _out),
    "relu6": Op("call", _out),
}
_FUNCTIONS = {
    "gelu": Op("gelu", _both),
    "mean": Op("mean", _both),
    "softmax": Op("softmax", _both, fixed_range=_UNIT),
    "avg_pool": Op("avg_pool", _in),
}
