"""Which values of an HLO program become weights: a gradient is told by following the program's results backwards.

A result that takes the place of an argument that holds weights is made from the old weights and from gradients, value
by value: a gradient is added up, clipped, scaled and averaged, and never multiplied as a matrix, looked up or summed
over its own axes on its way. So what comes to such a result without any of these, and is sent, is a gradient. One sum
is let through, that of the parts which as many devices exchanged: an all-to-all and that sum are a reduce-scatter.
"""

import functools
import math
import re
from collections.abc import Callable

from octavo.hlo.text import Instruction, Module, group_size
from octavo.hlo.weight_flow import CALLS, PRODUCTS

NONE, WHOLE, UNCLEAR = 0, 1, -1

type Fate = int | tuple[Fate, ...]
"""WHOLE for what becomes a weight value by value, n for what does once n parts are summed; a tuple has one for each of
its elements, and none for the last ones if nothing becomes of them."""

# What comes in by these does not come out value by value, or only what is at these places does.
_STOPS = PRODUCTS | {"gather", "sort", "reduce-window", "select-and-scatter", "parameter", "constant", "iota"}
_PASSES = {"select": (1, 2), "dynamic-slice": (0,), "dynamic-update-slice": (0, 1), "scatter": (0,), "pad": (0,)}
EXCHANGES = frozenset({"all-to-all", "all-gather"})
_DIMENSIONS = re.compile(r"\bdimensions=\{([\d,]*)\}")


class Fates:
    """What becomes of each value of a program; `is_weight` is asked for the name of each argument."""

    def __init__(self, module: Module, is_weight: Callable[[str], bool]):
        self.module = module
        self.found: dict[tuple[str, str], Fate] = {}
        self._arguments = functools.cache(self._run)
        lines = module.computations[module.entry]
        weights = {int(i.operands[0]) for i in lines if i.opcode == "parameter" and is_weight(i.op_name)}
        results = {result for result, argument in module.replaced.items() if argument in weights}
        root = module.root(module.entry)
        count = len(module.elements(root)) if _is_tuple(root) else 1
        fates = tuple(WHOLE if n in results else NONE for n in range(count))
        if results:
            self._arguments(module.entry, fates if _is_tuple(root) else fates[0])

    def __call__(self, computation: str, instruction: Instruction, place: int = 0, *, parts: int = WHOLE) -> bool:
        """Whether what an instruction gives, at a place if it gives several arrays, becomes a weight.

        It does at once, or when that many parts of it are summed.
        """
        fate = self.found.get((computation, instruction.name), NONE)
        if isinstance(fate, tuple) and len(instruction.operands) > 1:
            fate = fate[place] if place < len(fate) else NONE
        return bool(_flat(fate) & {WHOLE, parts})

    def _run(self, computation: str, result: Fate) -> tuple[Fate, ...]:
        lines = self.module.computations[computation]
        fates: dict[str, Fate] = {self.module.root(computation).name: result}
        for line in reversed(lines):
            fate = fates.get(line.name, NONE)
            if _flat(fate) == {NONE}:
                continue
            key = (computation, line.name)
            self.found[key] = _joined(self.found.get(key, NONE), fate)
            for operand, own in zip(line.operands, self._taken(computation, line, fate), strict=False):
                name, _, index = operand.partition("#")
                own = _element(own, int(index)) if index else own
                fates[name] = _joined(fates.get(name, NONE), own)
        arguments = {int(i.operands[0]): fates.get(i.name, NONE) for i in lines if i.opcode == "parameter"}
        return tuple(arguments[n] for n in range(len(arguments)))

    def _taken(self, computation: str, line: Instruction, fate: Fate) -> tuple[Fate, ...]:
        """The fates of an instruction's operands by that of what it gives."""
        count = len(line.operands)
        match line.opcode:
            case "tuple":
                return fate if isinstance(fate, tuple) else (fate,) * count
            case "get-tuple-element":
                return (_element(fate, int(line.attributes.partition("index=")[2].partition(",")[0])),)
            case "optimization-barrier" | "copy" | "bitcast":
                return (fate,)
            case "while":
                return (self._looped(line, fate),)
            case "conditional":
                names = [*line.called("branch_computations")]
                names += [*line.called("true_computation"), *line.called("false_computation")]
                return (NONE, *(self._arguments(name, fate)[0] for name in names))
            case opcode if opcode in CALLS and (names := line.called(CALLS[opcode])):
                return self._arguments(names[0], fate)
            case "broadcast":
                given = self.module.shape(computation, line.operands[0])
                return (NONE if given is None or given.size < line.shapes[0].size else fate,)
            case "reduce":
                return (self._summed(computation, line, fate),) * (count // 2)
            case opcode if opcode in _STOPS or (opcode == "custom-call" and count > 1):
                return (NONE,) * count
        if _is_tuple(line) and isinstance(fate, tuple) and len(fate) == count:
            return fate  # of a collective of several arrays, each on its own
        own = _one(fate)
        if line.opcode.removesuffix("-start") in EXCHANGES and own == group_size(line.attributes):
            own = WHOLE
        places = _PASSES.get(line.opcode, range(count))
        return tuple(own if n in places else NONE for n in range(count))

    def _summed(self, computation: str, line: Instruction, fate: Fate) -> Fate:
        given, axes = self.module.shape(computation, line.operands[0]), _DIMENSIONS.search(line.attributes)
        if given is None or axes is None or _one(fate) == NONE:
            return NONE
        parts = math.prod(given.dims[int(axis)] for axis in axes[1].split(",") if axis)
        if parts == 1:
            return _one(fate)
        return parts if _one(fate) == WHOLE else NONE

    def _looped(self, line: Instruction, fate: Fate) -> Fate:
        (body,) = line.called("body")
        while (before := _joined(fate, self._arguments(body, fate)[0])) != fate:
            fate = before
        return fate


def _is_tuple(line: Instruction) -> bool:
    return line.type.startswith("(")


def _element(fate: Fate, index: int) -> Fate:
    """The fate of a tuple of which one element has this fate, as far as it matters."""
    return (*(NONE,) * index, fate)


def _flat(fate: Fate) -> set[int]:
    return set().union({NONE}, *map(_flat, fate)) if isinstance(fate, tuple) else {NONE, fate}


def _one(fate: Fate) -> int:
    """The fate of an array that was asked for as a whole or as a tuple: what becomes a weight at once comes first."""
    return functools.reduce(_larger, _flat(fate))


def _joined(a: Fate, b: Fate) -> Fate:
    if isinstance(a, tuple) or isinstance(b, tuple):
        size = max(len(x) for x in (a, b) if isinstance(x, tuple))
        return tuple(map(_joined, _padded(a, size), _padded(b, size)))
    return _larger(a, b)


def _padded(fate: Fate, size: int) -> tuple[Fate, ...]:
    return (*fate, *(NONE,) * (size - len(fate))) if isinstance(fate, tuple) else (fate,) * size


def _larger(a: int, b: int) -> int:
    if a == b or NONE in (a, b):
        return a or b
    return WHOLE if WHOLE in (a, b) else UNCLEAR
