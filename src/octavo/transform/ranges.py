"""Remembered ranges of activations: measured in every step, averaged, and read back as the range to quantize by."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array
from octavo.calibration import Bounds, RunningMean
from octavo.ops import DotConfig, Operand
from octavo.qarray import QArray, Quantizer
from octavo.rules import QuantizationRule
from octavo.transform.frame import Frame, Key
from octavo.transform.site import Site

QUANT_STATS = "quant_stats"


def static_ranges(
    site: Site,
    frame: Frame,
    config: DotConfig,
    operands: Sequence[Any],
    quantizer: Callable[[Operand, Any, int], Quantizer],
) -> dict[str, Any]:
    """The remembered range of each activation, for a rule with static scales, updated by what is seen now."""
    rule = site.rule
    if rule is None or not rule.act_static_scale or site.gradient is not None:
        return {}
    ranges = {}
    for side, name in enumerate(("lhs", "rhs")):
        operand = (config.fwd.lhs, config.fwd.rhs)[side]
        if operand is None or site.weights[side] or isinstance(operands[side], QArray):
            continue
        ranges[name] = _remembered(frame, site, name, quantizer(operand, operands[side], side), operands[side], rule)
    return ranges


def _remembered(frame: Frame, site: Site, name: str, how: Quantizer, x: Array, rule: QuantizationRule) -> Bounds:
    axes = tuple(range(x.ndim)) if rule.act_batch_axes is None else tuple(a % x.ndim for a in rule.act_batch_axes)
    measured = how.measure(jax.lax.stop_gradient(x))
    measured = {k: jnp.mean(v.astype(jnp.float32), axis=axes, keepdims=True) for k, v in measured.items()}
    if frame.manual_axes:
        measured = {k: jax.lax.pmean(v, frame.manual_axes) for k, v in measured.items()}
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
