"""The cost of a compiled program, as its compiler estimates it.

TPU's compiler writes the cycles of each fusion, convolution and copy into the scheduled program: the estimates by which
it schedules. Their sum, with loops by their trip counts, is the estimate of the whole program.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from octavo._text import format_bytes_si, format_table
from octavo.hlo.accelerators import Accelerator
from octavo.hlo.collectives import Communication, read_communication
from octavo.hlo.matmuls import CompiledMatmul, read_matmuls
from octavo.hlo.text import Instruction, Module, Shape, parse, shapes_of
from octavo.hlo.visit import Visitor

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OPERANDS, _FLOPS = (
    re.compile(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}"),
    re.compile(r'"flops":"(\d+)"'),
)
_LAYOUT = re.compile(r"\{[^{}]*\}")
# The compiler writes a huge number where it has no estimate.
UNKNOWN = 10**12


@dataclasses.dataclass(frozen=True)
class OpCost:
    """An instruction of the scheduled program with its estimate.

    Attributes:
        name: Its name in the program.
        opcode: Its opcode, such as `fusion`, `convolution` or `copy`.
        type: The type of its result.
        site: The traced operation, as JAX names it; empty for what the compiler adds.
        cycles: The estimated cycles of one execution.
        count: How often a run of the program executes it.
    """

    name: str
    opcode: str
    type: str
    site: str
    cycles: int
    count: int = 1

    @property
    def total(self) -> int:
        """The cycles of all executions."""
        return self.count * self.cycles


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A Pallas kernel, of which the compiler estimates no cycles.

    Attributes:
        name: Its name in the program, which begins with that of the kernel.
        site: The traced operation, as JAX names it.
        arrays: Its operands and results, which a kernel reads and writes at least once.
        flops: The FLOPs of one execution that it declares; 0 if it declares none.
        count: How often a run of the program executes it.
    """

    name: str
    site: str
    arrays: tuple[Shape, ...]
    flops: int = 0
    count: int = 1

    @property
    def bytes(self) -> int:
        """The bytes of its operands and results."""
        return sum(shape.bytes for shape in self.arrays)


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """The cost of a compiled program on one device; printed as a table of its most expensive instructions.

    Attributes:
        ops: The instructions that have an estimate, the most expensive first.
        unknown: The instructions whose cost the compiler does not know.
        bytes_accessed: The bytes that instructions read and write.
        temp_bytes: The peak of temporary memory.
        communication: The collectives.
        matmuls: The matmuls, with the types that the device multiplies.
        kernels: The Pallas kernels, which are in none of the other figures but the memory.
    """

    ops: tuple[OpCost, ...]
    unknown: tuple[OpCost, ...] = ()
    bytes_accessed: float = 0
    temp_bytes: int = 0
    communication: Communication = dataclasses.field(default_factory=lambda: Communication(()))
    matmuls: tuple[CompiledMatmul, ...] = ()
    kernels: tuple[KernelCall, ...] = ()

    @property
    def cycles(self) -> int:
        """The estimated cycles of a run."""
        return sum(op.total for op in self.ops)

    def cycles_at(self, pattern: str) -> int:
        """The cycles of the instructions whose site matches a regular expression, as `re.search` does."""
        return sum(op.total for op in self.ops if re.search(pattern, op.site))

    def to_dict(self, accelerator: Accelerator) -> dict[str, Any]:
        """The figures and the instructions as plain values."""
        return {
            "accelerator": str(accelerator),
            "cycles": self.cycles,
            "seconds": accelerator.seconds(self.cycles),
            "bytes_accessed": self.bytes_accessed,
            "temp_bytes": self.temp_bytes,
            "communication": self.communication.summary(),
            "matmuls": [matmul.to_dict() for matmul in self.matmuls],
            "ops": [dataclasses.asdict(op) for op in self.ops],
            "unknown": [dataclasses.asdict(op) for op in self.unknown],
            "kernels": [
                {"name": k.name, "site": k.site, "bytes": k.bytes, "flops": k.flops, "count": k.count}
                for k in self.kernels
            ],
        }

    def table(self, most: int = 10) -> list[tuple[str, ...]]:
        """The rows of a table of the most expensive instructions, its head first."""
        rows: list[tuple[str, ...]] = [("cycles", "share", "op", "result", "site")]
        for op in self.ops[:most]:
            shown = op.type if len(op.type) <= 60 else f"{op.type[:57]}..."
            rows.append((f"{op.total:,}", f"{op.total / self.cycles:.1%}", op.opcode, shown, op.site))
        return rows

    def __str__(self) -> str:
        lines = format_table(self.table())
        sizes = f"{format_bytes_si(self.bytes_accessed)} accessed, {format_bytes_si(self.temp_bytes)} temporary"
        unknown = f" and {len(self.unknown)} instructions without an estimate" if self.unknown else ""
        kernels = f" and {sum(k.count for k in self.kernels)} Pallas kernels" if self.kernels else ""
        return "\n".join([*lines, f"{self.cycles:,} cycles{unknown}{kernels}, {sizes}"])


def read_cost(compiled: Any) -> ProgramCost:
    """The cost of a compiled program.

    Args:
        compiled: What `compile_for` returned.

    Returns:
        Its cost. Only TPU's compiler estimates cycles.
    """
    module = parse(compiled.as_text())
    ops, unknown = read_cycles(module)
    memory, analysis = compiled.memory_analysis(), compiled.cost_analysis() or {}
    accessed, temporary = analysis.get("bytes accessed", 0), memory.temp_size_in_bytes if memory else 0
    communication, matmuls = read_communication(module), read_matmuls(module)
    return ProgramCost(ops, unknown, accessed, temporary, communication, matmuls, read_kernels(module))


def read_kernels(module: Module | str) -> tuple[KernelCall, ...]:
    """The Pallas kernels of a compiled TPU program."""
    module = parse(module) if isinstance(module, str) else module
    found = Visitor(module, _kernel, fusions=False).visit()
    return tuple(dataclasses.replace(kernel, count=count) for kernel, count in found)


def _kernel(computation: str, line: Instruction) -> Iterator[KernelCall]:
    del computation
    if line.opcode == "custom-call" and '"tpu_custom_call"' in line.attributes:
        operands, flops = _OPERANDS.search(line.attributes), _FLOPS.search(line.attributes)
        arrays = (*(shapes_of(operands[1]) if operands else ()), *line.shapes)
        yield KernelCall(line.name, line.op_name, arrays, int(flops[1]) if flops else 0)


def read_cycles(module: Module | str) -> tuple[tuple[OpCost, ...], tuple[OpCost, ...]]:
    """The instructions of a scheduled TPU program with their estimates, and those that have none."""
    module = parse(module) if isinstance(module, str) else module
    visitor = Visitor(module, _estimate, cost=lambda op: op.cycles, fusions=False)
    found = [dataclasses.replace(op, count=count) for op, count in visitor.visit()]
    known = sorted((op for op in found if op.cycles < UNKNOWN), key=lambda op: -op.total)
    return tuple(known), tuple(op for op in found if op.cycles >= UNKNOWN)


def _estimate(computation: str, line: Instruction) -> Iterator[OpCost]:
    del computation
    if match := _CYCLES.search(line.attributes):
        yield OpCost(line.name, line.opcode, _LAYOUT.sub("", line.type), line.op_name, int(match[1]))
