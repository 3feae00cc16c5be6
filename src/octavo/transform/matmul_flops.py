"""The FLOPs of a matmul or convolution."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


def dot_flops(lhs: Sequence[int], rhs: Sequence[int], shared: Iterable[int]) -> int:
    """FLOPs of a matmul; `shared` are the contracted, batch and group axes of the right operand."""
    shared = set(shared)
    return 2 * math.prod(lhs) * math.prod(dim for axis, dim in enumerate(rhs) if axis not in shared)


class Window(NamedTuple):
    """One spatial axis of a convolution: its sizes, and how the kernel moves along it."""

    size: int
    kernel: int
    out: int
    stride: int
    pad: int
    dilation: int
    kernel_dilation: int

    def pairs(self) -> int:
        """The number of (output, kernel) positions that read an input value, not padding or dilation."""
        place = np.arange(self.out)[:, None] * self.stride + np.arange(self.kernel) * self.kernel_dilation - self.pad
        return int(np.sum((place >= 0) & (place % self.dilation == 0) & (place // self.dilation < self.size)))


def conv_flops(features: int, others: int, windows: Iterable[Window]) -> int:
    """FLOPs of a convolution as XLA counts them: input features per group, outputs per position, spatial axes."""
    return 2 * features * others * math.prod(w.pairs() for w in windows)


def matmul_flops(params: Mapping[str, Any], lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]) -> int:
    """FLOPs of one execution of a matmul primitive with these parameters, for these shapes."""
    if "ragged_dot_dimension_numbers" in params:
        numbers = params["ragged_dot_dimension_numbers"]
        (_, contract), (_, batch) = numbers.dot_dimension_numbers
        return dot_flops(lhs, rhs, (*contract, *batch, *numbers.rhs_group_dimensions))
    at = params["dimension_numbers"]
    if "window_strides" not in params:
        (_, contract), (_, batch) = at
        return dot_flops(lhs, rhs, (*contract, *batch))
    axes = zip(at.lhs_spec[2:], at.rhs_spec[2:], at.out_spec[2:], strict=True)
    low = [pad for pad, _ in params["padding"]]
    moves = zip(params["window_strides"], low, params["lhs_dilation"], params["rhs_dilation"], strict=True)
    windows = [Window(lhs[a], rhs[b], out[c], *move) for (a, b, c), move in zip(axes, moves, strict=True)]
    return conv_flops(rhs[at.rhs_spec[1]], out[at.out_spec[0]] * out[at.out_spec[1]], windows)
