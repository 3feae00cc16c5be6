"""The geometry of a convolution and of its two gradients, which are convolutions too.

With the stride s, the dilations a of the input and b of the kernel and the low padding p, along each spatial axis

    out[o] = sum_k dilated[s o + b k - p] rhs[k],        dilated[a i] = lhs[i], zero between.

So the gradient of the input convolves g, dilated by s, with the reversed kernel at stride a; the gradient of the
kernel convolves the input with g, dilated by s, at stride b. Feature groups in one are batch groups in the other.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array

type Pads = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class ConvDims:
    """The arguments of `lax.conv_general_dilated` without its operands, resolved for their shapes.

    `lhs` names the axes (example, feature, *spatial) of the input, `out` those of the output and `rhs` the axes
    (output feature, input feature, *spatial) of the kernel. `sizes` has (input, kernel, output) of each spatial axis.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]
    sizes: tuple[tuple[int, int, int], ...]
    strides: tuple[int, ...]
    padding: Pads
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    feature_groups: int = 1
    batch_groups: int = 1

    @staticmethod
    def of(
        lhs_shape: Sequence[int],
        rhs_shape: Sequence[int],
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
    ) -> "ConvDims":
        """From the arguments of `lax.conv_general_dilated`, which raises its own errors for invalid ones."""

        def conv(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            axes = (lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, batch_group_count)
            return jax.lax.conv_general_dilated(lhs, rhs, window_strides, padding, *axes)

        shapes = [jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for shape in (lhs_shape, rhs_shape)]
        out_shape = jax.eval_shape(conv, *shapes).shape
        numbers = jax.lax.conv_dimension_numbers(tuple(lhs_shape), tuple(rhs_shape), dimension_numbers)
        lhs, rhs, out = (tuple(spec) for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
        ones = (1,) * len(lhs[2:])
        rhs_dilation = ones if rhs_dilation is None else tuple(rhs_dilation)
        sizes = tuple(
            (lhs_shape[a], rhs_shape[b], out_shape[c]) for a, b, c in zip(lhs[2:], rhs[2:], out[2:], strict=True)
        )
        if isinstance(padding, str):
            window = [_dilate(kernel, step) for (_, kernel, _), step in zip(sizes, rhs_dilation, strict=True)]
            padding = jax.lax.padtype_to_pads([size for size, _, _ in sizes], window, window_strides, padding)
        return ConvDims(
            lhs,
            rhs,
            out,
            sizes,
            tuple(window_strides),
            tuple((int(low), int(high)) for low, high in padding),
            ones if lhs_dilation is None else tuple(lhs_dilation),
            rhs_dilation,
            feature_group_count,
            batch_group_count,
        )

    def __call__(
        self, lhs: Array, rhs: Array, *, dtype: Any = None, precision: Any = None, out_sharding: Any = None
    ) -> Array:
        """The convolution of two arrays of one dtype, accumulated in `dtype`."""
        kinds = {"precision": precision, "preferred_element_type": dtype, "out_sharding": out_sharding}
        return jax.lax.conv_general_dilated(lhs, rhs, **self.params, **kinds)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of JAX's primitive for this geometry."""
        return {
            "dimension_numbers": jax.lax.ConvDimensionNumbers(self.lhs, self.rhs, self.out),
            "window_strides": self.strides,
            "padding": self.padding,
            "lhs_dilation": self.lhs_dilation,
            "rhs_dilation": self.rhs_dilation,
            "feature_group_count": self.feature_groups,
            "batch_group_count": self.batch_groups,
        }

    @property
    def groups(self) -> int:
        """The number of feature or batch groups; at most one of the two is more than one."""
        return max(self.feature_groups, self.batch_groups)

    def dlhs(self) -> "ConvDims":
        """The convolution of g with `kernel(rhs)`, whose result `arrange` reshapes to the gradient of the input."""
        pads = []
        for (size, kernel, out), step, (low, _), a, b in self._spatial():
            before = _dilate(kernel, b) - 1 - low
            pads.append((before, _dilate(size, a) + _dilate(kernel, b) - 1 - _dilate(out, step) - before))
        return ConvDims(
            self.out,
            _swap(self.rhs),
            self.lhs,
            tuple((out, kernel, size) for size, kernel, out in self.sizes),
            self.lhs_dilation,
            tuple(pads),
            self.strides,
            self.rhs_dilation,
            feature_groups=self.groups,
        )

    def drhs(self) -> "ConvDims":
        """The convolution of the input with g, both with their example and feature axes swapped."""
        pads = []
        for (size, kernel, out), step, (low, _), a, b in self._spatial():
            pads.append((low, _dilate(kernel, b) - 1 + _dilate(out, step) - _dilate(size, a) - low))
        return ConvDims(
            _swap(self.lhs),
            _swap(self.out),
            _swap(self.rhs),
            tuple((size, out, kernel) for size, kernel, out in self.sizes),
            self.rhs_dilation,
            tuple(pads),
            self.lhs_dilation,
            self.strides,
            feature_groups=self.batch_groups,
            batch_groups=self.feature_groups,
        )

    def _spatial(self):
        return zip(self.sizes, self.strides, self.padding, self.lhs_dilation, self.rhs_dilation, strict=True)

    def kernel(self, rhs: Array) -> Array:
        """The kernel for `dlhs`: reversed, with each group's input features as a group of output features."""
        return jnp.flip(_regroup(rhs, self.rhs[0], self.rhs[1], self.groups), self.rhs[2:])

    def arrange(self, dlhs: Array) -> Array:
        """The result of `dlhs` in the shape of the input: feature groups become batch groups."""
        return _regroup(dlhs, self.lhs[1], self.lhs[0], self.batch_groups)


def _dilate(size: int, step: int) -> int:
    return 0 if size == 0 else 1 + step * (size - 1)


def _swap(axes: tuple[int, ...]) -> tuple[int, ...]:
    return (axes[1], axes[0], *axes[2:])


def _regroup(x: Array, source: int, target: int, groups: int) -> Array:
    """Move groups from the major part of one axis to the major part of another."""
    if groups == 1:
        return x
    shape = list(x.shape)
    shape[source] //= groups
    x = x.reshape([*shape[:source], groups, *shape[source:]])
    x = jnp.moveaxis(x, source, target)
    shape[target] *= groups
    return x.reshape(shape)
