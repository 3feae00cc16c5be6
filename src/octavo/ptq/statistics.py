"""Statistics of the inputs of weight matmuls, collected in one pass over calibration data.

For the inputs x of a matmul x W, over n tokens:

    H = 1/n sum x x^T        mean_abs = 1/n sum |x|        max_abs = max |x|

The error of a quantized weight on this data is E |x (Q - W)|^2 = tr((Q - W)^T H (Q - W)).
"""

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo import ops
from octavo._typing import Array, Float
from octavo.frameworks.serving import param_names
from octavo.ptq.layout import MatrixView, matrix_view
from octavo.ptq.progress import Progress
from octavo.rules import QuantizationRule
from octavo.transform import QuantizationProvider, Quantized, Site
from octavo.transform.site import operand_axes

_COLLECTION, _NAME, _INPUTS = "ptq", "inputs", "rows"
_SHARDED = {"sharding", "group_offset"}
_FEW_TOKENS = 128
"""An expert with fewer tokens has the pooled statistics of its layer."""


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of the inputs of a weight, for each matrix of its stack.

    Attributes:
        hessian: The mean of x x^T, [matrices, inputs, inputs]; [matrices, 0, 0] if it was not collected.
        mean_square: Its diagonal, [matrices, inputs].
        mean_abs: The mean magnitude of each input, [matrices, inputs].
        max_abs: The largest magnitude of each input, [matrices, inputs].
        tokens: The number of tokens, [matrices].
        view: How the stored parameter makes up these matrices.
        drift: The mean of (x_f - x) x^T for the inputs x_f of other parameters, [matrices, inputs, inputs]; or None.
    """

    hessian: Float[Array, "s k2 k2"]
    mean_square: Float[Array, "s k"]
    mean_abs: Float[Array, "s k"]
    max_abs: Float[Array, "s k"]
    tokens: Float[Array, "s"]
    view: MatrixView
    drift: Float[Array, "s k k"] | None = None

    def loss(self, error: Float[Array, "s k n"]) -> Float[Array, ""]:
        """The mean squared change of the outputs by an error of the weights, summed over outputs and matrices."""
        return jnp.sum((self.hessian @ error) * error)


class Recorder(QuantizationProvider):
    """Runs every matmul in float and sums the statistics of the inputs of weights."""

    def __init__(self, only: Collection[str] | None, *, hessian: bool = True, inputs: str = ""):
        super().__init__(QuantizationRule(weight_qtype="int8", scope="weights"))
        self.only, self.hessian = only, hessian
        self.inputs = inputs
        """Whether inputs are stored ("store"), or compared with those that were ("compare")."""

    def dot_general(self, lhs, rhs, *args, **options):
        self._record(lhs, rhs)
        return jax.lax.dot_general(lhs, rhs, *args, **options)

    def einsum(self, subscripts, lhs, rhs, **options):
        return self.dot_general(lhs, rhs, self.operation.site.params["dimension_numbers"], **options)

    def conv_general_dilated(self, lhs, rhs, window_strides, padding, **options):
        return jax.lax.conv_general_dilated(lhs, rhs, window_strides, padding, **options)

    def ragged_dot(self, lhs, rhs, group_sizes, *, dimension_numbers=None, **options):
        # Rows of x by expert, as `jax.lax.ragged_dot` has them; buffers of sharded experts are not observed.
        if lhs.ndim == 2 and rhs.ndim == 3 and self.operation.site.weights[1] and not options.keys() & _SHARDED:
            self._add(lambda: _expert_moments(lhs, group_sizes, hessian=self.hessian))
        return ops.ragged_dot_general(lhs, rhs, group_sizes, dimension_numbers, **options)

    def gmm(self, lhs, rhs, group_sizes, **options):
        return self.ragged_dot(lhs, rhs, group_sizes, **options)

    def records(self, site: Site) -> bool:
        """Whether the inputs of a matmul are recorded."""
        return site.leaf is not None and (self.only is None or site.leaf in self.only)

    def _record(self, lhs: Array, rhs: Array) -> None:
        site = self.operation.site
        right = site.weights[1]
        axes = operand_axes(site.params, lhs.shape, rhs.shape)[not right]
        x = lhs if right else rhs
        if not self.inputs:
            self._add(lambda: _moments(x, **axes, hessian=self.hessian))
        elif self.records(site):
            rows = _rows(x, **axes)
            kept = self.get_state(_INPUTS, lambda: jnp.zeros_like(rows), collection=_COLLECTION)
            if self.inputs == "store":
                self.set_state(_INPUTS, rows, collection=_COLLECTION)
            else:
                self._add(lambda: _moments(x, **axes, hessian=True) | {"drift": _outer(kept - rows, rows)})

    def _add(self, moments: Callable[[], dict[str, Array]]) -> None:
        site, frame = self.operation.site, self.operation.frame
        if not self.records(site):
            return
        if frame.manual_axes:
            raise ValueError(
                f"{site.op_id} at {site.path!r} is inside shard_map over {frame.manual_axes}, where each device has "
                "other inputs: calibrate the function without shard_map"
            )
        now = moments()
        old = self.get_state(_NAME, lambda: jax.tree.map(jnp.zeros_like, now), collection=_COLLECTION)
        new = {name: (jnp.maximum if name == "max" else jnp.add)(old[name], now[name]) for name in now}
        self.set_state(_NAME, new, collection=_COLLECTION)


def _moments(x: Array, *, contracting: Sequence[int], batch: Sequence[int], hessian: bool) -> dict[str, Array]:
    """Sums over the tokens of an operand, for each index of its batch axes."""
    x = _rows(x, contracting=contracting, batch=batch)
    kept = x if hessian else x[..., :0]
    return {
        "hessian": _outer(kept, kept),
        "square": jnp.sum(x * x, axis=1),
        "sum": jnp.sum(jnp.abs(x), axis=1),
        "max": jnp.max(jnp.abs(x), axis=1),
        "tokens": jnp.full(x.shape[0], x.shape[1], jnp.float32),
    }


def _rows(x: Array, *, contracting: Sequence[int], batch: Sequence[int]) -> Array:
    """An operand as [batch, tokens, inputs]."""
    rows = [a for a in range(x.ndim) if a not in (*contracting, *batch)]
    size = [int(np.prod([x.shape[a] for a in axes])) for axes in (batch, rows, contracting)]
    return x.transpose(*batch, *rows, *contracting).reshape(size).astype(jnp.float32)


def _outer(x: Array, y: Array) -> Array:
    return jnp.einsum("bti,btj->bij", x, y, precision=jax.lax.Precision.HIGHEST)


def _expert_moments(x: Array, group_sizes: Array, *, hessian: bool) -> dict[str, Array]:
    """Sums over the rows of each expert; rows beyond the last expert are not counted."""
    x, experts = x.astype(jnp.float32), group_sizes.shape[0]
    numbers = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    expert = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(len(x)), side="right")
    largest = jax.ops.segment_max(jnp.abs(x), expert, num_segments=experts)
    if hessian:
        total = jax.lax.ragged_dot_general(x, x, group_sizes, numbers, precision=jax.lax.Precision.HIGHEST)
    else:
        total = jnp.zeros((experts, 0, 0))
    return {
        "hessian": total,
        "square": jax.ops.segment_sum(x * x, expert, num_segments=experts),
        "sum": jax.ops.segment_sum(jnp.abs(x), expert, num_segments=experts),
        "max": jnp.where(group_sizes[:, None] > 0, largest, 0),
        "tokens": group_sizes.astype(jnp.float32),
    }


def _with_pooled(name: str, sums: Mapping[str, Array]) -> dict[str, Array]:
    """Sums of experts, with those of all experts together for experts that saw few tokens."""
    tokens = sums["tokens"]
    few = tokens < _FEW_TOKENS
    if not bool(jnp.any(few)):
        return dict(sums)
    warnings.warn(
        f"{int(jnp.sum(few))} of {few.size} experts of {name} saw fewer than {_FEW_TOKENS} tokens: the inputs of all "
        "experts of their layer are used for them",
        stacklevel=5,
    )
    axis, mixed = tokens.ndim - 1, {}
    for part, x in sums.items():
        pooled = (jnp.max if part == "max" else jnp.sum)(x, axis=axis, keepdims=True)
        mixed[part] = jnp.where(few.reshape(few.shape + (1,) * (x.ndim - few.ndim)), pooled, x)
    return mixed


def collect_statistics(
    fn: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    *,
    only: Collection[str] | None = None,
    hessian: bool = True,
    against: Any = None,
    strict_paths: bool = False,
    progress: Callable[[int], None] | None = None,
    checkpoint: str | Path | None = None,
) -> tuple[dict[str, Statistics], dict[str, str]]:
    """The statistics of the inputs of each weight, in one pass over calibration data.

    The function runs in float; the statistics are accumulated on the device by one compiled program.

    Args:
        fn: A function of parameters and the inputs of a batch; its result does not matter.
        params: The parameters.
        batches: Batches of inputs: an array each, a tuple of arguments, or a dictionary of keyword arguments.
        only: The names of the weights to collect statistics for; all by default.
        hessian: Whether Hessians are collected; if not, only their diagonals are.
        against: Other parameters, those of the float model, whose inputs give the `drift`; not of experts.
        strict_paths: As for `Quantized`.
        progress: Called with the number of batches done.
        checkpoint: A file for the sums so far, written each minute, at the end and when the calibration is
            interrupted; the next call with the same data resumes from it.

    Returns:
        The statistics by the name of the weight, and the reason for each weight that has none.

    >>> def predict(params, x):
    ...     return jnp.tanh(x @ params["up"]) @ params["down"]
    >>> params = {"up": jnp.eye(4, 8), "down": jnp.eye(8, 2)}
    >>> found, missing = collect_statistics(predict, params, [jnp.ones((3, 4)), jnp.ones((2, 4))])
    >>> found["up"].hessian.shape, found["down"].tokens.tolist(), missing
    ((1, 4, 4), [5.0], {})
    """

    def recorder(inputs: str) -> Quantized:
        return Quantized(fn, Recorder(only, hessian=hessian, inputs=inputs), 0, "ignore", strict_paths=strict_paths)

    low = recorder("" if against is None else "compare")
    float_inputs = jax.jit(lambda params, args, kwargs: _stored_inputs(recorder("store"), params, args, kwargs))
    step = jax.jit(
        lambda state, params, args, kwargs: low.stateful(state)(params, *args, **kwargs)[1], donate_argnums=0
    )
    state: Any = None
    sites: list[Site] = []
    shapes = {name: leaf.shape for name, leaf in named_leaves(params).items()}
    done = Progress(checkpoint, params, against, sorted(shapes if only is None else only), str(hessian))
    count = last = 0
    try:
        for count, batch in enumerate(batches, 1):
            args, kwargs = arguments(batch)
            if state is None:
                found = low.sites(params, *args, **kwargs)
                sites = [site for site in found if site.leaf is not None and not site.opaque]
                empty = jax.eval_shape(low.init, params, *args, **kwargs)
                state = done.restore(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty))
            if not done.skips(count, (args, kwargs)):
                inputs = {} if against is None else float_inputs(against, args, kwargs)
                state = step(_merged(state, inputs), params, args, kwargs)
                if not last:
                    _check_finite(state, sites, "the first batch")
                last = count
                done.write(state, count)
            if progress is not None:
                progress(count)
    finally:
        if last:
            done.write(state, last, now=True)
    done.finish(count)
    if state is None:
        raise ValueError("there is no calibration data: batches is empty (or an iterator that was used before)")
    _check_finite(state, sites, "the calibration data")
    return _by_weight(sites, state, shapes, only)


def _stored_inputs(low: Quantized, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    empty = jax.eval_shape(low.init, params, *args, **kwargs)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)
    return low.stateful(state)(params, *args, **kwargs)[1]


def _merged(old: Any, new: Any) -> Any:
    """Nested dictionaries merged, with the leaves of the second where both have them."""
    if not isinstance(old, Mapping):
        return new
    return {**old, **{key: _merged(old[key], value) if key in old else value for key, value in new.items()}}


def named_leaves(params: Any) -> dict[str, Any]:
    """The weights of a tree of parameters by the names that rules and statistics use."""
    pairs = zip(param_names(params), jax.tree.leaves(params), strict=True)
    return {name: leaf for name, leaf in pairs if name is not None}


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a batch."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def site_state(state: Mapping[str, Any], site: Site, name: str = _NAME) -> Any:
    """The state of a matmul; None if it has none."""
    place: Any = state.get(_COLLECTION, {})
    for part in (*(site.path.split("/") if site.path else ()), f"{site.op_id}_{name}"):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place


def _check_finite(state: Mapping[str, Any], sites: Sequence[Site], where: str) -> None:
    for site in sites:
        sums = site_state(state, site)
        if sums is not None and not bool(jnp.all(jnp.isfinite(sums["sum"]))):
            raise ValueError(
                f"the inputs of {site.op_id} at {site.path!r} (the weight {site.leaf!r}) are not finite in {where}: "
                "check the data, and that the float model gives finite results on it"
            )


def _by_weight(
    sites: Sequence[Site], state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], only: Collection[str] | None
) -> tuple[dict[str, Statistics], dict[str, str]]:
    totals: dict[str, tuple[MatrixView, dict[str, Array]]] = {}
    missing: dict[str, str] = {}
    for site in sites:
        name = site.leaf
        if name is None or name not in shapes or (only is not None and name not in only):
            continue
        view, sums = matrix_view(site, shapes[name]), _taken(state, site)
        if isinstance(view, str):
            missing[name] = view
            continue
        if sums is None:
            missing[name] = "its matmul has a config of its own, or its experts are sharded"
            continue
        if "ragged_dot_dimension_numbers" in site.params:
            sums = _with_pooled(name, sums)
        aligned = _aligned(view, sums)
        if isinstance(aligned, str):
            missing[name] = aligned
        elif name not in totals:
            totals[name] = view, aligned
        elif totals[name][0] != view:
            missing[name] = "two matmuls use the weight along different axes"
        else:
            old = totals[name][1]
            totals[name] = view, {k: (jnp.maximum if k == "max" else jnp.add)(old[k], aligned[k]) for k in old}
    return {name: _statistics(*totals.pop(name)) for name in [*totals] if name not in missing}, missing


def _taken(state: Mapping[str, Any], site: Site) -> Any:
    """As `site_state`, which is removed: the sums and the means of all weights together would need twice the memory."""
    place: Any = state.get(_COLLECTION, {})
    for part in site.path.split("/") if site.path else ():
        place = place.get(part, {})
    return place.pop(f"{site.op_id}_{_NAME}", None)


def _aligned(view: MatrixView, sums: Mapping[str, Array]) -> dict[str, Array] | str:
    """Sums with one axis for the matrices of a weight; loops that share the weight are summed over."""
    loops = sums["tokens"].shape[:-1]
    kept = tuple(n for n in loops if n > 1)
    if kept == view.stack:
        return {k: v.reshape(view.shape[0], *v.shape[len(loops) + 1 :]) for k, v in sums.items()}
    if view.stack:
        return f"the loops around its matmul have {loops} iterations, but the weight is stacked for {view.stack}"
    axes = tuple(range(len(loops)))
    return {k: (jnp.max if k == "max" else jnp.sum)(v, axis=axes) for k, v in sums.items()}


def _statistics(view: MatrixView, sums: Mapping[str, Array]) -> Statistics:
    tokens = sums["tokens"]
    count = jnp.maximum(tokens, 1)
    square, total = (sums[name] / count[:, None] for name in ("square", "sum"))
    drift = sums["drift"] / count[:, None, None] if "drift" in sums else None
    return Statistics(sums["hessian"] / count[:, None, None], square, total, sums["max"], tokens, view, drift)
