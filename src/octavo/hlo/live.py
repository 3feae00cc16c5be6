"""How much memory an HLO program needs at a time, if what is done element by element is fused with what reads it.

A compiler decides what lies where, and does so better than this. It is for programs that no compiler here finishes.
In the order of the text, products, collectives, reductions and whatever else is not done element by element write
arrays of their own, as do operands of products and collectives; each lies there until it is last read. A loop keeps its
state in place, and slices of it are updated in place.
"""

import functools
from collections.abc import Iterable

from octavo.hlo.text import Instruction, Module, shapes_of

_PRODUCTS = frozenset({"dot", "ragged-dot", "convolution"})
_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-all-")
_WRITES = _PRODUCTS | {
    "reduce", "reduce-window", "scatter", "gather", "sort", "concatenate", "pad", "custom-call", "rng-bit-generator",
    "call", "conditional", "fft", "cholesky", "triangular-solve",
}  # fmt: skip
_VIEWS = frozenset({"bitcast", "reshape", "get-tuple-element", "parameter", "constant", "iota", "broadcast", "tuple"})

_GIVEN = -1  # an argument, which is not this computation's to count

type Held = frozenset[int] | tuple[Held, ...]
"""The arrays that a value is read from, by number; a tuple has those of each of its elements."""


def peak_bytes(module: Module) -> int:
    """The most bytes that a program has in memory beside its arguments, as an estimate."""
    return _Memory(module).peak(module.entry)


class _Memory:
    def __init__(self, module: Module):
        self.module = module
        self.peak = functools.cache(self._peak)

    def _peak(self, computation: str) -> int:
        lines = self.module.computations[computation]
        return _Run(self, computation, lines).peak()


class _Run:
    """One computation, from its first line to its last."""

    def __init__(self, memory: _Memory, computation: str, lines: tuple[Instruction, ...]):
        self.memory, self.module, self.computation, self.lines = memory, memory.module, computation, lines
        self.sizes: list[int] = []
        self.born: list[int] = []
        self.last: list[int] = []
        self.inside: dict[int, int] = {}
        self.values: dict[str, Held] = {}
        read = [line.operands for line in lines if line.opcode in _PRODUCTS or line.opcode.startswith(_COLLECTIVES)]
        self.fed = {name.partition("#")[0] for operands in read for name in operands}

    def peak(self) -> int:
        """The most that is in memory at a line."""
        for at, line in enumerate(self.lines):
            self.values[line.name] = self._held(at, line)
        self._read(len(self.lines), [self.values[self.module.root(self.computation).name]])
        changes = [0] * (len(self.lines) + 2)
        for size, born, last in zip(self.sizes, self.born, self.last, strict=True):
            changes[born] += size
            changes[last + 1] -= size
        found, now = 0, 0
        for at, change in enumerate(changes):
            now += change
            found = max(found, now + self.inside.get(at, 0))
        return found

    def _held(self, at: int, line: Instruction) -> Held:
        if line.opcode in ("parameter", "constant", "iota"):
            held = frozenset({_GIVEN}) if line.opcode == "parameter" else frozenset()
            return (held,) * len(self.module.elements(line)) if line.type.startswith("(") else held
        taken = [self._value(name) for name in line.operands]
        self._read(at, taken)
        match line.opcode:
            case "tuple":
                return tuple(taken)
            case "get-tuple-element":
                index = int(line.attributes.partition("index=")[2].partition(",")[0])
                return taken[0][index] if isinstance(taken[0], tuple) else taken[0]
            case "optimization-barrier":
                return taken[0]
            case "dynamic-update-slice" | "while":
                return self._in_place(at, line, taken[0])
            case "conditional" | "call":
                keys = ("branch_computations", "true_computation", "false_computation", "to_apply")
                self.inside[at] = max(self.memory.peak(name) for key in keys for name in line.called(key))
        if line.opcode in _WRITES or line.opcode.startswith(_COLLECTIVES):
            return self._new(at, line)
        if line.name in self.fed and line.opcode not in _VIEWS:
            return self._new(at, line)
        return frozenset().union(*map(_all, taken))

    def _in_place(self, at: int, line: Instruction, before: Held) -> Held:
        if line.opcode != "while":
            return before if _all(before) else self._new(at, line)
        (body,) = line.called("body")
        self.inside[at] = self.memory.peak(body)
        root = self.module.root(body)
        kept = [root.opcode == "tuple" and self._is_kept(body, name, i) for i, name in enumerate(root.operands)]
        elements = self.module.elements(line)
        parts = before if isinstance(before, tuple) else (before,) * len(elements)
        return tuple(
            part if same or _all(part) - {_GIVEN} else self._allocated(at, sum(s.bytes for s in shapes_of(text)))
            for part, same, text in zip(parts, kept, elements, strict=True)
        )

    def _is_kept(self, body: str, name: str, index: int) -> bool:
        """Whether a loop hands an element on as it is."""
        return self.module.place(body, name) == index

    def _value(self, operand: str) -> Held:
        name, _, index = operand.partition("#")
        found = self.values.get(name, frozenset())
        return found[int(index)] if index and isinstance(found, tuple) else found

    def _read(self, at: int, taken: Iterable[Held]) -> None:
        for number in frozenset().union(*map(_all, taken)) - {_GIVEN}:
            self.last[number] = at

    def _new(self, at: int, line: Instruction) -> Held:
        if not line.type.startswith("("):
            return self._allocated(at, sum(shape.bytes for shape in line.shapes))
        return tuple(self._allocated(at, sum(s.bytes for s in shapes_of(t))) for t in self.module.elements(line))

    def _allocated(self, at: int, size: int) -> frozenset[int]:
        self.sizes.append(size)
        self.born.append(at)
        self.last.append(at)
        return frozenset({len(self.sizes) - 1})


def _all(held: Held) -> frozenset[int]:
    return frozenset().union(*map(_all, held)) if isinstance(held, tuple) else held
