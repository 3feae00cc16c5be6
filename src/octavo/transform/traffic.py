"""What a partitioned program sends between devices, read from its HLO.

Bytes are those that one device sends, by the ring algorithm among n devices: of an all-gather (n - 1) / n of what it
gives, of a reduce-scatter (n - 1) / n of what it takes, of an all-reduce twice that, of an all-to-all (n - 1) / n, of a
permutation all of it. What is in a loop counts as often as the loop turns; of a branch, the costliest counts.
"""

import contextlib
import dataclasses
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from octavo.transform import hlo
from octavo.transform.hlo import Instruction, Module, Shape
from octavo.transform.lineage import Lineage
from octavo.transform.walk import Walk

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_STARTS = {f"{kind}-start": kind for kind in KINDS} | {kind: kind for kind in KINDS}
_MOVES = frozenset({"bitcast", "copy", "reshape", "transpose", "convert"})


@dataclasses.dataclass(frozen=True)
class Collective:
    """An array that is sent, `count` times in a run of the program; `bytes` are those of once.

    `is_weight` is for what is gathered of parameters. `is_sliced` is for an all-reduce of whose sum each device uses
    its own part alone: accelerators run that as a reduce-scatter, and CPUs do not.

    >>> Collective("all-gather", "s8", (128, 512), 8, count=4).bytes
    57344
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    group_size: int
    count: int = 1
    name: str = ""
    is_weight: bool = False
    is_sliced: bool = False

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind is one of {KINDS}, got {self.kind!r}")

    @property
    def bytes(self) -> int:
        """What one device sends, once."""
        n, size = self.group_size, Shape(self.dtype, self.shape).bytes
        if self.kind == "collective-permute":
            return size
        if self.kind == "reduce-scatter":  # the shape is what it gives, a part of what it takes
            return (n - 1) * size
        return (2 if self.kind == "all-reduce" else 1) * (n - 1) * size // n

    @property
    def written(self) -> int:
        """What a device has in memory of it afterwards, once."""
        return Shape(self.dtype, self.shape).bytes

    @property
    def total(self) -> int:
        """What one device sends in a run of the program."""
        return self.count * self.bytes

    def scattered(self) -> "Collective":
        """The reduce-scatter that an accelerator runs instead of a sliced all-reduce; anything else as it is."""
        if not self.is_sliced:
            return self
        part = (math.prod(self.shape) // self.group_size,)
        return dataclasses.replace(self, kind="reduce-scatter", shape=part, is_sliced=False)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All that a program sends. `unknown_loops` are loops whose turns are not known, and whose bodies count once.

    >>> print(Traffic((Collective("all-gather", "s8", (128, 512), 8, count=4, is_weight=True),)))
    kind        type  times  among  sent      of which weights
    all-gather  s8    4      8      229.4 kB  229.4 kB
    a device sends 229.4 kB, 229.4 kB of it weights
    """

    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...] = ()

    def total(self, kind: str | None = None, dtype: str | None = None) -> int:
        """The bytes that one device sends, of a kind or a type or in all."""
        return sum(c.total for c in self.collectives if kind in (None, c.kind) and dtype in (None, c.dtype))

    def weights(self) -> int:
        """The bytes of weights that one device sends for others to gather, scales included."""
        return sum(c.total for c in self.collectives if c.is_weight)

    def by_kind(self) -> dict[str, int]:
        """Bytes by kind of collective."""
        return {kind: self.total(kind) for kind in KINDS if any(c.kind == kind for c in self.collectives)}

    def by_dtype(self) -> dict[str, int]:
        """Bytes by type of element, the most first."""
        found = {c.dtype: self.total(dtype=c.dtype) for c in self.collectives}
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    def scattered(self) -> "Traffic":
        """The traffic of a platform that makes an all-reduce of which only parts are used a reduce-scatter."""
        return dataclasses.replace(self, collectives=tuple(c.scattered() for c in self.collectives))

    def line(self) -> str:
        """One line: all of it, by kind, and the share of weights."""
        kinds = ", ".join(f"{kind} {_size(sent)}" for kind, sent in self.by_kind().items() if sent)
        types = ", ".join(sorted({c.dtype for c in self.collectives if c.is_weight and c.total > self.weights() / 100}))
        weights = f"; weights {_size(self.weights())} in {types}" if self.weights() else ""
        return f"a device sends {_size(self.total())} a step" + (f": {kinds}{weights}" if kinds else "")

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        sums = {"total": self.total(), "weights": self.weights(), "by_kind": self.by_kind()}
        return sums | {"by_dtype": self.by_dtype(), **dataclasses.asdict(self)}

    def _table(self) -> list[tuple[str, ...]]:
        groups: dict[tuple[str, str, int], list[Collective]] = {}
        for c in self.collectives:
            groups.setdefault((c.kind, c.dtype, c.group_size), []).append(c)
        rows: list[tuple[str, ...]] = [("kind", "type", "times", "among", "sent", "of which weights")]
        for (kind, dtype, size), group in sorted(groups.items(), key=lambda g: -sum(c.total for c in g[1])):
            weights = sum(c.total for c in group if c.is_weight)
            times, sent = sum(c.count for c in group), sum(c.total for c in group)
            rows.append((kind, dtype, str(times), str(size), _size(sent), _size(weights) if weights else ""))
        return rows

    def __str__(self) -> str:
        rows = self._table() if self.collectives else []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += [f"counted once, unknown trip count: {name}" for name in self.unknown_loops]
        return "\n".join([*lines, f"a device sends {_size(self.total())}, {_size(self.weights())} of it weights"])


def read_traffic(text: str | Module, *, weights: str | Callable[[str], bool] = "params") -> Traffic:
    """What the program of an HLO text sends, such as that of `compiled.as_text()` or `partitioned_hlo`.

    A collective is of weights if it gathers what was computed from weights alone (`lineage.py`). Arguments of the
    program are weights whose name, such as `state.params['wo']['kernel']`, has the word `weights` in it, or for which
    it is true.
    """
    module = hlo.read(text) if isinstance(text, str) else text
    if isinstance(weights, str):
        pattern = re.compile(rf"\b{re.escape(weights)}\b")
        weights = lambda name: bool(pattern.search(name))  # noqa: E731
    reading = _Reading(module, Lineage(module, weights))
    walk = Walk(module, reading.of, cost=lambda c: c.bytes)
    found = tuple(dataclasses.replace(c, count=count) for c, count in walk.found())
    return Traffic(found, tuple(dict.fromkeys(walk.unknown)))


class _Reading:
    """The collectives among the instructions of a program."""

    def __init__(self, module: Module, lineage: Lineage):
        self.module, self.lineage = module, lineage

    def of(self, computation: str, line: Instruction) -> Iterable[Collective]:
        """Those of one instruction."""
        return self._collectives(computation, line) if line.opcode in _STARTS else ()

    def _collectives(self, computation: str, line: Instruction) -> Iterator[Collective]:
        kind = _STARTS[line.opcode]
        size = group_size(line.attributes) if kind != "collective-permute" else 2
        shapes = line.shapes
        if line.opcode == "all-gather-start":  # what it takes, then what it gives
            shapes = shapes[len(shapes) // 2 :]
        elif line.opcode == "collective-permute-start":
            shapes = shapes[len(line.operands) : 2 * len(line.operands)]
        is_weight = kind == "all-gather" and self.lineage(computation, line)
        is_sliced = kind == "all-reduce" and len(shapes) == 1 and self._is_sliced(computation, line, size)
        for shape in shapes:
            if size > 1:
                yield Collective(kind, shape.dtype, shape.dims, size, 1, line.op_name, is_weight, is_sliced)

    def _is_sliced(self, computation: str, line: Instruction, size: int) -> bool:
        users = [i for i in self.module.computations[computation] if line.name in i.operands]
        if len(users) == 1 and users[0].opcode in _MOVES:
            return self._is_sliced(computation, users[0], size)
        parts = [i.opcode == "dynamic-slice" and i.shapes[0].size * size == line.shapes[0].size for i in users]
        return bool(parts) and all(parts)


_LIST = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=")
_MESH = re.compile(r"replica_groups=(?:@?\w+)?\[?mesh\[([^\]]*)\][^{]*\{([^}]*)\}")


def group_size(attributes: str) -> int:
    """How many devices take part in a collective together, from its `replica_groups`.

    >>> group_size("replica_groups={{0,1},{2,3}}"), group_size("replica_groups=[2,4]<=[4,2]T(1,0)")
    (2, 4)
    >>> group_size("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}")
    8
    """
    if match := _LIST.search(attributes):
        return len(match[1].split(","))
    if match := _IOTA.search(attributes):
        return int(match[1].split(",")[-1])
    if match := _MESH.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match[1])}
        # A part of an axis is written 'axis':(1)4, four long.
        parts = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part) if part else sizes[axis] for axis, part in parts)
    raise ValueError(f"no devices in {attributes.strip()[:200]!r}: a collective names them by replica_groups")


_PASS = "after_spmd-partitioning"


def partitioned_hlo(lowered: Any) -> str:
    """The HLO of a lowered program once it is cut into parts for devices, before a backend changes types.

    XLA's CPU backend gathers bfloat16 as float32, float8 as float16 and int4 as int8, since it computes so. What a
    platform sends is what stands in this text of the program that was lowered for it, `lowering_platforms=("tpu",)`
    say, which partitions in the same way on any backend. Compiles the program, and reads what XLA writes about it.
    """
    return compile_partitioned(lowered)[0]


def compile_partitioned(lowered: Any, directory: str | None = None) -> tuple[str, Any]:
    """The text of `partitioned_hlo` and the compiled program, or the error that the backend raised after that.

    With a `directory`, the text is a file there, also if the backend ends the process: see `partitioned_text`.
    """
    with contextlib.ExitStack() as stack:
        folder = directory or stack.enter_context(tempfile.TemporaryDirectory())
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_text": True}
        try:
            compiled: Any = lowered.compile(compiler_options=dump)
        except Exception as error:  # of a backend that cannot run the program: the text is there all the same
            compiled = error
        if (text := partitioned_text(folder)) is not None:
            return text, compiled
    if isinstance(compiled, Exception):
        raise compiled
    # One device: there was nothing to cut.
    return compiled.as_text(), compiled


def partitioned_text(directory: str | Path) -> str | None:
    """The text that `compile_partitioned` left in a directory, if it came so far."""
    texts = sorted(Path(directory).glob(f"*{_PASS}*.txt"))
    return texts[-1].read_text(encoding="utf-8") if texts else None


def traffic_line(compiled: Any) -> str:
    """What a compiled step sends, in one line.

    >>> import jax, jax.numpy as jnp
    >>> traffic_line(jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile())
    'a device sends 0 B a step'
    """
    return read_traffic(compiled.as_text()).line()


def _size(count: int | float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
