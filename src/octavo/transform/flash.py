"""Finding attention that the flash kernel for TPUs computes.

    S = number * Q K^T,   S = where(row >= column, S, very small),   O = softmax(S) V

The equations of a jaxpr are followed from the scores to the context. Axes are known as factors of those of the scores,
so operands may have any order of axes. Parts such as `jnp.where` may be calls.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from octavo._typing import Array
from octavo.kernels.flash_attention import flash_attention, unsupported
from octavo.ops import DotConfig, Operand
from octavo.ops.lowerings.cpu_ffi import is_partitioned
from octavo.ops.lowerings.tokamax import is_local
from octavo.transform.axes import Axes, Factor, axes_of
from octavo.transform.jaxpr import Equation, Jaxpr, Literal
from octavo.transform.masks import REARRANGED, Mask, mask_of
from octavo.transform.softmax import called_body

FEWEST = -1e9
"""Scores of at most this are masked."""
_OUT = Factor(-1, 1, 0)
"""The axis of values in the context, which scores do not have."""


class Step(NamedTuple):
    """A value between scores and context: its kind, and its axes as factors of those of the scores."""

    kind: str
    axes: Axes
    scale: float = 1.0
    causal: bool = False


class UnsupportedError(Exception):
    """Why the kernel does not compute what follows some scores."""


class Flash(NamedTuple):
    """Attention in a jaxpr that the kernel computes.

    Attributes:
        inside: The indices of its equations, from the scores to the last, which the kernel replaces.
        weighted: The index of the matmul with the values.
        value: The side of the values in it.
        orders: The axes of queries, keys and values in the order [batch..., length, heads..., dim].
        batch: How many of them come before the length.
        out: The order in which the context has those axes of queries.
        scale: What scores are multiplied by.
        causal: Whether they are masked.
    """

    inside: tuple[int, ...]
    weighted: int
    value: int
    orders: tuple[tuple[int, ...], ...]
    batch: int
    out: tuple[int, ...]
    scale: float
    causal: bool

    def arrange(self, operands: Sequence[Any]) -> list[Any]:
        """Queries, keys and values as the kernel takes them."""
        moved = [jnp.transpose(x, order) for x, order in zip(operands, self.orders, strict=True)]
        return [x.reshape(math.prod(x.shape[: self.batch]), x.shape[self.batch], -1, x.shape[-1]) for x in moved]

    def run(self, operands: Sequence[Array], aval: Any) -> Array:
        """The context by the kernel, as the last equation gives it."""
        context = flash_attention(*self.arrange(operands), causal=self.causal, scale=self.scale)
        q, order = operands[0], self.orders[0]
        context = context.reshape([q.shape[axis] for axis in order])
        return context.transpose(self.out).reshape(aval.shape).astype(aval.dtype)

    def unsupported(self, operands: Sequence[Any]) -> str | None:
        """Why the kernel does not take these shapes; None if it does."""
        shapes = jax.eval_shape(lambda *x: self.arrange(x), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands))
        return unsupported(*(x.shape for x in shapes))


def config_reason(config: DotConfig | None) -> str | None:
    """Why the kernel does not compute scores with this config; None if it does."""
    if is_partitioned() or not is_local():
        return "XLA cannot partition the kernel: use jax.shard_map, or one device"
    plain = Operand("int8")
    if config is None or any(o != plain for o in (config.fwd.lhs, config.fwd.rhs, config.dlhs.lhs, config.drhs.lhs)):
        return "the rule is not int8 with measured ranges in all three matmuls"
    if any(m.rotate or m.smooth or m.residual != "reuse" for m in (config.fwd, config.dlhs, config.drhs)):
        return "operands are rotated, smoothed or saved in float"
    return None


def find_flash(jaxpr: Jaxpr, n: int, keys: int) -> Flash:
    """The attention whose scores are equation `n`, with the keys as this operand.

    Raises:
        UnsupportedError: The kernel does not compute it; the message says why.
    """
    walk = _Walk(jaxpr, n, keys)
    walk.follow(jaxpr.eqns[:n], None)  # masks
    walk.follow(jaxpr.eqns[n + 1 :], n + 1)
    return walk.result()


class _Walk:
    """Follows scores to the context."""

    def __init__(self, jaxpr: Jaxpr, n: int, keys: int):
        self.jaxpr, self.eqn, self.keys = jaxpr, jaxpr.eqns[n], keys
        contract, batch = self.eqn.params["dimension_numbers"]
        lhs: Any = self.eqn.invars[0]
        out: Any = self.eqn.outvars[0]
        self.shape, self.batch, left = out.aval.shape, len(batch[0]), lhs.aval.ndim - len(contract[0])
        sides = list(range(self.batch, left)), list(range(left, len(self.shape)))
        if len(contract[0]) > 1 or len(sides[keys]) != 1:
            raise UnsupportedError("keys have more than one axis of tokens or of channels")
        self.queries, self.column = sides[1 - keys], sides[keys][0]
        self.known: dict[Any, Any] = {out: Step("scores", axes_of(self.shape))}
        self.inside, self.row, self.done = [n], cast(int | None, None), cast(Step | None, None)
        self.weighted, self.value, self.value_axes = n, 1, cast(dict[int, int], {})

    def read(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            return Mask("number", (), float(atom.val)) if jnp.ndim(atom.val) == 0 else None
        return self.known.get(atom)

    def follow(self, eqns: Sequence[Equation], first: int | None) -> None:
        """Follow equations, those of the jaxpr itself from index `first`."""
        for at, eqn in enumerate(eqns):
            found = [self.read(atom) for atom in eqn.invars]
            steps = any(isinstance(x, Step) for x in found)
            if (self.done and not steps) or (found and not any(found)):
                continue
            if self.done:
                raise UnsupportedError("scores are used outside of the softmax")
            if first is not None and steps:
                self.inside.append(first + at)
            body = called_body(eqn)
            if body is not None:
                pairs = zip(body.invars, found, strict=True)
                self.known |= {inner: x for inner, x in pairs if x is not None}
                self.follow(body.eqns, None)
                results = [self.read(atom) for atom in body.outvars]
            elif eqn.primitive.name == "dot_general" and steps:
                results = [self.values(eqn, found, at if first is None else first + at, nested=first is None)]
            else:
                results = [self.step(eqn, found) if steps else mask_of(eqn, found)] * len(eqn.outvars)
            self.known |= {var: x for var, x in zip(eqn.outvars, results, strict=True) if x is not None}
            last = results[0] if results else None
            if isinstance(last, Step) and last.kind == "context":
                self.done = last
                del self.known[eqn.outvars[0]]

    def step(self, eqn: Equation, found: list[Any]) -> Step:
        name, steps = eqn.primitive.name, [x for x in found if isinstance(x, Step)]
        kinds = tuple(x.kind if isinstance(x, Step) else "" for x in found)
        step: Step = steps[0]
        if name in REARRANGED and kinds[0] and (axes := REARRANGED[name](step.axes, eqn)) is not None:
            return step._replace(axes=axes)
        if name == "sub" and kinds == ("scores", "top"):
            return step._replace(kind="shifted")
        if name == "exp" and kinds == ("shifted",):
            return step._replace(kind="exp")
        if name in ("reduce_max", "reduce_sum") and kinds[0] == {"reduce_max": "scores", "reduce_sum": "exp"}[name]:
            gone = eqn.params["axes"]
            if [step.axes[axis] for axis in gone] == [self.full(self.column)]:
                left = tuple(axis for at, axis in enumerate(step.axes) if at not in gone)
                return step._replace(kind="top" if name == "reduce_max" else "total", axes=left)
        if name == "div" and kinds in (("exp", "total"), ("sum", "total")) and steps[0][2:] == steps[1][2:]:
            return step._replace(kind="weights" if kinds[0] == "exp" else "context")
        others = [x for x in found if isinstance(x, Mask)]
        if others and len(steps) == 1 and len(others) == len(found) - 1:
            number = others[0].number if others[0].kind == "number" else None
            if name == "max" and step.kind == "top" and number == -math.inf:
                return step
            scaled = name == "mul" or (name == "div" and kinds[0])
            if scaled and step.kind == "scores" and number and not step.causal:
                return step._replace(scale=step.scale * (number if name == "mul" else 1 / number))
            low = others[-1].kind == "number" and others[-1].number <= FEWEST
            if name == "select_n" and kinds == ("", "", "scores") and low:
                return self.masked(step, found[0])
        raise UnsupportedError(
            f"{name} of {', '.join(filter(None, kinds))}: only a number and a causal mask change the scores"
        )

    def masked(self, step: Step, mask: Mask) -> Step:
        if mask.kind == "number" and mask.number:
            return step
        places = {digit[0].axis: at for at, digit in enumerate(mask.axes) if digit}
        if mask.kind != "triangle" or len(places) != 2:
            raise UnsupportedError("the mask is not causal")
        row, column = (step.axes[places[axis]] for axis in (0, 1))
        if column != self.full(self.column) or len(row) != 1 or row != self.full(row[0].axis):
            raise UnsupportedError("the mask is not causal")
        self.row = row[0].axis
        return step._replace(causal=True)

    def values(self, eqn: Equation, found: list[Any], at: int, *, nested: bool) -> Step:
        """The matmul with the values."""
        side = 0 if isinstance(found[0], Step) else 1
        step: Step = found[side]
        value: Any = eqn.invars[1 - side]
        contract, batch = eqn.params["dimension_numbers"]
        if nested or found[1 - side] is not None or isinstance(value, Literal) or step.kind not in ("exp", "weights"):
            raise UnsupportedError("what is multiplied is not a softmax and values")
        if [step.axes[a] for a in contract[side]] != [self.full(self.column)]:
            raise UnsupportedError("values are not contracted over the keys")
        labels = [step.axes[a] for a in batch[side]]
        if sorted(labels) != [self.full(a) for a in range(self.batch)]:
            raise UnsupportedError("keys and values have different batch axes")
        axes = {label[0].axis: a for label, a in zip(labels, batch[1 - side], strict=True)}
        channels = [a for a in range(value.aval.ndim) if a not in (*batch[1 - side], *contract[1 - side])]
        if len(channels) != 1:
            raise UnsupportedError("values have more than one axis of channels")
        self.value_axes = {**axes, self.column: contract[1 - side][0], _OUT.axis: channels[0]}
        self.weighted, self.value = at, 1 - side
        rest = [a for a in range(len(step.axes)) if a not in (*batch[side], *contract[side])]
        free = {side: tuple(step.axes[a] for a in rest), 1 - side: ((_OUT,),)}
        kind = "context" if step.kind == "weights" else "sum"
        return step._replace(kind=kind, axes=(*labels, *free[0], *free[1]))

    def full(self, axis: int) -> tuple[Factor, ...]:
        """An axis of the scores as a whole."""
        return (Factor(axis, 1, self.shape[axis]),)

    def result(self) -> Flash:
        if not self.done:
            raise UnsupportedError("no matmul with values follows the softmax")
        last = self.done
        if any(isinstance(self.read(atom), Step) for atom in self.jaxpr.outvars):
            raise UnsupportedError("scores are used outside of the softmax")
        if self.row is None:  # without a mask: any axis of queries that has the length of the keys
            self.row = next((a for a in self.queries if self.shape[a] == self.shape[self.column]), None)
        if self.row not in self.queries:
            raise UnsupportedError("there are not as many queries as keys")
        axes = self.operand_axes()
        first = [a for a in range(self.batch) if axes[0][a] < axes[0][self.row]]
        heads = [a for a in range(self.batch) if a not in first]
        groups = [a for a in self.queries if a != self.row]
        query, key = [*first, self.row, *heads, *groups, _OUT.axis], [*first, self.column, *heads, _OUT.axis]
        orders = tuple(tuple(own[a] for a in order) for own, order in zip(axes, (query, key, key), strict=True))
        out = [query.index(factor.axis) for axis in last.axes for factor in axis if factor.size != 1]
        out += [at for at in range(len(query)) if at not in out]  # axes of size one
        inside, number = tuple(self.inside), last.scale
        return Flash(inside, self.weighted, self.value, orders, len(first), tuple(out), number, last.causal)

    def operand_axes(self) -> list[dict[int, int]]:
        """The axes of queries, keys and values by those of the scores."""
        contract, batch = self.eqn.params["dimension_numbers"]
        found = []
        for side, rest in ((1 - self.keys, self.queries), (self.keys, [self.column])):
            atom: Any = self.eqn.invars[side]
            free = [a for a in range(atom.aval.ndim) if a not in (*contract[side], *batch[side])]
            own = zip([*range(self.batch), *rest], [*batch[side], *free], strict=True)
            found.append({**dict(own), _OUT.axis: contract[side][0]})
        return [*found, self.value_axes]
