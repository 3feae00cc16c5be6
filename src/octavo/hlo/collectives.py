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

import jax
from jax.experimental.compilation_cache import compilation_cache

from octavo.hlo import text as hlo
from octavo.hlo.gradient_flow import EXCHANGES, Fates
from octavo.hlo.text import Instruction, Module, Shape, group_size
from octavo.hlo.visit import Walk
from octavo.hlo.weight_flow import Lineage

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_STARTS = {f"{kind}-start": kind for kind in KINDS} | {kind: kind for kind in KINDS}
_MOVES = frozenset({"bitcast", "copy", "reshape", "transpose", "convert"})


@dataclasses.dataclass(frozen=True)
class Collective:
    """An array that is sent, `count` times in a run of the program; `bytes` are those of once.

    `weights` are the arguments, by name, of which it gathers what was computed from them alone; there are several if
    that is one array, or one place in the program, for all of them. `is_gradient` is for what becomes the new value of
    a weight. `is_sliced` is for an all-reduce of whose sum each device uses its own part alone: accelerators run that
    as a reduce-scatter, and CPUs do not.

    >>> Collective("all-gather", "s8", (128, 512), 8, count=4).bytes
    57344
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    group_size: int
    count: int = 1
    name: str = ""
    weights: tuple[str, ...] = ()
    is_sliced: bool = False
    is_gradient: bool = False

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind is one of {KINDS}, got {self.kind!r}")

    @property
    def is_weight(self) -> bool:
        """Whether it is gathered of parameters."""
        return bool(self.weights)

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

    >>> print(Traffic((Collective("all-gather", "s8", (128, 512), 8, count=4, weights=("params['w']",)),)))
    kind        type  times  among  sent    of which weights
    all-gather  s8    4      8      229 kB  229 kB
    a device sends 229 kB, 229 kB of it weights
    """

    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...] = ()

    def total(self, kind: str | None = None, dtype: str | None = None) -> int:
        """The bytes that one device sends, of a kind or a type or in all."""
        return sum(c.total for c in self.collectives if kind in (None, c.kind) and dtype in (None, c.dtype))

    def weights(self) -> int:
        """The bytes of weights that one device sends for others to gather, scales included."""
        return sum(c.total for c in self.collectives if c.is_weight)

    def gradients(self) -> int:
        """The bytes of gradients that one device sends, known where new weights take the place of donated ones."""
        return sum(c.total for c in self.collectives if c.is_gradient)

    def by_weight(self) -> dict[str, int]:
        """Bytes by the argument that is gathered; what is gathered of several together is of none."""
        found: dict[str, int] = {}
        for c in self.collectives:
            if len(c.weights) == 1:
                found[c.weights[0]] = found.get(c.weights[0], 0) + c.total
        return found

    def by_kind(self) -> dict[str, int]:
        """Bytes by kind of collective."""
        return {kind: self.total(kind) for kind in KINDS if any(c.kind == kind for c in self.collectives)}

    def by_dtype(self, kind: str | None = None) -> dict[str, int]:
        """Bytes by type of element, the most first, of a kind or in all."""
        found = {c.dtype: self.total(kind, c.dtype) for c in self.collectives if kind in (None, c.kind)}
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    def scattered(self) -> "Traffic":
        """The traffic of a platform that makes an all-reduce of which only parts are used a reduce-scatter."""
        return dataclasses.replace(self, collectives=tuple(c.scattered() for c in self.collectives))

    def line(self) -> str:
        """One line: all of it, by kind and type, and what it is for as far as that is known.

        >>> Traffic((Collective("all-gather", "s8", (128, 512), 8, count=4, weights=("params['w']",)),)).line()
        'a device sends 229 kB: all-gather 229 kB (s8); weights 229 kB'
        """
        parts = []
        for kind, sent in self.by_kind().items():
            types = {dtype: size for dtype, size in self.by_dtype(kind).items() if size}
            each = ", ".join(f"{dtype} {sent_size(size)}" if len(types) > 1 else dtype for dtype, size in types.items())
            parts += [f"{kind} {sent_size(sent)} ({each})"] if sent else []
        uses = {"weights": self.weights(), "gradients": self.gradients()}
        known = {use: sent for use, sent in uses.items() if sent}
        if known and (rest := self.total() - sum(known.values())):
            known["the rest"] = rest
        what = ", ".join(f"{use} {sent_size(sent)}" for use, sent in known.items())
        kinds = f": {', '.join(parts)}" if parts else ""
        return f"a device sends {sent_size(self.total())}{kinds}" + (f"; {what}" if what else "")

    def summary(self) -> dict[str, Any]:
        """The sums as plain values."""
        sums = {"line": self.line(), "total": self.total(), "weights": self.weights(), "gradients": self.gradients()}
        by_kind = {kind: self.by_dtype(kind) for kind in self.by_kind()}
        return sums | {"by_kind": by_kind, "unknown_loops": list(self.unknown_loops)}

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        sums = {"total": self.total(), "weights": self.weights(), "gradients": self.gradients()}
        return sums | {"by_kind": self.by_kind(), "by_dtype": self.by_dtype(), **dataclasses.asdict(self)}

    def _table(self) -> list[tuple[str, ...]]:
        groups: dict[tuple[str, str, int], list[Collective]] = {}
        for c in self.collectives:
            groups.setdefault((c.kind, c.dtype, c.group_size), []).append(c)
        rows: list[tuple[str, ...]] = [("kind", "type", "times", "among", "sent", "of which weights")]
        for (kind, dtype, size), group in sorted(groups.items(), key=lambda g: -sum(c.total for c in g[1])):
            weights = sum(c.total for c in group if c.is_weight)
            times, sent = sum(c.count for c in group), sum(c.total for c in group)
            rows.append((kind, dtype, str(times), str(size), sent_size(sent), sent_size(weights) if weights else ""))
        return rows

    def __str__(self) -> str:
        rows = self._table() if self.collectives else []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += [f"counted once, unknown trip count: {name}" for name in self.unknown_loops]
        total, weights = sent_size(self.total()), sent_size(self.weights())
        return "\n".join([*lines, f"a device sends {total}, {weights} of it weights"])


def read_traffic(text: str | Module, *, weights: str | Callable[[str], bool] = "params") -> Traffic:
    """What the program of an HLO text sends, such as that of `compiled.as_text()` or `partitioned_hlo`.

    A collective is of weights if it gathers what was computed from weights alone (`lineage.py`), and of gradients if
    what it gives becomes a weight (`fate.py`). Arguments of the program are weights whose name, such as
    `state.params['wo']['kernel']`, has the word `weights` in it, or for which it is true.
    """
    module = hlo.read(text) if isinstance(text, str) else text
    if isinstance(weights, str):
        pattern = re.compile(rf"\b{re.escape(weights)}\b")
        weights = lambda name: bool(pattern.search(name))  # noqa: E731
    reading = _Reading(module, Lineage(module, weights), Fates(module, weights))
    walk = Walk(module, reading.of, cost=lambda c: c.bytes)
    found = tuple(dataclasses.replace(c, count=count) for c, count in walk.found())
    return Traffic(found, tuple(dict.fromkeys(walk.unknown)))


class _Reading:
    """The collectives among the instructions of a program."""

    def __init__(self, module: Module, lineage: Lineage, fates: Fates):
        self.module, self.lineage, self.fates = module, lineage, fates

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
        weights = self.lineage(computation, line) if kind == "all-gather" else ()
        is_sliced = kind == "all-reduce" and len(shapes) == 1 and self._is_sliced(computation, line, size)
        parts = size if kind in EXCHANGES else 1
        for n, shape in enumerate(shapes):
            own = weights[n] if n < len(weights) else ()
            is_gradient = not own and self.fates(computation, line, n, parts=parts)
            if size > 1:
                yield Collective(kind, shape.dtype, shape.dims, size, 1, line.op_name, own, is_sliced, is_gradient)

    def _is_sliced(self, computation: str, line: Instruction, size: int) -> bool:
        users = [i for i in self.module.computations[computation] if line.name in i.operands]
        if len(users) == 1 and users[0].opcode in _MOVES:
            return self._is_sliced(computation, users[0], size)
        parts = [i.opcode == "dynamic-slice" and i.shapes[0].size * size == line.shapes[0].size for i in users]
        return bool(parts) and all(parts)


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
            with _uncached():
                compiled: Any = lowered.compile(compiler_options=dump)
        except Exception as error:  # of a backend that cannot run the program: the text is there all the same
            compiled = error
        if (text := partitioned_text(folder)) is not None:
            return text, compiled
    if isinstance(compiled, Exception):
        raise compiled
    # One device: there was nothing to cut.
    return compiled.as_text(), compiled


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Without JAX's compilation cache: of a program that comes from there nothing is written."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is used
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def partitioned_text(directory: str | Path) -> str | None:
    """The text that `compile_partitioned` left in a directory, if it came so far."""
    texts = sorted(Path(directory).glob(f"*{_PASS}*.txt"))
    return texts[-1].read_text(encoding="utf-8") if texts else None


def sent_size(count: int | float) -> str:
    """Bytes in the unit that suits them, of a thousand each, as links are measured.

    >>> sent_size(999), sent_size(1_852_000), sent_size(999_900)
    ('999 B', '1.85 MB', '1 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:.0f} {unit}"
        count /= 1000
    raise AssertionError
