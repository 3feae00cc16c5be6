"""Collective bytes of a partitioned program, read from its HLO.

Bytes are those that one device sends by the ring algorithm among n devices: (n - 1) / n of the result of an all-gather
or of the operand of a reduce-scatter or all-to-all, twice that for an all-reduce, and all of a permuted array. The body
of a loop counts by its trip count; of branches, the costliest counts.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from octavo._text import format_bytes_si, format_table
from octavo.hlo.dataflow import EXCHANGES, GradientFlow, WeightFlow
from octavo.hlo.text import Instruction, Module, Shape, group_size, parse
from octavo.hlo.visit import Visitor

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_STARTS = {f"{kind}-start": kind for kind in KINDS} | {kind: kind for kind in KINDS}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array of a collective.

    Attributes:
        kind: The opcode, one of `KINDS`.
        dtype: The HLO dtype of the array.
        shape: The shape of the result on one device.
        group_size: The number of devices in a replica group.
        count: How often a run of the program executes it.
        name: The name of the traced operation.
        weights: The arguments whose values, or values computed from them alone, it all-gathers; several if one
            array, or one instruction, combines them.
        is_gradient: Whether it becomes the new value of a weight.

    >>> Collective("all-gather", "s8", (128, 512), 8, count=4).bytes
    57344
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    group_size: int
    count: int = 1
    name: str = ""
    weights: tuple[str, ...] = ()
    is_gradient: bool = False

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind is one of {KINDS}, got {self.kind!r}")

    @property
    def is_weight(self) -> bool:
        """Whether it all-gathers weights."""
        return bool(self.weights)

    @property
    def bytes(self) -> int:
        """The bytes that one device sends in one execution."""
        n, size = self.group_size, Shape(self.dtype, self.shape).bytes
        if self.kind == "collective-permute":
            return size
        if self.kind == "reduce-scatter":  # the shape is the result's, a shard of the operand's
            return (n - 1) * size
        return (2 if self.kind == "all-reduce" else 1) * (n - 1) * size // n

    @property
    def total(self) -> int:
        """The bytes that one device sends in a run of the program."""
        return self.count * self.bytes


@dataclasses.dataclass(frozen=True)
class Communication:
    """The collectives of a program; printed as a table.

    Attributes:
        collectives: All of them.
        unknown_loops: Loops of unknown trip count, whose bodies count once.

    >>> print(Communication((Collective("all-gather", "s8", (128, 512), 8, count=4, weights=("params['w']",)),)))
    kind        type  times  among  bytes   of which weights
    all-gather  s8    4      8      229 kB  229 kB
    a device sends 229 kB, 229 kB of it weights
    """

    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...] = ()

    def total(self, kind: str | None = None, dtype: str | None = None) -> int:
        """The bytes that one device sends, of a kind or a dtype or in all."""
        return sum(c.total for c in self.collectives if kind in (None, c.kind) and dtype in (None, c.dtype))

    def weights(self) -> int:
        """The bytes of all-gathered weights, scales included."""
        return sum(c.total for c in self.collectives if c.is_weight)

    def gradients(self) -> int:
        """The bytes of gradients, known where new weights reuse the buffers of donated ones."""
        return sum(c.total for c in self.collectives if c.is_gradient)

    def by_weight(self) -> dict[str, int]:
        """Bytes by the argument that is all-gathered; collectives of several arguments are left out."""
        found: dict[str, int] = {}
        for c in self.collectives:
            if len(c.weights) == 1:
                found[c.weights[0]] = found.get(c.weights[0], 0) + c.total
        return found

    def by_kind(self) -> dict[str, int]:
        """Bytes by kind of collective."""
        return {kind: self.total(kind) for kind in KINDS if any(c.kind == kind for c in self.collectives)}

    def by_dtype(self, kind: str | None = None) -> dict[str, int]:
        """Bytes by dtype, the most first, of a kind or in all."""
        found = {c.dtype: self.total(kind, c.dtype) for c in self.collectives if kind in (None, c.kind)}
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    def line(self) -> str:
        """One line: the total, by kind and dtype, and by use as far as that is known.

        >>> Communication((Collective("all-gather", "s8", (128, 512), 8, count=4, weights=("params['w']",)),)).line()
        'a device sends 229 kB: all-gather 229 kB (s8); weights 229 kB'
        """
        kinds = []
        for kind, size in self.by_kind().items():
            types = {dtype: part for dtype, part in self.by_dtype(kind).items() if part}
            each = [f"{dtype} {format_bytes_si(part)}" if len(types) > 1 else dtype for dtype, part in types.items()]
            kinds += [f"{kind} {format_bytes_si(size)} ({', '.join(each)})"] if size else []
        uses = {"weights": self.weights(), "gradients": self.gradients()}
        known = {use: size for use, size in uses.items() if size}
        if known and (rest := self.total() - sum(known.values())):
            known["the rest"] = rest
        line = f"a device sends {format_bytes_si(self.total())}" + (f": {', '.join(kinds)}" if kinds else "")
        each = ", ".join(f"{use} {format_bytes_si(size)}" for use, size in known.items())
        return line + (f"; {each}" if each else "")

    def summary(self) -> dict[str, Any]:
        """The sums as plain values."""
        by_kind = {kind: self.by_dtype(kind) for kind in self.by_kind()}
        return {"line": self.line(), **self._sums(), "by_kind": by_kind, "unknown_loops": list(self.unknown_loops)}

    def to_dict(self) -> dict[str, Any]:
        """The collectives and their sums as plain values."""
        return {**self._sums(), "by_kind": self.by_kind(), "by_dtype": self.by_dtype(), **dataclasses.asdict(self)}

    def _sums(self) -> dict[str, int]:
        return {"total": self.total(), "weights": self.weights(), "gradients": self.gradients()}

    def _table(self) -> list[tuple[str, ...]]:
        groups: dict[tuple[str, str, int], list[Collective]] = {}
        for c in self.collectives:
            groups.setdefault((c.kind, c.dtype, c.group_size), []).append(c)
        rows: list[tuple[str, ...]] = [("kind", "type", "times", "among", "bytes", "of which weights")]
        for (kind, dtype, size), group in sorted(groups.items(), key=lambda g: -sum(c.total for c in g[1])):
            weights = sum(c.total for c in group if c.is_weight)
            sizes = format_bytes_si(sum(c.total for c in group)), format_bytes_si(weights) if weights else ""
            rows.append((kind, dtype, str(sum(c.count for c in group)), str(size), *sizes))
        return rows

    def __str__(self) -> str:
        lines = format_table(self._table() if self.collectives else [])
        lines += [f"counted once, unknown trip count: {name}" for name in self.unknown_loops]
        total, weights = format_bytes_si(self.total()), format_bytes_si(self.weights())
        return "\n".join([*lines, f"a device sends {total}, {weights} of it weights"])


def read_communication(text: str | Module, *, weights: str | Callable[[str], bool] = "params") -> Communication:
    """The collectives of a program.

    Args:
        text: Its HLO text, such as `compiled.as_text()` or that of `partitioned_hlo`, or the parsed module.
        weights: Decides by name which arguments of the program hold weights: a word that is part of the name, as
            `params` is of `state.params['wo']['kernel']`, or a predicate.

    Returns:
        Its collectives. One is of weights if it all-gathers values computed from weights alone, and of gradients if its
        result becomes a weight; see `octavo.hlo.dataflow`.
    """
    module = parse(text) if isinstance(text, str) else text
    if isinstance(weights, str):
        pattern = re.compile(rf"\b{re.escape(weights)}\b")
        weights = lambda name: bool(pattern.search(name))  # noqa: E731
    reader = _Reader(WeightFlow(module, weights), GradientFlow(module, weights))
    visitor = Visitor(module, reader.read, cost=lambda c: c.bytes)
    found = tuple(dataclasses.replace(c, count=count) for c, count in visitor.visit())
    return Communication(found, tuple(dict.fromkeys(visitor.unknown_loops)))


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads the collectives among instructions."""

    weight_flow: WeightFlow
    gradient_flow: GradientFlow

    def read(self, computation: str, line: Instruction) -> Iterable[Collective]:
        """The arrays of an instruction, if it is a collective."""
        return self._collectives(computation, line) if line.opcode in _STARTS else ()

    def _collectives(self, computation: str, line: Instruction) -> Iterator[Collective]:
        kind = _STARTS[line.opcode]
        size = group_size(line.attributes) if kind != "collective-permute" else 2
        shapes = line.shapes
        if line.opcode == "all-gather-start":  # operands, then results
            shapes = shapes[len(shapes) // 2 :]
        elif line.opcode == "collective-permute-start":
            shapes = shapes[len(line.operands) : 2 * len(line.operands)]
        weights = self.weight_flow.weights(computation, line) if kind == "all-gather" else ()
        num_shards = size if kind in EXCHANGES else 1
        for n, shape in enumerate(shapes):
            own = weights[n] if n < len(weights) else ()
            is_gradient = not own and self.gradient_flow.is_gradient(computation, line, n, num_shards=num_shards)
            if size > 1:
                yield Collective(kind, shape.dtype, shape.dims, size, 1, line.op_name, own, is_gradient)
