"""Counting the instructions that an HLO program executes, through loops, calls and branches."""

from collections.abc import Callable, Iterable

from octavo.hlo.text import Instruction, Module


class Visitor[T]:
    """Counts what `select` finds in the instructions of a program.

    The body of a loop counts once if its trip count is unknown; `unknown_loops` then has its name. Of the branches of a
    conditional, the one that a constant selects counts, or else the costliest.

    Args:
        module: The program.
        select: What to count, by the name of the computation and the instruction.
        cost: The cost of an item, by which branches are compared.
        fusions: Whether the instructions inside fusions count too.
    """

    def __init__(
        self,
        module: Module,
        select: Callable[[str, Instruction], Iterable[T]],
        cost: Callable[[T], int | float] = lambda _: 1,
        *,
        fusions: bool = True,
    ):
        self.module, self.select, self.cost, self.fusions = module, select, cost, fusions
        self.unknown_loops: list[str] = []
        self._counted: dict[str, list[tuple[T, int]]] = {}

    def visit(self) -> list[tuple[T, int]]:
        """What the program executes, with the number of executions."""
        return self._computation(self.module.entry)

    def _computation(self, name: str) -> list[tuple[T, int]]:
        if name not in self._counted:
            lines = self.module.computations[name]
            self._counted[name] = [item for line in lines for item in self._instruction(name, line)]
        return self._counted[name]

    def _instruction(self, computation: str, line: Instruction) -> list[tuple[T, int]]:
        own = [(item, 1) for item in self.select(computation, line)]
        if line.opcode == "while":
            return own + self._loop(computation, line)
        if line.opcode == "conditional":
            return own + self._conditional(computation, line)
        if line.opcode == "fusion" and not self.fusions:
            return own
        names = (*line.called("calls"), *(line.called("to_apply") if line.opcode == "call" else ()))
        return own + [item for name in names for item in self._computation(name)]

    def _loop(self, computation: str, line: Instruction) -> list[tuple[T, int]]:
        names = (*line.called("body"), *line.called("condition"))
        inside = [item for name in names for item in self._computation(name)]
        trips = self.module.trip_count(computation, line)
        if trips is None:
            if inside:
                self.unknown_loops.append(line.op_name or line.name)
            return inside
        return [(item, count * trips) for item, count in inside]

    def _conditional(self, computation: str, line: Instruction) -> list[tuple[T, int]]:
        names = line.called("branch_computations")
        index = self.module.constant(computation, line.operands[0])
        if names and index is not None:
            return self._computation(names[index if 0 <= index < len(names) else -1])
        total = lambda items: sum(count * self.cost(item) for item, count in items)  # noqa: E731
        return max(map(self._computation, line.branches), key=total)
