"""The matmuls in the StableHLO text of a lowered function."""

import collections
import re
from typing import NamedTuple

from octavo.transform.matmul_flops import Window, conv_flops, dot_flops


class Lowered(NamedTuple):
    """Matmuls of one type in a StableHLO text: the number of occurrences, and the FLOPs of all of them."""

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
    """The matmuls and convolutions in a StableHLO text, each counted by its occurrences.

    >>> read_stablehlo("stablehlo.dot_general %0, %1, contracting_dims = [1] x [0] : "
    ...                "(tensor<8x4xi8>, tensor<4x2xi8>) -> tensor<8x2xi32>")
    (Lowered(op='dot_general', lhs='8x4xi8', rhs='4x2xi8', out='8x2xi32', count=1, flops=128),)
    """
    found: collections.Counter[tuple[str, str, str, str, int]] = collections.Counter()
    fallback = False
    for line in text.splitlines():
        if "func.func" in line:
            # The decomposition of a ragged dot is in the text as well, and must not be counted.
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
    """The contracted, batch and group axes of a ragged dot's right operand."""
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
