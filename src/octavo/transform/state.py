"""State of operations (static ranges, delayed scaling, telemetry) and its form as a plain pytree."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo import ops
from octavo._tree import unflatten_paths
from octavo._typing import Array
from octavo.calibration import Bounds, RunningMean
from octavo.ops.telemetry import init_telemetry, telemetry_name
from octavo.qarray import QArray, Quantizer
from octavo.rules import QuantizationRule
from octavo.transform.frame import Frame, Key
from octavo.transform.site import Site, matmul_product

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


def flatten_state(tree: Mapping[str, Any], known: Iterable[Key]) -> dict[Key, Any]:
    """The inverse of `nest_state` for these keys; raises if one is missing."""
    state = {key: find_state(tree, key) for key in known}
    if missing := [key for key, value in state.items() if value is None]:
        raise ValueError(
            f"the state has no {'/'.join(missing[0].parts)}: it was made for other rules or another function; "
            "initialize it again"
        )
    return state


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
    rule, config = site.rule, site.config
    if rule is None or config is None or not rule.act_static_scale or site.gradient is not None:
        return {}
    ranges = {}
    for side, (name, operand) in enumerate((("lhs", config.fwd.lhs), ("rhs", config.fwd.rhs))):
        if operand is not None and not site.weights[side] and not isinstance(x := operands[side], QArray):
            ranges[name] = _static_range(frame, site, name, operand.quantizer(x.ndim, **axes[side]), x, rule)
    return ranges


def _static_range(
    frame: Frame, site: Site, name: str, quantizer: Quantizer, x: Array, rule: QuantizationRule
) -> Bounds:
    axes = tuple(range(x.ndim)) if rule.act_batch_axes is None else tuple(a % x.ndim for a in rule.act_batch_axes)
    measured = quantizer.measure(jax.lax.stop_gradient(x))
    measured = {k: jnp.mean(v.astype(jnp.float32), axis=axes, keepdims=True) for k, v in measured.items()}
    if frame.manual_axes:
        # Axes along which the value is the same on all devices cannot be reduced together with the others.
        varying = _varying_axes(x)
        over = tuple(name for name in frame.manual_axes if name in varying) or frame.manual_axes
        measured = {k: jax.lax.pmean(v, over) for k, v in measured.items()}
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


def gradient_state(site: Site, frame: Frame, lhs: Array, rhs: Array, params: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a matmul whose gradient is its new value: delayed scaling, error feedback and telemetry."""
    config, reduction = site.config, site.placement.reduction
    assert config is not None
    state: dict[str, Any] = {}
    if config.tracked or (reduction is not None and reduction.feedback):
        init = lambda: ops.init_scaling(  # noqa: E731
            config, lhs, rhs, matmul_product(params, lhs.shape, rhs.shape), placement=site.placement
        )
        state |= frame.read(Key(GRADIENT_STATE, site.path, site.op_id), init)
    if frame.context.provider.telemetry:
        # Zeros, whose gradient is the telemetry.
        zeros = frame.read(Key(TELEMETRY, site.path, site.op_id), lambda: init_telemetry(config))
        axes = tuple(sorted(_varying_axes(lhs) | _varying_axes(rhs)))
        state |= {telemetry_name(name): _per_device(axes, x) if axes else x for name, x in zeros.items()}
    return state


def _varying_axes(x: Array) -> frozenset[str]:
    """The manual mesh axes along which an array differs, as far as shard_map tracks them."""
    return getattr(getattr(jax.typeof(x), "mat", None), "varying", frozenset())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _per_device(axes: tuple[str, ...], zeros: dict[str, Array]) -> dict[str, Array]:
    """Zeros on each device of a shard_map, whose gradients are reduced over all of them."""
    return {name: jax.lax.pcast(x, axes, to="varying") for name, x in zeros.items()}


def _reduce_telemetry(axes: tuple[str, ...], _: None, sums: dict[str, Array]) -> tuple[dict[str, Array]]:
    reduce = {"largest_scale": jax.lax.pmax}
    return ({name: reduce.get(name, jax.lax.psum)(x, axes) for name, x in sums.items()},)


_per_device.defvjp(lambda axes, zeros: (_per_device(axes, zeros), None), _reduce_telemetry)
