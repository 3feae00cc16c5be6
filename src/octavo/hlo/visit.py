"""What an HLO program does when it runs: its instructions, each as often as it runs, through all that it calls."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from octavo.hlo.text import Instruction, Module


class Counted(NamedTuple):
    """Something, and how often it is done."""

    item: Any
    count: int


class Walk[T]:
    """What `of` finds in the instructions of a program, counted.

    A loop's body counts as often as the loop turns, once if that is not known: `unknown` then has its name. Of the
    branches of a conditional, the one counts that is chosen by a constant, or that costs most by `cost`.
    """

    def __init__(
        self,
        module: Module,
        of: Callable[[str, Instruction], Iterable[T]],
        cost: Callable[[T], int | float] = lambda _: 1,
    ):
        self.module, self.of, self.cost = module, of, cost
        self.unknown: list[str] = []
        self._found: dict[str, list[Counted]] = {}

    def found(self) -> list[Counted]:
        """All of it, from the entry on."""
        return self._within(self.module.entry)

    def _within(self, computation: str) -> list[Counted]:
        if computation not in self._found:
            lines = self.module.computations[computation]
            self._found[computation] = [item for line in lines for item in self._line(computation, line)]
        return self._found[computation]

    def _line(self, computation: str, line: Instruction) -> list[Counted]:
        own = [Counted(item, 1) for item in self.of(computation, line)]
        if line.opcode == "while":
            return own + self._turned(computation, line)
        if line.opcode == "conditional":
            return own + self._branch(computation, line)
        names = (*line.called("calls"), *(line.called("to_apply") if line.opcode == "call" else ()))
        return own + [item for name in names for item in self._within(name)]

    def _turned(self, computation: str, line: Instruction) -> list[Counted]:
        inside = [item for name in (*line.called("body"), *line.called("condition")) for item in self._within(name)]
        trips = self.module.trips(computation, line)
        if trips is None:
            if inside:
                self.unknown.append(line.op_name or line.name)
            return inside
        return [Counted(item, count * trips) for item, count in inside]

    def _branch(self, computation: str, line: Instruction) -> list[Counted]:
        names = list(line.called("branch_computations"))
        index = self.module.constant(computation, line.operands[0])
        if names and index is not None:
            return self._within(names[index if 0 <= index < len(names) else -1])
        names += [*line.called("true_computation"), *line.called("false_computation")]
        spent = lambda items: sum(count * self.cost(item) for item, count in items)  # noqa: E731
        return max(map(self._within, names), key=spent)
