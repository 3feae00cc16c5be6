"""The matmuls of a compiled program: which of the quantized ones reached the device's low-precision path, and why not.

TPU's compiler writes every matmul as a convolution; the types of its operands are those that the matrix unit
multiplies. On GPUs a matmul is a `dot` or `scaled-dot` in a fusion, or a custom call of cuBLAS or cuDNN.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from octavo._text import format_table
from octavo.hlo.dataflow import MATMULS
from octavo.hlo.text import Instruction, Module, bits, parse
from octavo.hlo.visit import Visitor

_LIBRARY = re.compile(r'custom_call_target="(__cu(?:blas|dnn)[^"]*|__op\$[^"]*)"')
_QUANTIZED = re.compile(r"\bjit\((_product_fwd|_product_bwd|_primal)\)")
_WRAPPER = re.compile(r"^(?:jit|pjit|jvp|transpose|vmap|remat|checkpoint|while|body|cond|branch_\d+_fun)\b")
# What a value is computed from elementwise ends at these.
_STOPS = MATMULS | {
    "reduce",
    "reduce-window",
    "gather",
    "sort",
    "constant",
    "iota",
    "broadcast",
    "custom-call",
    "while",
}
# Scales of blocks have eight bits too, but are no codes.
_SCALES = "f8e8m0fnu"
_LONGEST_SEARCH = 500


@dataclasses.dataclass(frozen=True)
class CompiledMatmul:
    """A matmul of a compiled program.

    Attributes:
        site: The traced operation, as JAX names it.
        op: The opcode, or the function of a library.
        lhs: The type of the left operand as it is multiplied.
        rhs: That of the right operand.
        out: The type of the result.
        sources: The narrow types from which wider operands were converted; empty where there are none.
        count: How often a run of the program executes it.

    >>> CompiledMatmul("jit(f)/mlp/up/jit(_product_fwd)/dot_general", "convolution", "s8", "s8", "s32").path
    'mlp/up'
    """

    site: str
    op: str
    lhs: str
    rhs: str
    out: str
    sources: tuple[str, str] = ("", "")
    count: int = 1

    @property
    def is_quantized(self) -> bool:
        """Whether it is a matmul of Octavo's quantized operations; a Hadamard rotation is none."""
        return bool(_QUANTIZED.search(self.site)) and "/hadamard/" not in self.site

    @property
    def is_low(self) -> bool:
        """Whether both operands have eight bits or fewer."""
        return all(0 < bits(dtype) <= 8 for dtype in (self.lhs, self.rhs))

    @property
    def is_backward(self) -> bool:
        """Whether it is part of a backward pass."""
        return "transpose(" in self.site

    @property
    def path(self) -> str:
        """The names of the site without those of transformations and of the operation itself."""
        names = re.sub(r"\([^()]*(?:\([^()]*\))*[^()]*\)", "", self.site).split("/")[:-1]
        return "/".join(name for name in names if name and not _WRAPPER.match(name))

    @property
    def types(self) -> str:
        """The types, such as `s8 x s8 -> s32`; with the function of a library."""
        return f"{self.lhs} x {self.rhs} -> {self.out}" + (f" ({self.op})" if self.op.startswith("__") else "")

    @property
    def reason(self) -> str:
        """Why it is not in low precision; empty if it is."""
        said = []
        for side, dtype, source in zip(("left", "right"), (self.lhs, self.rhs), self.sources, strict=True):
            if not 0 < bits(dtype) <= 8:
                said.append(
                    f"the {side} operand is {f'{source} converted to {dtype}' if source else f'{dtype} throughout'}"
                )
        return ", ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """The fields and what follows from them as plain values."""
        derived = {name: getattr(self, name) for name in ("path", "is_quantized", "is_backward", "is_low", "reason")}
        return {**dataclasses.asdict(self), **derived}


def read_matmuls(module: Module | str) -> tuple[CompiledMatmul, ...]:
    """The matmuls of a compiled program, in the order of its text."""
    parsed = parse(module) if isinstance(module, str) else module
    origins = _Origins(parsed)

    def matmul(computation: str, line: Instruction) -> Iterator[CompiledMatmul]:
        library = _LIBRARY.search(line.attributes) if line.opcode == "custom-call" else None
        if line.opcode in MATMULS or library:
            shapes = [parsed.shape(computation, operand) for operand in line.operands[:2]]
            types = [shape.dtype if shape else "?" for shape in shapes]
            sources = [
                "" if 0 < bits(dtype) <= 8 else origins.narrow(computation, operand)
                for dtype, operand in zip(types, line.operands, strict=False)
            ]
            op = library[1] if library else line.opcode
            yield CompiledMatmul(line.op_name, op, types[0], types[-1], line.shapes[0].dtype, (sources[0], sources[-1]))

    return tuple(dataclasses.replace(found, count=count) for found, count in Visitor(parsed, matmul).visit())


class _Origins:
    """Finds the narrow types that values were computed from elementwise, through fusions."""

    def __init__(self, module: Module):
        self.module = module
        self._callers: dict[str, list[tuple[str, Instruction]]] = {}
        for name, lines in module.computations.items():
            for line in lines:
                for called in line.called("calls") if line.opcode in ("fusion", "async-start") else ():
                    self._callers.setdefault(called, []).append((name, line))

    def narrow(self, computation: str, operand: str) -> str:
        """The type of eight bits or fewer that a value was computed from; empty if there is none."""
        waiting, seen = [(computation, operand)], set[tuple[str, str]]()
        while waiting and len(seen) < _LONGEST_SEARCH:
            place = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            shape = self.module.shape(*place)
            if shape and 0 < bits(shape.dtype) <= 8 and shape.dtype not in ("pred", _SCALES) and shape.dims:
                return shape.dtype
            waiting += self._operands(*place)
        return ""

    def _operands(self, computation: str, operand: str) -> list[tuple[str, str]]:
        line = self.module.find(computation, operand)
        if line is None or line.opcode in _STOPS:
            return []
        if line.opcode == "parameter":
            return [(name, call.operands[int(line.operands[0])]) for name, call in self._callers.get(computation, ())]
        if line.opcode in ("fusion", "async-start") and (called := line.called("calls")):
            root, index = self.module.root(called[0]), operand.partition("#")[2]
            at = self.module.find(computation, operand.partition("#")[0])
            if at is not None and at.opcode == "get-tuple-element":
                index = str(at.index)
            chosen = root.operands[int(index)] if root.opcode == "tuple" and index else root.name
            return [(called[0], chosen)]
        return [(computation, each) for each in line.operands]


def count_types(matmuls: Iterable[CompiledMatmul]) -> dict[str, int]:
    """How often each pair of types is multiplied, the most frequent first."""
    counts = Counter[str]()
    for matmul in matmuls:
        counts[matmul.types] += matmul.count
    return dict(counts.most_common())


def describe_quantized(matmuls: Iterable[CompiledMatmul]) -> list[str]:
    """Lines that say how many quantized matmuls are in low precision, with a table of the others."""
    quantized = [matmul for matmul in matmuls if matmul.is_quantized]
    if not quantized:
        return ["the program has no quantized matmuls"]
    others = [matmul for matmul in quantized if not matmul.is_low]
    low, total = (sum(m.count for m in part) for part in ([m for m in quantized if m.is_low], quantized))
    lines = [f"{low} of {total} quantized matmuls have operands of 8 bits or fewer on the device"]
    if not others:
        return lines
    rows: list[tuple[str, ...]] = [("path", "pass", "types", "count", "reason")]
    for matmul in others:
        passed = "backward" if matmul.is_backward else "forward"
        rows.append((matmul.path or "-", passed, matmul.types, str(matmul.count), matmul.reason))
    return [*lines, *format_table(rows)]
