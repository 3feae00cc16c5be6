"""Dataflow of an HLO program: values computed from weights, and values that become new weights (gradients).

`WeightFlow` runs forward from the arguments. A value is a weight if it is computed from arguments that hold
weights and from no other argument, except for broadcast values: multiplying a weight by a scale gives a weight,
whatever the scale was computed from. The result of a matmul is never a weight. So the codes of weights are weights,
also where a loop saves them as residuals for the backward pass.

`GradientFlow` runs backward from the results. A result that is aliased to an argument that holds weights is
computed elementwise from the old weights and from gradients: a gradient is reduced, clipped, scaled and averaged, but
is not an operand of a matmul, gathered from, or summed over its own axes. So a collective is of a gradient if its
result reaches such an output without any of these. The one exception is a sum over as many shards as there are devices
in an all-to-all: the two together are a reduce-scatter.
"""

import functools
import math
import re
from collections.abc import Callable

from octavo.hlo.text import Instruction, Module, group_size

MATMULS = frozenset({"dot", "convolution", "ragged-dot", "scaled-dot"})
EXCHANGES = frozenset({"all-to-all", "all-gather"})
_CALLS = {"fusion": "calls", "call": "to_apply", "async-start": "calls"}

# Forward.

DATA = 1
_FRESH = frozenset({"constant", "iota", "rng", "rng-bit-generator", "partition-id", "replica-id", "after-all"})

type Sources = int | tuple[Sources, ...]
"""The arguments that a value was computed from, as a bit mask; a tuple has one for each of its elements."""


class WeightFlow:
    """The arguments that each value was computed from; `is_weight` decides by the name of an argument."""

    def __init__(self, module: Module, is_weight: Callable[[str], bool]):
        self.module = module
        self._operands: dict[tuple[str, str], tuple[int, ...]] = {}
        self._results = functools.cache(self._run)
        entry = module.computations[module.entry]
        arguments = {i.operands[0]: i for i in entry if i.opcode == "parameter"}
        named = [arguments[str(n)] for n in range(len(arguments))]
        self.names = tuple(dict.fromkeys(i.op_name for i in named if is_weight(i.op_name)))
        self._bits = {name: 2 << n for n, name in enumerate(self.names)}
        self._results(module.entry, tuple(self._argument(i) for i in named))

    def weights(self, computation: str, instruction: Instruction) -> tuple[tuple[str, ...], ...]:
        """The names of the weights of each operand of an instruction; none if it is not computed from weights alone."""
        found = self._operands.get((computation, instruction.name), ())
        return tuple(() if bits & DATA else tuple(n for n in self.names if bits & self._bits[n]) for bits in found)

    def _argument(self, parameter: Instruction) -> Sources:
        bit = self._bits.get(parameter.op_name, DATA)
        return (bit,) * len(parameter.shapes) if parameter.is_tuple else bit

    def _run(self, computation: str, arguments: tuple[Sources, ...]) -> Sources:
        values: dict[str, Sources] = {}

        def read(operand: str) -> Sources:
            name, _, index = operand.partition("#")
            value = values.get(name, 0)
            return value[int(index)] if index and isinstance(value, tuple) else value

        for line in self.module.computations[computation]:
            operands = () if line.opcode in (*_FRESH, "parameter") else tuple(map(read, line.operands))
            key = (computation, line.name)
            before = self._operands.get(key, (0,) * len(operands))
            self._operands[key] = tuple(bits | _union(value) for bits, value in zip(before, operands, strict=True))
            is_argument = line.opcode == "parameter"
            values[line.name] = (
                arguments[int(line.operands[0])] if is_argument else self._result(computation, line, operands)
            )
        return values[self.module.root(computation).name]

    def _result(self, computation: str, line: Instruction, operands: tuple[Sources, ...]) -> Sources:
        match line.opcode:
            case "tuple":
                return operands
            case "get-tuple-element":
                return operands[0][line.index] if isinstance(operands[0], tuple) else operands[0]
            case "optimization-barrier" | "copy" | "bitcast" | "copy-done" | "async-done":
                return operands[0]
            case "broadcast":
                given = self.module.find(computation, line.operands[0])
                grows = given is None or "#" in line.operands[0] or given.shapes[0].size < line.shapes[0].size
                return 0 if grows else operands[0]
            case "while":
                return self._loop(line, operands[0])
            case "conditional":
                results = [self._results(n, (t,)) for n, t in zip(line.branches, operands[1:], strict=True)]
                return functools.reduce(_join_sources, results)
            case opcode if opcode in _CALLS and (names := line.called(_CALLS[opcode])):
                return self._results(names[0], operands)
        bits = _union(operands)
        if line.opcode in MATMULS or (line.opcode == "custom-call" and len(operands) > 1):
            bits |= DATA
        return (bits,) * len(line.shapes) if line.is_tuple else bits

    def _loop(self, line: Instruction, state: Sources) -> Sources:
        (body,) = line.called("body")
        while (after := _join_sources(state, self._results(body, (state,)))) != state:
            state = after
        return state


def _union(value: Sources) -> int:
    return functools.reduce(int.__or__, map(_union, value), 0) if isinstance(value, tuple) else value


def _join_sources(a: Sources, b: Sources) -> Sources:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(map(_join_sources, a, b))
    return _union(a) | _union(b)


# Backward.

NONE, WEIGHT, UNCLEAR = 0, 1, -1

type Use = int | tuple[Use, ...]
"""WEIGHT for a value that becomes a weight elementwise, n for one that does after a sum over n shards. A tuple has one
for each of its elements; unused elements at the end are left out."""

# These are not elementwise, or only in the operands listed.
_STOPS = MATMULS | {"gather", "sort", "reduce-window", "select-and-scatter", "parameter", "constant", "iota"}
_PASSES = {"select": (1, 2), "dynamic-slice": (0,), "dynamic-update-slice": (0, 1), "scatter": (0,), "pad": (0,)}
_DIMENSIONS = re.compile(r"\bdimensions=\{([\d,]*)\}")


class GradientFlow:
    """Which values of a program become weights; `is_weight` decides by the name of an argument."""

    def __init__(self, module: Module, is_weight: Callable[[str], bool]):
        self.module = module
        self._uses: dict[tuple[str, str], Use] = {}
        self._arguments = functools.cache(self._run)
        lines = module.computations[module.entry]
        weights = {int(i.operands[0]) for i in lines if i.opcode == "parameter" and is_weight(i.op_name)}
        results = {result for result, argument in module.aliases.items() if argument in weights}
        root = module.root(module.entry)
        count = len(root.elements) if root.is_tuple else 1
        uses = tuple(WEIGHT if n in results else NONE for n in range(count))
        if results:
            self._arguments(module.entry, uses if root.is_tuple else uses[0])

    def is_gradient(self, computation: str, instruction: Instruction, element: int = 0, *, num_shards: int = 1) -> bool:
        """Whether the result of an instruction, or one element, becomes a weight, directly or summed over shards."""
        use = self._uses.get((computation, instruction.name), NONE)
        if isinstance(use, tuple) and len(instruction.operands) > 1:
            use = use[element] if element < len(use) else NONE
        return bool(_all_uses(use) & {WEIGHT, num_shards})

    def _run(self, computation: str, result: Use) -> tuple[Use, ...]:
        lines = self.module.computations[computation]
        uses: dict[str, Use] = {self.module.root(computation).name: result}
        for line in reversed(lines):
            use = uses.get(line.name, NONE)
            if _all_uses(use) == {NONE}:
                continue
            key = (computation, line.name)
            self._uses[key] = _join_uses(self._uses.get(key, NONE), use)
            for operand, own in zip(line.operands, self._operands(computation, line, use), strict=False):
                name, _, index = operand.partition("#")
                own = _in_tuple(own, int(index)) if index else own
                uses[name] = _join_uses(uses.get(name, NONE), own)
        arguments = {int(i.operands[0]): uses.get(i.name, NONE) for i in lines if i.opcode == "parameter"}
        return tuple(arguments[n] for n in range(len(arguments)))

    def _operands(self, computation: str, line: Instruction, use: Use) -> tuple[Use, ...]:
        """The uses of an instruction's operands, given the use of its result."""
        count = len(line.operands)
        match line.opcode:
            case "tuple":
                return use if isinstance(use, tuple) else (use,) * count
            case "get-tuple-element":
                return (_in_tuple(use, line.index),)
            case "optimization-barrier" | "copy" | "bitcast":
                return (use,)
            case "while":
                return (self._loop(line, use),)
            case "conditional":
                return (NONE, *(self._arguments(name, use)[0] for name in line.branches))
            case opcode if opcode in _CALLS and (names := line.called(_CALLS[opcode])):
                return self._arguments(names[0], use)
            case "broadcast":
                given = self.module.shape(computation, line.operands[0])
                return (NONE if given is None or given.size < line.shapes[0].size else use,)
            case "reduce":
                return (self._reduced(computation, line, use),) * (count // 2)
            case opcode if opcode in _STOPS or (opcode == "custom-call" and count > 1):
                return (NONE,) * count
        if line.is_tuple and isinstance(use, tuple) and len(use) == count:
            return use  # a collective of several arrays: one use for each
        own = _one_use(use)
        if line.opcode.removesuffix("-start") in EXCHANGES and own == group_size(line.attributes):
            own = WEIGHT
        passed = _PASSES.get(line.opcode, range(count))
        return tuple(own if n in passed else NONE for n in range(count))

    def _reduced(self, computation: str, line: Instruction, use: Use) -> Use:
        given, axes = self.module.shape(computation, line.operands[0]), _DIMENSIONS.search(line.attributes)
        if given is None or axes is None or _one_use(use) == NONE:
            return NONE
        num_shards = math.prod(given.dims[int(axis)] for axis in axes[1].split(",") if axis)
        if num_shards == 1:
            return _one_use(use)
        return num_shards if _one_use(use) == WEIGHT else NONE

    def _loop(self, line: Instruction, use: Use) -> Use:
        (body,) = line.called("body")
        while (before := _join_uses(use, self._arguments(body, use)[0])) != use:
            use = before
        return use


def _in_tuple(use: Use, index: int) -> Use:
    """The use of a tuple of which one element has this use."""
    return (*(NONE,) * index, use)


def _all_uses(use: Use) -> set[int]:
    return set().union({NONE}, *map(_all_uses, use)) if isinstance(use, tuple) else {NONE, use}


def _one_use(use: Use) -> int:
    """The use of an array, or of all elements of a tuple together."""
    return functools.reduce(_join_numbers, _all_uses(use))


def _join_uses(a: Use, b: Use) -> Use:
    if isinstance(a, tuple) or isinstance(b, tuple):
        size = max(len(x) for x in (a, b) if isinstance(x, tuple))
        return tuple(map(_join_uses, _padded(a, size), _padded(b, size)))
    return _join_numbers(a, b)


def _padded(use: Use, size: int) -> tuple[Use, ...]:
    return (*use, *(NONE,) * (size - len(use))) if isinstance(use, tuple) else (use,) * size


def _join_numbers(a: int, b: int) -> int:
    if a == b or NONE in (a, b):
        return a or b
    return WEIGHT if WEIGHT in (a, b) else UNCLEAR
