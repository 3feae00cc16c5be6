"""State of operations (static ranges, delayed scaling, telemetry) and its form as a plain pytree."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo import _sharding, ops
from octavo._tree import unflatten_paths
from octavo._typing import Array
from octavo.calibration import Bounds, Ema, RunningMean, widest
from octavo.ops import DotConfig, Operand
from octavo.ops.telemetry import init_telemetry, telemetry_name
from octavo.qarray import QArray, Quantizer
from octavo.transform.frame import Frame, Key
from octavo.transform.learned import learned_bounds, learned_key
from octavo.transform.site import Site, matmul_product, operand_axes

QUANT_STATS = "quant_stats"
GRADIENT_STATE = "_overwrite_with_gradient"
TELEMETRY = "telemetry"
"""Collections of state: static ranges, delayed scaling (whose gradient is its new value), telemetry."""


def nest_state(state: Mapping[Key, Any]) -> dict[str, Any]:
    """State by keys as nested dictionaries."""
    return unflatten_paths({key.parts: value for key, value in state.items()})


def find_state(tree: Any, key: Key) -> Any:
    """The state of a key in nested dictionaries; None if there is none."""
    for part in key.parts:
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def flatten_state(tree: Mapping[str, Any], known: Iterable[Key], default: Mapping[Key, Any] | None = None) -> Any:
    """The inverse of `nest_state` for these keys; raises if one is missing and has no default."""
    state = {key: find_state(tree, key) for key in known}
    state = {key: (default or {}).get(key) if value is None else value for key, value in state.items()}
    if missing := [key for key, value in state.items() if value is None]:
        raise ValueError(
            f"the state has no {'/'.join(missing[0].parts)}: it was made for other rules or another function; "
            "initialize it again"
        )
    return state


def empty_histories(known: Mapping[Key, Any]) -> dict[Key, Any]:
    """Delayed scaling that remembers nothing, of these shapes: each tensor is quantized by its own range."""
    kept = {key: value for key, value in known.items() if key.collection == GRADIENT_STATE}
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept)


def check_calibrated(state: Mapping[Key, Any]) -> None:
    """Raise for concrete statistics that were never updated."""
    for key, value in state.items():
        count = value.get("count") if isinstance(value, Mapping) else None
        if count is None or isinstance(count, jax.core.Tracer):
            continue
        if np.any(np.asarray(count) == 0):
            raise ValueError(
                f"{key.name} at {key.path!r} has a static scale that was never calibrated: run on calibration data "
                "with statistics being updated first"
            )


def merge_state(old: Any, new: Any) -> Any:
    """Nested dictionaries merged, `new` over `old`."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{name: merge_state(old[name], new[name]) if name in old else new[name] for name in new}}


def unused_state(old: Any, new: Any) -> Any:
    """The entries of nested dictionaries that are not in `new`."""
    if not isinstance(new, Mapping):
        return {}
    kept = {name: unused_state(value, new[name]) if name in new else value for name, value in old.items()}
    return {name: value for name, value in kept.items() if name not in new or value}


def keep_as_gradient(out: Any, state: Any) -> Any:
    """`out`, with unused state as its own gradient, so that an update by the gradient keeps it."""
    return _keeping(out, state) if jax.tree.leaves(state) else out


@jax.custom_vjp
def _keeping(out: Any, state: Any) -> Any:
    return out


_keeping.defvjp(lambda out, state: (out, state), lambda state, g: (g, state))


def state_structure(state: Any) -> Any:
    """The structure, shapes and dtypes of state."""
    return jax.tree.structure(state), [(x.shape, x.dtype) for x in jax.tree.leaves(state)]


def static_ranges(
    site: Site, frame: Frame, operands: Sequence[Any], axes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The static range of each activation operand, updated by its present value."""
    ranges = {}
    for side, name, operand in _static_operands(site):
        if not isinstance(x := operands[side], QArray):
            ranges[name] = _static_range(frame, site, name, operand.quantizer(x.ndim, **axes[side]), x)
    return ranges


def _static_operands(site: Site) -> list[tuple[int, str, Operand]]:
    """The side, the name and the operand of each activation with a static range."""
    if site.rule is None or site.config is None or not site.rule.act_static_scale or site.gradient is not None:
        return []
    sides = enumerate((("lhs", site.config.fwd.lhs), ("rhs", site.config.fwd.rhs)))
    return [(side, name, o) for side, (name, o) in sides if o is not None and not site.weights[side]]


def static_quantizers(sites: Iterable[Site]) -> dict[Key, tuple[Quantizer, str]]:
    """The quantizer of each activation with a static range and the dtype of the activation, by the key of its state."""
    found = {}
    for site in sites:
        for side, name, operand in _static_operands(site):
            axes = operand_axes(site.params, site.lhs[0], site.rhs[0])[side]
            shape, dtype = (site.lhs, site.rhs)[side]
            key = Key(QUANT_STATS, site.path, f"{site.op_id}_{name}")
            found[key] = operand.quantizer(len(shape), **axes), dtype
    return found


def static_scale(quantizer: Quantizer, stats: Mapping[str, Array], dtype: Any) -> Bounds:
    """The scale of a static range, and its zero point if there is one, from its statistics.

    Statistics of scanned layers are stacked.
    """
    sums = {k.removeprefix("sum_of_"): v for k, v in stats.items() if k != "count"}
    count = jnp.asarray(stats["count"], jnp.float32)
    mean = {k: v / count.reshape(count.shape + (1,) * (v.ndim - count.ndim)) for k, v in sums.items()}
    return quantizer.scale_of(mean, dtype)


def _static_range(frame: Frame, site: Site, name: str, quantizer: Quantizer, x: Array) -> Bounds:
    rule: Any = site.rule
    measured = {k: v.astype(jnp.float32) for k, v in quantizer.measure(jax.lax.stop_gradient(x)).items()}
    # Axes along which the value is the same on all devices cannot be reduced together with the others.
    varying = _sharding.manual_axes(x, "varying")
    over = tuple(name for name in frame.manual_axes if name in varying) or frame.manual_axes
    if rule.act_batch_axes is None:
        measured = widest(measured, over)
    else:  # as in Qwix, rows along these axes are samples of one range
        axes = tuple(a % x.ndim for a in rule.act_batch_axes)
        measured = {k: jnp.mean(v, axis=axes, keepdims=True) for k, v in measured.items()}
        measured = {k: jax.lax.pmean(v, over) for k, v in measured.items()} if over else measured
    tracker = RunningMean()
    key = Key(QUANT_STATS, site.path, f"{site.op_id}_{name}")
    state = frame.read(key, lambda: tracker.init(measured))
    stored = next(v for k, v in state.items() if k != "count")
    now = next(iter(measured.values()))
    if stored.shape != now.shape:
        raise ValueError(
            f"the statistics of {key.name} at {key.path!r} have the shape {stored.shape}, but this input gives "
            f"{now.shape}: act_batch_axes={rule.act_batch_axes} keeps axes whose length changed. Leave act_batch_axes "
            "out for one scale per tensor"
        )
    if frame.context.init:
        return measured
    if "scale" in state:  # fixed, as a converted model holds it
        return state
    if not frame.context.updates(site.path):
        try:
            return tracker.read(state)
        except ValueError as error:
            raise ValueError(
                f"{key.name} at {key.path!r} has a static scale that was never calibrated: run the model on "
                "calibration data with statistics being updated first"
            ) from error
    state = tracker.update(state, measured)
    frame.write(key, state)
    return tracker.read(state, measured)


def remembered_range(site: Site, state: Mapping[str, Any], ndim: int) -> Bounds | None:
    """The range by which training quantized the weight of a site, for its parameter of this rank.

    It is that of delayed scaling or a static range; None if the weight is measured in each step. NaN where nothing was
    measured yet.
    """
    side = int(site.weights[1])
    name, operand = ("lhs", "rhs")[side], (site.config.fwd.lhs, site.config.fwd.rhs)[side] if site.config else None
    if operand is None or site.leaf is None:
        return None
    if operand.calibration.learned:
        return _learned_range(site, state, operand, ndim)
    by_rule, by_op = ((GRADIENT_STATE, site.path, site.op_id), (GRADIENT_STATE, site.scope, "scaling"))
    found = [(operand.tracker, (find_state(state, Key(*key)) or {}).get(name)) for key in (by_rule, by_op)]
    stats = find_state(state, Key(QUANT_STATS, site.scope, name))
    found.append((Ema() if "weight" in (stats or {}) else RunningMean(), stats))
    tracker, values = next(((t, v) for t, v in found if t is not None and v is not None), (None, None))
    if tracker is None or values is None:
        return None
    rank = len((site.lhs, site.rhs)[side][0])
    names = ("min", "max") if any(k.endswith("_min") for k in values) else ("absmax",)
    like = tracker.init({k: jnp.zeros((1,) * rank) for k in names})
    stacked = max(jnp.ndim(values[k]) - jnp.ndim(v) for k, v in like.items())  # by scans over layers
    read, ready = tracker._read, tracker.calibrated
    for _ in range(stacked):
        read, ready = jax.vmap(read), jax.vmap(ready)
    bounds, known = read(values), ready(values)
    known = jnp.reshape(known, known.shape + (1,) * (stacked + rank - known.ndim))
    bounds = {k: jnp.where(known, v, jnp.nan) for k, v in bounds.items()}
    shape = next(iter(bounds.values())).shape
    axes = site.origins[side].axes or ()
    if all(n == 1 for n in shape[stacked:]):
        return {k: v.reshape(v.shape[:stacked] + (1,) * (ndim - stacked)) for k, v in bounds.items()}
    if [[f.axis for f in axis] for axis in axes] == [[axis] for axis in range(stacked, ndim)]:
        return bounds
    raise ValueError(
        f"the weight {site.leaf!r} is rearranged before {site.op_id} at {site.path!r}, which remembers its range per "
        "channel, so that the range does not fit the stored weight: use per_tensor=True, or convert without the state"
    )


def _learned_range(site: Site, state: Mapping[str, Any], operand: Operand, ndim: int) -> Bounds:
    """The range of the learned scale of a site's weight; raises if the state has none."""
    key, side = learned_key(site), int(site.weights[1])
    if (scale := find_state(state, key)) is None:
        raise ValueError(
            f"the scale of {site.leaf!r} is learned (lsq), but there is no trained one: pass state=, the state of "
            "training, or give another calibration, such as mse"
        )
    axes = operand_axes(site.params, site.lhs[0], site.rhs[0])[side]
    return learned_bounds(operand.quantizer(ndim, **axes), jnp.asarray(scale))


def delayed_ranges(
    site: Site, frame: Frame, operands: Sequence[Any], axes: Sequence[Mapping[str, Any]]
) -> dict[str, Bounds]:
    """The range that delayed scaling remembers of each float operand next to codes; its own if there is none."""
    if site.config is None or not site.config.tracked:
        return {}
    lhs, rhs = operands
    state, ranges = _tracked_state(site, site.config, frame, lhs, rhs, site.params), {}
    for x, own, name in zip(operands, axes, ("lhs", "rhs"), strict=True):
        operand = site.config.tracked.get(name)
        if operand is not None and operand.tracker is not None and not isinstance(x, QArray):
            ranges[name] = operand.tracker.read(state[name], operand.quantizer(x.ndim, **own).measure(x))
    return ranges


def _tracked_state(
    site: Site, config: DotConfig, frame: Frame, lhs: Any, rhs: Any, params: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of delayed scaling and error feedback."""
    product = matmul_product(params, lhs.shape, rhs.shape)
    init = lambda: ops.init_scaling(config, lhs, rhs, product, placement=site.placement)  # noqa: E731
    return frame.read(Key(GRADIENT_STATE, site.path, site.op_id), init)


def gradient_state(site: Site, frame: Frame, lhs: Array, rhs: Array, params: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a matmul whose gradient is its new value: delayed scaling, error feedback and telemetry."""
    config, reduction = site.config, site.placement.reduction
    assert config is not None
    state: dict[str, Any] = {}
    if config.tracked or (reduction is not None and reduction.feedback):
        state |= _tracked_state(site, config, frame, lhs, rhs, params)
    if frame.context.provider.telemetry:
        # Zeros, whose gradient is the telemetry.
        zeros = frame.read(Key(TELEMETRY, site.path, site.op_id), lambda: init_telemetry(config))
        axes = tuple(sorted(_sharding.manual_axes(lhs, "varying") | _sharding.manual_axes(rhs, "varying")))
        state |= {telemetry_name(name): _per_device(axes, x) if axes else x for name, x in zeros.items()}
    return state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _per_device(axes: tuple[str, ...], zeros: dict[str, Array]) -> dict[str, Array]:
    """Zeros on each device of a shard_map, whose gradients are reduced over all of them."""
    return {name: jax.lax.pcast(x, axes, to="varying") for name, x in zeros.items()}


def _reduce_telemetry(axes: tuple[str, ...], _: None, sums: dict[str, Array]) -> tuple[dict[str, Array]]:
    reduce = {"largest_scale": jax.lax.pmax}
    return ({name: reduce.get(name, jax.lax.psum)(x, axes) for name, x in sums.items()},)


_per_device.defvjp(lambda axes, zeros: (_per_device(axes, zeros), None), _reduce_telemetry)
