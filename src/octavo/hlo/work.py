"""What one device multiplies in a partitioned program, and what it moves through its memory for that."""

import dataclasses
import math
import re
from collections.abc import Iterator

from octavo.hlo.text import Instruction, Module, Shape, bits
from octavo.hlo.visit import Walk
from octavo.kernels import pallas
from octavo.ops.parts import SHARE


@dataclasses.dataclass(frozen=True)
class Work:
    """A product of a device's own parts, done `count` times; `flops` and `bytes` are those of once.

    >>> work = Work("dot", Shape("s8", (64, 128)), Shape("s8", (128, 32)), Shape("s32", (64, 32)), flops=524288)
    >>> work.types, work.bytes
    ('s8 x s8', 20480)
    """

    op: str
    lhs: Shape
    rhs: Shape
    out: Shape
    flops: int
    count: int = 1
    name: str = ""

    @property
    def types(self) -> str:
        """The types that are multiplied."""
        return f"{self.lhs.dtype} x {self.rhs.dtype}"

    @property
    def bits(self) -> int:
        """The bits of the wider operand."""
        return max(bits(self.lhs.dtype), bits(self.rhs.dtype))

    @property
    def is_integer(self) -> bool:
        """Whether both operands are integers."""
        return all(shape.dtype[0] in "su" for shape in (self.lhs, self.rhs))

    @property
    def bytes(self) -> int:
        """What is read and written if both operands and the result are in memory."""
        return self.lhs.bytes + self.rhs.bytes + self.out.bytes


def products(module: Module) -> tuple[Work, ...]:
    """The products of an HLO program, each as often as it runs; once, if that is not known."""

    def of(computation: str, line: Instruction) -> Iterator[Work]:
        shapes = (module.shape(computation, name) for name in line.operands)
        if line.opcode in ("dot", "ragged-dot", "convolution"):
            lhs, rhs = (next(shapes), next(shapes))
            if lhs is not None and rhs is not None:
                yield Work(line.opcode, lhs, rhs, line.shapes[0], _flops(line, lhs, rhs), name=line.op_name)
        elif line.opcode == "custom-call" and (kernel := _kernel(line)):
            # After what steers a kernel come its matrices, and after those their scales.
            lhs, rhs, *_ = (shape for shape in shapes if shape is not None and len(shape.dims) > 1)
            out = line.shapes[0]
            yield Work(kernel, lhs, rhs, out, 2 * lhs.size * out.dims[-1] // _share(line), name=line.op_name)

    walk = Walk(module, of, cost=lambda work: work.flops)
    return tuple(dataclasses.replace(work, count=count) for work, count in walk.found())


def _kernel(line: Instruction) -> str | None:
    """The kernel of ours that a custom call runs on an accelerator."""
    if 'custom_call_target="tpu_custom_call"' not in line.attributes:
        return None
    return next((name for name in pallas.NAMES if f"/{name}/" in line.op_name), None)


def _share(line: Instruction) -> int:
    """Of the rows that a device has room for, one in so many is expected to have an expert there."""
    told = re.search(rf"{re.escape(SHARE)}(\d+)", line.op_name)
    return int(told[1]) if told else 1


def _flops(line: Instruction, lhs: Shape, rhs: Shape) -> int:
    out = line.shapes[0]
    if line.opcode == "convolution":
        # Every element of the kernel but for its output features, for each element of the result.
        labels = re.search(r"dim_labels=\w+_(\w+)->", line.attributes)
        features = rhs.dims[labels[1].index("o")] if labels else 1
        return 2 * out.size * rhs.size // max(1, features)
    contract = _axes(line, "lhs_contracting_dims")
    depth = math.prod(lhs.dims[a] for a in contract)
    share = _share(line)
    ragged = _axes(line, "lhs_ragged_dims")
    if ragged and set(ragged) <= set(contract):
        # Each group sums over its own rows, which are all rows together.
        batch = math.prod(lhs.dims[a] for a in _axes(line, "lhs_batch_dims"))
        return 2 * lhs.size * rhs.size // max(1, depth * batch) // share
    return 2 * out.size * depth // share


def _axes(line: Instruction, key: str) -> tuple[int, ...]:
    match = re.search(rf"{key}=\{{([\d,]*)\}}", line.attributes)
    return tuple(int(n) for n in match[1].split(",") if n) if match else ()
