"""Providers that record the inputs of weights, and the quantization of parameters with what they recorded.

Statistics are sums over batches and their number, in the collection "quant_stats" under the name of the weight and a
suffix.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo._tree import unflatten_paths
from octavo._typing import Array
from octavo.frameworks.params import WithAux, leaves_by_path, quantize_params
from octavo.ops import ragged_dot_general
from octavo.qarray import QArray, Quantizer
from octavo.rules import QuantizationRule
from octavo.transform import QuantizationProvider
from octavo.transform.frame import Key
from octavo.transform.site import operand_axes
from octavo.transform.state import QUANT_STATS


class CalibrationProvider(QuantizationProvider, metaclass=abc.ABCMeta):
    """Runs every matmul in float, and passes the inputs of weights that a rule matches to `_collect_stats`."""

    creates_state = True
    """Whether statistics that the variables do not have start from zero."""

    weight: Array
    """The weight of the operation that is being recorded, as [contracted, rest]."""

    @abc.abstractmethod
    def get_rule_type(self) -> type[QuantizationRule]:
        """The rules whose operations are recorded."""

    @abc.abstractmethod
    def get_stats_suffix(self) -> str:
        """What the name of the statistics adds to that of the weight."""

    @abc.abstractmethod
    def _collect_stats(
        self,
        lhs: jax.Array,
        weight_name: str,
        *,
        module_path: tuple[str, ...],
        op_name: str,
        op_id: str | None,
        lhs_id: int,
    ) -> None:
        """Record the inputs of a weight, [contracted, rest]; `lhs_id` is the same for matmuls of the same array."""

    def dot_general(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any) -> Array:
        site = self.operation.site
        if isinstance(site.rule, self.get_rule_type()) and site.leaf is not None:
            side = 1 if site.weights[1] else 0
            axes = operand_axes({"dimension_numbers": dimension_numbers}, lhs.shape, rhs.shape)
            if len(axes[0]["contracting"]) == 1 and not axes[0]["batch"]:
                rows = [_rows(x, *a["contracting"]) for x, a in zip((lhs, rhs), axes, strict=True)]
                self.weight = rows[side]
                self._collect_stats(
                    rows[1 - side],
                    site.leaf.rpartition("/")[2],
                    module_path=tuple(filter(None, site.path.split("/"))),
                    op_name=site.op,
                    op_id=site.op_id,
                    lhs_id=id((lhs, rhs)[1 - side]),
                )
        return jax.lax.dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)

    def einsum(self, subscripts: str, lhs: Any, rhs: Any, **kwargs: Any) -> Array:
        return self.dot_general(lhs, rhs, self.operation.site.params["dimension_numbers"], **kwargs)

    def conv_general_dilated(self, lhs: Any, rhs: Any, window_strides: Any, padding: Any, **geometry: Any) -> Array:
        return jax.lax.conv_general_dilated(lhs, rhs, window_strides, padding, **geometry)

    def ragged_dot(
        self, lhs: Any, rhs: Any, group_sizes: Any, *, dimension_numbers: Any = None, **kwargs: Any
    ) -> Array:
        return ragged_dot_general(lhs, rhs, group_sizes, dimension_numbers, **kwargs)

    def gmm(self, lhs: Any, rhs: Any, group_sizes: Any, **kwargs: Any) -> Array:
        return CalibrationProvider.ragged_dot(self, lhs, rhs, group_sizes, **kwargs)


class SinglePassCalibrationProvider(CalibrationProvider, metaclass=abc.ABCMeta):
    """Sums what `compute_stats` returns for each batch.

    >>> class Largest(SinglePassCalibrationProvider):
    ...     def get_rule_type(self):
    ...         return QuantizationRule
    ...     def get_stats_suffix(self):
    ...         return "_largest"
    ...     def compute_stats(self, lhs):
    ...         return {"max": jnp.max(jnp.abs(lhs), axis=1)}
    >>> import octavo, flax.linen as nn
    >>> model = octavo.quantize_model(nn.Dense(2), Largest([QuantizationRule(weight_qtype="int8")]))
    >>> variables = nn.Dense(2).init(jax.random.key(0), jnp.ones((3, 4)))
    >>> _, stats = model.apply(variables, jnp.ones((3, 4)), mutable="quant_stats")
    >>> jax.tree.map(jnp.shape, stats)
    {'quant_stats': {'kernel_largest': {'count': (), 'sum_of_max': (4,)}}}
    """

    @abc.abstractmethod
    def compute_stats(self, lhs: jax.Array) -> dict[str, Any]:
        """The statistics of a batch of inputs, [contracted, rest]."""

    def _collect_stats(self, lhs: jax.Array, weight_name: str, **operation: Any) -> None:
        site, frame = self.operation
        now = self.compute_stats(lhs)
        place = Key(QUANT_STATS, (site.leaf or "").rpartition("/")[0], weight_name + self.get_stats_suffix())
        old = frame.read(place, lambda: _zeros(now))
        if frame.context.updates(site.path):
            frame.write(place, {k: x + (1 if k == "count" else now[k.removeprefix("sum_of_")]) for k, x in old.items()})


def _zeros(stats: Mapping[str, Array]) -> dict[str, Array]:
    count = {"count": jnp.zeros((), jnp.int32)}
    return count | {f"sum_of_{name}": jnp.zeros(x.shape, jnp.float32) for name, x in stats.items()}


def _rows(x: Array, contracted: int) -> Array:
    return jnp.moveaxis(x, contracted, 0).reshape(x.shape[contracted], -1)


def normalize_weight(x: jax.Array, contraction_axis: int) -> tuple[jax.Array, Callable[..., Any]]:
    """A weight as a matrix [rest, contracted], and the function that restores the shape of an array or a QArray.

    >>> matrix, restore = normalize_weight(jnp.ones((2, 3, 4)), 1)
    >>> matrix.shape, restore(matrix).shape
    ((8, 3), (2, 3, 4))
    """
    moved = jnp.moveaxis(x, contraction_axis, -1)
    order = list(range(x.ndim - 1))
    order.insert(contraction_axis % x.ndim, x.ndim - 1)

    def restore_shape(x: Any) -> Any:
        return x.reshape(moved.shape).transpose(order)

    return moved.reshape(-1, moved.shape[-1]), restore_shape


@dataclasses.dataclass(frozen=True)
class CalibratedQuantContext:
    """A weight as a matrix, and what is known about it.

    Attributes:
        weight: The weight, [rest, contracted].
        how: The quantizer of the matrix.
        calibration_stats: The means of its statistics over batches.
        abs_w: The abstract parameter of the quantized model.
        contracting_axis: The contracted axis of the parameter.
        restore_shape: Gives an array or a QArray the shape of the parameter.
        path: The path of the parameter.
    """

    weight: jax.Array
    how: Quantizer
    calibration_stats: dict[str, jax.Array]
    abs_w: WithAux
    contracting_axis: int
    restore_shape: Callable[..., Any]
    path: tuple[str, ...]


def extract_calibrated_quant_context(
    path: tuple[str, ...], weight: jax.Array, abs_w: WithAux, stats: Any
) -> CalibratedQuantContext | None:
    """The context of a weight; None unless exactly one of its axes is contracted."""
    channels = {axis % weight.ndim for axis in abs_w.how.channelwise_axes}
    contracted = [axis for axis in range(weight.ndim) if axis not in channels]
    if len(contracted) != 1:
        return None
    tiles = [(1, size) for axis, size in abs_w.how.tiled_axes if axis % weight.ndim == contracted[0]]
    matrix, restore = normalize_weight(jnp.asarray(weight), contracted[0])
    means = {k.removeprefix("sum_of_"): x / stats["count"] for k, x in stats.items() if k.startswith("sum_of_")}
    size = matrix.shape[1]
    if wrong := [name for name, x in means.items() if set(x.shape) != {size}]:
        raise ValueError(
            f"the statistics {wrong[0]!r} of {'/'.join(path)} have the shape {means[wrong[0]].shape}, but the weight "
            f"{size} inputs: octavo.ptq.quantize takes stacks of layers and other models"
        )
    how = abs_w.how.replace(channelwise_axes=(0,), tiled_axes=dict(tiles))
    return CalibratedQuantContext(matrix, how, means, abs_w, contracted[0], restore, path)


def quantize_params_with_calibration(
    params: Any,
    abstract_quantized_params: Any,
    quant_stats: Any,
    stats_suffix: str,
    quantize_fn: Callable[[CalibratedQuantContext], Any],
    *,
    allow_extra_params: bool = False,
) -> Any:
    """Quantize parameters by `quantize_fn` where there are statistics, and others as `quantize_params` does.

    Args:
        params: As for `quantize_params`.
        abstract_quantized_params: As for `quantize_params`.
        quant_stats: The statistics of a `CalibrationProvider`.
        stats_suffix: Its suffix.
        quantize_fn: Returns the parameter of a context.
        allow_extra_params: As for `quantize_params`.

    Returns:
        As `quantize_params` does.
    """
    wanted = {tuple(map(str, path)): x for path, x in leaves_by_path(abstract_quantized_params).items()}
    stats: dict[tuple[str, ...], dict[str, Any]] = {}
    for (*path, name), x in leaves_by_path(quant_stats, only_params=False).items():
        stats.setdefault(tuple(map(str, path)), {})[name] = x
    result = {}
    for path, leaf in leaves_by_path(params).items():
        *parents, name = map(str, path)
        place, known = wanted.get((*parents, name)), stats.get((*parents, name + stats_suffix))
        context = None
        if isinstance(place, WithAux) and isinstance(place.array, QArray) and known is not None:
            context = extract_calibrated_quant_context((*parents, name), leaf, place, known)
        result[path] = leaf if context is None else quantize_fn(context)
    return quantize_params(unflatten_paths(result), abstract_quantized_params, allow_extra_params=allow_extra_params)
