"""Is it really quantized? The share of a function's matmul FLOPs that is low precision, forward and backward apart."""

import collections
import dataclasses
import html
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import export

from octavo._text import format_table
from octavo.inspect.flops import Product, tally
from octavo.transform.jaxpr import live, of_arrays, this_platform
from octavo.transform.matmul_flops import Window, conv_flops, dot_flops

LOW = ("native", "emulated")
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_ROWS = 24


class Lowered(NamedTuple):
    """Matmuls of one type in a StableHLO text: how often they are written there, and the FLOPs of all of those."""

    op: str
    lhs: str
    rhs: str
    out: str
    count: int
    flops: int

    @property
    def is_low(self) -> bool:
        """Whether both operands have eight bits or fewer."""
        return all(1 < _bits(t) <= 8 for t in (self.lhs, self.rhs))


@dataclasses.dataclass(frozen=True)
class Verification:
    """What the matmuls of a function are made of: one row per product, and the kernels and loops that hide some.

    `opaque` lists kernels that were not looked into, whose FLOPs are missing here. `unknown_loops` lists loops without
    a known number of turns, whose bodies count once. `lowered` is what StableHLO says, if a platform was asked for.

    >>> Verification((), platform="cpu").share()
    0.0
    """

    products: tuple[Product, ...]
    platform: str
    opaque: tuple[str, ...] = ()
    unknown_loops: tuple[str, ...] = ()
    lowered: tuple[Lowered, ...] | None = None

    def flops(self, kind: str | None = None, backward: bool | None = None) -> int:
        """The FLOPs of products of a kind ("native", "emulated", "weight_only", "float"), of a direction, or of all."""
        return sum(p.flops for p in self.products if kind in (None, p.kind) and backward in (None, p.backward))

    def share(self, kind: str | None = None, backward: bool | None = None) -> float:
        """The share, 0 to 1, of matmul FLOPs that is of a kind, or of low precision at all; 0 if there are none."""
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
        """All of it as a JSON text."""
        lowered = None if self.lowered is None else [r._asdict() for r in self.lowered]
        shares = {"forward": self.forward, "backward": self.backward, "native": self.share("native")}
        return json.dumps(dataclasses.asdict(self) | {"lowered": lowered, "share": shares})

    def summary(self) -> str:
        """One line: the shares of both directions."""
        if not self.flops():
            return "no matmuls found"
        passes = [(b, name) for b, name in ((False, " forward"), (True, " backward")) if self.flops(backward=b)]
        first, *rest = [(_percent(self.share(backward=b)), name) for b, name in passes]
        shares = ", ".join([" of matmul FLOPs".join(first), *map("".join, rest)])
        low = sum(map(self.flops, LOW))
        native = f" (native {_percent(self.flops('native') / low)})" if low else ""
        return f"low precision: {shares}{native}"

    def notes(self) -> list[str]:
        """What else there is to say, a line each."""
        notes = [f"not counted, opaque: {name}" for name in self.opaque]
        notes += [f"counted once, unknown trip count: {name}" for name in self.unknown_loops]
        if self.flops("weight_only"):
            notes.append(f"weight only: {_percent(self.share('weight_only'))} of matmul FLOPs")
        if self.lowered is not None:
            where = f"StableHLO for {self.platform}"
            notes += [f"{where}: {r.count} x {r.op} {r.lhs} x {r.rhs} -> {r.out}" for r in self.lowered]
            notes.append(f"{where}: {_percent(self.lowered_share)} of FLOPs in 8 bits or fewer, loop bodies once")
        return notes

    def _table(self) -> list[tuple[str, ...]]:
        """Equal products as one row, the largest of them, in the order in which they come."""
        merged: dict[Product, tuple[int, int]] = {}
        for p in self.products:
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
    """Count the matmul FLOPs of `fn(*args, **kwargs)` by what their operands are made of, without running it.

    Arguments are arrays, QArrays, `jax.ShapeDtypeStruct`s or trees of them; whatever else they hold is passed on as it
    is. Pass a function that takes gradients to see the backward pass too. FLOPs are those of all devices and of every
    turn of a scan, and recomputation counts; of a `lax.cond`, the branch with most FLOPs does. What no result depends
    on does not count, nor do products with the zeros that padding and dilation add to a convolution. With a `platform`
    ("cpu", "cuda", "rocm", "tpu"; no such device is needed) the function is lowered for it too, and the types in its
    StableHLO are reported.

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
    flat, arrays = of_arrays(fn, args, kwargs)
    target = platform or this_platform()
    found = tally(live(flat, arrays), platform=target)
    lowered = None if platform is None else _lower(flat, arrays, platform)
    return Verification(found.products, target, found.opaque, found.loops, lowered)


def _lower(fn: Callable[..., Any], arrays: list[Any], platform: str) -> tuple[Lowered, ...]:
    # The text is read, not kept, so what has no guarantee of stability may be in it: CPU layouts do not.
    unchecked = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
    try:
        exported = export.export(jax.jit(fn), platforms=[platform], disabled_checks=unchecked)(*arrays)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"the function cannot be lowered for {platform!r}: {reason}. Leave platform out to count FLOPs only; if "
            "this is about layouts, use configs with lowering='plain'"
        ) from error
    return read_stablehlo(exported.mlir_module())


_TYPES = r" : \(tensor<([^>]*)>, tensor<([^>]*)>(?:, tensor<[^>]*>)*\) -> tensor<([^>]*)>"
_DOT = re.compile(
    r"stablehlo\.dot_general (?:.*?batching_dims = \[[^]]*\] x \[([^]]*)\])?"
    r"(?:.*?contracting_dims = \[[^]]*\] x \[([^]]*)\])?.*?" + _TYPES
)
# As an operation it names its axes; as a composite, which is how it is exported, it lists all six kinds of them.
_RAGGED = re.compile(
    r'"chlo\.ragged_dot".*?ragged_dot_dimension_numbers = (?:\[(.*?)\]\}|#chlo\.ragged_dot<(.*?)>).*?' + _TYPES
)
_CONV = re.compile(
    r"stablehlo\.convolution\(.*?dim_numbers = \[([^]]*)\]x\[([^]]*)\]->\[([^]]*)\], window = \{(.*?)\} .*?" + _TYPES
)


def read_stablehlo(text: str) -> tuple[Lowered, ...]:
    """The matmuls and convolutions in a StableHLO text, each counted as often as it is written.

    >>> read_stablehlo("stablehlo.dot_general %0, %1, contracting_dims = [1] x [0] : "
    ...                "(tensor<8x4xi8>, tensor<4x2xi8>) -> tensor<8x2xi32>")
    (Lowered(op='dot_general', lhs='8x4xi8', rhs='4x2xi8', out='8x2xi32', count=1, flops=128),)
    """
    found: collections.Counter[tuple[str, str, str, str, int]] = collections.Counter()
    fallback = False
    for line in text.splitlines():
        if "func.func" in line:
            # What a ragged matmul falls back to is written out as well.
            fallback = "@chlo.ragged_dot" in line
        if fallback:
            continue
        if match := _DOT.search(line):
            batch, contract, lhs, rhs, out = match.groups(default="")
            shared = _numbers(f"{batch},{contract}")
            found["dot_general", lhs, rhs, out, dot_flops(_dims(lhs), _dims(rhs), shared)] += 1
        elif match := _RAGGED.search(line):
            listed, named, lhs, rhs, out = match.groups(default="")
            found["ragged_dot", lhs, rhs, out, dot_flops(_dims(lhs), _dims(rhs), _shared(listed, named))] += 1
        elif match := _CONV.search(line):
            *axes, window, lhs, rhs, out = match.groups()
            found["convolution", lhs, rhs, out, _conv_flops(axes, window, lhs, rhs, out)] += 1
    return tuple(Lowered(op, lhs, rhs, out, n, n * flops) for (op, lhs, rhs, out, flops), n in found.items())


def _shared(listed: str, named: str) -> list[int]:
    """The axes of a ragged matmul's right operand that its left one has too, or that tell groups apart."""
    if listed:
        _, batch, _, contract, _, group = re.findall(r"dense<([^>]*)> : tensor<\d+xi64>", listed)
    else:
        axes = dict(re.findall(r"rhs_(\w+)_dimensions = (\[[^]]*\])", named))
        batch, contract, group = (axes.get(kind, "") for kind in ("batching", "contracting", "group"))
    return _numbers(f"{batch},{contract},{group}")


def _conv_flops(axes: list[str], window: str, *types: str) -> int:
    lhs, rhs, out = (dict(zip(a.split(", "), _dims(t), strict=True)) for a, t in zip(axes, types, strict=True))
    spatial = [a for a in lhs if a.isdigit()]
    given = dict(re.findall(r"(\w+) = (\[\[.*?\]\]|\[[^]]*\])", window))
    per_axis = lambda name, default: _numbers(given.get(name, "")) or [default] * len(spatial)  # noqa: E731
    stride, dilation, kernel = per_axis("stride", 1), per_axis("lhs_dilate", 1), per_axis("rhs_dilate", 1)
    pad = _numbers(given.get("pad", ""))[::2] or [0] * len(spatial)
    windows = [
        Window(lhs[a], rhs[a], out[a], stride[int(a)], pad[int(a)], dilation[int(a)], kernel[int(a)]) for a in spatial
    ]
    return conv_flops(rhs["i"], out["b"] * out["f"], windows)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d+", text)]


def _dims(tensor: str) -> list[int]:
    return [int(n) for n in tensor.split("x")[:-1]]


def _bits(tensor: str) -> int:
    """The bits of an element type: i8, ui4, f8E4M3FN, bf16; 0 for a complex one."""
    match = re.match(r"(?:u?i|b?f)(\d+)", tensor.split("x")[-1])
    return int(match[1]) if match else 0


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
