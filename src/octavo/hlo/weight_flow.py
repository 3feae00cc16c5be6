"""Which values of an HLO program are weights: what an all-gather gathers is told by following the program's arguments.

A value is of the weights if some argument that holds weights went into it and no other argument did, apart from what
is spread by a broadcast: a scale, whatever it was computed from, does not make a weight into something else. What a
matrix product gives is never a weight. So codes are of the weights as the floats are that they were rounded from, also
where they were kept for the backward pass in an array that a loop fills. Each argument has a bit of its own, so that it
is known which weights a value is of.
"""

import functools
from collections.abc import Callable

from octavo.hlo.text import Instruction, Module

DATA = 1
_FRESH = frozenset({"constant", "iota", "rng", "rng-bit-generator", "partition-id", "replica-id", "after-all"})
PRODUCTS = frozenset({"dot", "convolution", "ragged-dot", "scaled-dot"})
CALLS = {"fusion": "calls", "call": "to_apply", "async-start": "calls"}

type Value = int | tuple[Value, ...]
"""What went into a value, as bits; a tuple has one for each of its elements."""


class Lineage:
    """What went into each value of a program; `is_weight` is asked for the name of each argument."""

    def __init__(self, module: Module, is_weight: Callable[[str], bool]):
        self.module = module
        self.taken: dict[tuple[str, str], tuple[int, ...]] = {}
        self._results = functools.cache(self._run)
        entry = module.computations[module.entry]
        arguments = {i.operands[0]: i for i in entry if i.opcode == "parameter"}
        named = [arguments[str(n)] for n in range(len(arguments))]
        self.names = tuple(dict.fromkeys(i.op_name for i in named if is_weight(i.op_name)))
        self._bits = {name: 2 << n for n, name in enumerate(self.names)}
        self._results(module.entry, tuple(self._argument(i) for i in named))

    def __call__(self, computation: str, instruction: Instruction) -> tuple[tuple[str, ...], ...]:
        """For each operand of an instruction the weights that it is of, by name; none if it is not of weights alone."""
        found = self.taken.get((computation, instruction.name), ())
        return tuple(() if bits & DATA else tuple(n for n in self.names if bits & self._bits[n]) for bits in found)

    def _argument(self, parameter: Instruction) -> Value:
        bit = self._bits.get(parameter.op_name, DATA)
        return (bit,) * len(parameter.shapes) if parameter.type.startswith("(") else bit

    def _run(self, computation: str, arguments: tuple[Value, ...]) -> Value:
        values: dict[str, Value] = {}

        def value(operand: str) -> Value:
            name, _, index = operand.partition("#")
            found = values.get(name, 0)
            return found[int(index)] if index and isinstance(found, tuple) else found

        for line in self.module.computations[computation]:
            taken = () if line.opcode in (*_FRESH, "parameter") else tuple(map(value, line.operands))
            key = (computation, line.name)
            before = self.taken.get(key, (0,) * len(taken))
            self.taken[key] = tuple(bits | _all(value) for bits, value in zip(before, taken, strict=True))
            values[line.name] = (
                arguments[int(line.operands[0])] if line.opcode == "parameter" else self._made(computation, line, taken)
            )
        return values[self.module.root(computation).name]

    def _made(self, computation: str, line: Instruction, taken: tuple[Value, ...]) -> Value:
        match line.opcode:
            case "tuple":
                return taken
            case "get-tuple-element":
                index = int(line.attributes.partition("index=")[2].partition(",")[0])
                return taken[0][index] if isinstance(taken[0], tuple) else taken[0]
            case "optimization-barrier" | "copy" | "bitcast" | "copy-done" | "async-done":
                return taken[0]
            case "broadcast":
                given = self.module.find(computation, line.operands[0])
                spread = given is None or "#" in line.operands[0] or given.shapes[0].size < line.shapes[0].size
                return 0 if spread else taken[0]
            case "while":
                return self._looped(line, taken[0])
            case "conditional":
                names = [*line.called("branch_computations")]
                names += [*line.called("true_computation"), *line.called("false_computation")]
                results = [self._results(n, (t,)) for n, t in zip(names, taken[1:], strict=True)]
                return functools.reduce(_joined, results)
            case opcode if opcode in CALLS and (names := line.called(CALLS[opcode])):
                return self._results(names[0], taken)
        bit = _all(taken)
        if line.opcode in PRODUCTS or (line.opcode == "custom-call" and len(taken) > 1):
            bit |= DATA
        return (bit,) * len(line.shapes) if line.type.startswith("(") else bit

    def _looped(self, line: Instruction, state: Value) -> Value:
        (body,) = line.called("body")
        while (after := _joined(state, self._results(body, (state,)))) != state:
            state = after
        return state


def _all(value: Value) -> int:
    return functools.reduce(int.__or__, map(_all, value), 0) if isinstance(value, tuple) else value


def _joined(a: Value, b: Value) -> Value:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(map(_joined, a, b))
    return _all(a) | _all(b)
