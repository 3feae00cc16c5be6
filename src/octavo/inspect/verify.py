"""Verification: the share of a function's matmul FLOPs that is low precision, forward and backward."""

import dataclasses
import html
import json
from collections.abc import Callable
from typing import Any

import jax
from jax import export

from octavo._text import format_table
from octavo.inspect.flops import CountedMatmul, count_flops
from octavo.inspect.stablehlo import Lowered, read_stablehlo
from octavo.transform.jaxpr import as_array_function, current_platform, make_live_jaxpr

LOW = ("native", "emulated")
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_ROWS = 24


@dataclasses.dataclass(frozen=True)
class Verification:
    """The matmuls of a function and their precision; printed as a table.

    Attributes:
        matmuls: All of them.
        platform: The platform that they are counted for.
        opaque: Kernels, whose FLOPs are missing here.
        unknown_loops: Loops of unknown trip count, whose bodies count once.
        lowered: The matmuls in StableHLO, if a platform was given.

    >>> Verification((), platform="cpu").share()
    0.0
    """

    matmuls: tuple[CountedMatmul, ...]
    platform: str
    opaque: tuple[str, ...] = ()
    unknown_loops: tuple[str, ...] = ()
    lowered: tuple[Lowered, ...] | None = None

    def flops(self, kind: str | None = None, backward: bool | None = None) -> int:
        """The FLOPs of matmuls of a kind ("native", "emulated", "weight_only", "float"), of a pass, or of all."""
        return sum(p.flops for p in self.matmuls if kind in (None, p.kind) and backward in (None, p.backward))

    def share(self, kind: str | None = None, backward: bool | None = None) -> float:
        """The share, 0 to 1, of matmul FLOPs of a kind, or of low precision; 0 if there are no matmuls."""
        kinds = LOW if kind is None else (kind,)
        return sum(self.flops(k, backward) for k in kinds) / max(1, self.flops(backward=backward))

    @property
    def forward(self) -> float:
        """The share of low precision in the forward pass."""
        return self.share(backward=False)

    @property
    def backward(self) -> float:
        """The share of low precision in the backward pass, recomputation included."""
        return self.share(backward=True)

    @property
    def lowered_share(self) -> float:
        """The share of FLOPs in StableHLO between operands of eight bits or fewer; a loop's body counts once."""
        rows = self.lowered or ()
        return sum(r.flops for r in rows if r.is_low) / max(1, sum(r.flops for r in rows))

    def to_json(self) -> str:
        """The verification as a JSON text."""
        lowered = None if self.lowered is None else [r._asdict() for r in self.lowered]
        shares = {"forward": self.forward, "backward": self.backward, "native": self.share("native")}
        return json.dumps(dataclasses.asdict(self) | {"lowered": lowered, "share": shares})

    def summary(self) -> str:
        """One line: the shares of both passes."""
        kernels = f"; {len(self.opaque)} kernel{'s' * (len(self.opaque) > 1)} not counted" if self.opaque else ""
        if not self.flops():
            return f"no matmuls found{kernels}"
        passes = [(b, name) for b, name in ((False, " forward"), (True, " backward")) if self.flops(backward=b)]
        first, *rest = [(_percent(self.share(backward=b)), name) for b, name in passes]
        shares = ", ".join([" of matmul FLOPs".join(first), *map("".join, rest)])
        low = sum(map(self.flops, LOW))
        native = f" (native {_percent(self.flops('native') / low)})" if low else ""
        reading = [p for p in self.matmuls if p.kind != "float"]
        weights = ""
        if self.flops("weight_only"):
            total, stored = self.flops(), sum(p.flops for p in reading if p.stored)
            weights = (
                f"; weights in low bits: read by {_percent(sum(p.flops for p in reading) / total)} of matmul FLOPs"
            )
            weights += f", stored for {_percent(stored / total)}"
        return f"low precision: {shares}{native}{weights}{kernels}"

    def notes(self) -> list[str]:
        """Further notes, a line each."""
        notes = [f"not counted, opaque: {name}" for name in self.opaque]
        notes += [f"counted once, unknown trip count: {name}" for name in self.unknown_loops]
        if self.flops("weight_only"):
            notes.append(f"weight only: {_percent(self.share('weight_only'))} of matmul FLOPs")
        if self.lowered is not None:
            text = f"StableHLO for {self.platform}"
            notes += [f"{text}: {r.count} x {r.op} {r.lhs} x {r.rhs} -> {r.out}" for r in self.lowered]
            notes.append(f"{text}: {_percent(self.lowered_share)} of FLOPs in 8 bits or fewer, loop bodies once")
        return notes

    def _table(self) -> list[tuple[str, ...]]:
        """Equal matmuls as one row, the largest rows in the order of execution."""
        merged: dict[CountedMatmul, tuple[int, int]] = {}
        for p in self.matmuls:
            same = dataclasses.replace(p, flops=0, count=0)
            flops, count = merged.get(same, (0, 0))
            merged[same] = flops + p.flops, count + p.count
        largest = sorted(merged, key=lambda p: -merged[p][0])[:_ROWS]
        rows: list[tuple[str, ...]] = [("path", "pass", "op", "operands", "out", "count", "FLOPs", "kind")]
        for p, (flops, count) in merged.items():
            if p in largest:
                sides = (f"{dtype}{list(dims)}" for dtype, dims in ((p.lhs_dtype, p.lhs), (p.rhs_dtype, p.rhs)))
                operands = " x ".join(sides).replace(", ", ",")
                passed = "backward" if p.backward else "forward"
                rows.append((p.path or "-", passed, p.op, operands, p.out_dtype, str(count), f"{flops:.4g}", p.kind))
        if len(merged) > _ROWS:
            rest = sum(flops for p, (flops, _) in merged.items() if p not in largest)
            rows.append((f"and {len(merged) - _ROWS} smaller", *[""] * 5, f"{rest:.4g}", ""))
        return rows if merged else []

    def __str__(self) -> str:
        rows = self._table()
        lines = format_table(rows)
        return "\n".join([*lines, *self.notes(), self.summary()])

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(x)}</td>' for x in row)}</tr>" for row in self._table())
        notes = "<br>".join(map(html.escape, [*self.notes(), self.summary()]))
        return f"<table>{rows}</table><p>{notes}</p>"


def verify(fn: Any, *args: Any, platform: str | None = None, **kwargs: Any) -> Verification:
    """Count the matmul FLOPs of `fn(*args, **kwargs)` by the precision of their operands, without running it.

    FLOPs are those of all devices and of every iteration of a scan, and rematerialization counts; of a `lax.cond`, the
    branch with the most FLOPs counts. Dead code does not, nor do zeros that padding and dilation add to a convolution.

    Args:
        fn: A function; one that takes gradients shows the backward pass too.
        *args: Arrays, QArrays, `jax.ShapeDtypeStruct`s or trees of them; other leaves are static.
        platform: "cpu", "cuda", "rocm" or "tpu": lower the function for it, and report the types in its StableHLO. No
            such device is needed.
        **kwargs: Its keyword arguments.

    >>> import jax.numpy as jnp, octavo
    >>> config = octavo.DotConfig.qat("int8")
    >>> loss = lambda w, x: octavo.dot(x, w, config=config).sum()
    >>> print(verify(jax.value_and_grad(loss), jnp.ones((32, 16)), jnp.ones((8, 32))))
    path  pass      op           operands                       out      count  FLOPs  kind
    -     forward   dot_general  int8[8,32] x int8[32,16]       int32    1      8192   native
    -     backward  dot_general  float32[8,32] x float32[8,16]  float32  1      8192   float
    low precision: 100.0 % of matmul FLOPs forward, 0.0 % backward (native 100.0 %)
    """
    if not callable(fn):
        raise TypeError(f"verify takes a function and its arguments, got {type(fn).__name__}: verify(fn, *args)")
    if platform is not None and platform not in PLATFORMS:
        raise ValueError(f"platform is one of {PLATFORMS}, got {platform!r}")
    flat, arrays = as_array_function(fn, args, kwargs)
    target = platform or current_platform()
    found = count_flops(make_live_jaxpr(flat, arrays), platform=target)
    lowered = None if platform is None else _lower(flat, arrays, platform)
    return Verification(found.matmuls, target, found.opaque, found.loops, lowered)


def _lower(fn: Callable[..., Any], arrays: list[Any], platform: str) -> tuple[Lowered, ...]:
    try:
        exported = export.export(jax.jit(fn), platforms=[platform])(*arrays)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"the function cannot be lowered for {platform!r}: {reason}. Leave platform out to count FLOPs only"
        ) from error
    return read_stablehlo(exported.mlir_module())


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
