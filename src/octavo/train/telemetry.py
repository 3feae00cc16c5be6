"""Telemetry of quantized matmuls: how well formats fit, static bounds that would, and the worst weights."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from octavo._sharding import names
from octavo._tree import flatten_paths
from octavo.inspect.telemetry import by_class, summarize, telemetry
from octavo.models.functional import unstacked_paths
from octavo.numerics import get_format
from octavo.qarray import QArray, is_qarray
from octavo.qarray.histogram import WORST, histogram, sqnr_db
from octavo.train.program import Program
from octavo.train.step import Batch, TrainState, apply_masks, total_weights
from octavo.train.trainer import Trainer

SHARE = 4
"""One in `SHARE` rows of a microbatch is measured: enough for shares and ratios, in a quarter of the time."""
METHODS = {
    "weight": "weight_quantization_calibration_method",
    "activation": "act_quantization_calibration_method",
    "gradient": "bwd_quantization_calibration_method",
}
MARGIN = 1.25
"""The least ratio of a proposed bound to the largest magnitude, before it is rounded up to a power of two."""
CLIPS, VANISHES = 1e-3, 0.1
"""Thresholds of the warnings: shares of values that are clipped, or flushed to zero."""
DROWNS = math.sqrt(3)
"""Where the norm of a gradient is fewer times that of its quantization error, training stops improving: Chmiel et al.,
FP4 All the Way, arXiv:2505.19115."""


class Telemetry:
    """Measurements of a trainer's quantization; the first one compiles the program that makes them."""

    def __init__(self, trainer: Trainer, scales: Mapping[str, float] | None = None):
        self.trainer, self.interval = trainer, trainer.config.quantization_metrics_interval
        self.scales = dict(scales or {})
        """The mean scale of each class of tensors at the last measurement; part of a checkpoint."""
        self._compiled: dict[int, Any] = {}

    def is_due(self, step: int) -> bool:
        """Whether a step is followed by a measurement: one in `quantization_metrics_interval`, and the last one."""
        is_last = step + 1 == self.trainer.config.steps
        due = self.interval > 0 and ((step + 1) % self.interval == 0 or is_last)
        return due and bool(self.trainer.schedule.at(step)[0])

    def measure(self, step: int) -> dict[str, Any]:
        """Saturation, underflow, signal-to-noise, scale and its drift: by class of tensor, and by matmul.

        `scale_drift` is the factor by which the mean scale has changed since the last measurement, in powers of 2.
        """
        stage = self.trainer.schedule.stage(step)
        if stage not in self._compiled:
            self._compiled[stage] = self._jitted(step, self.trainer)
        stats = self._compiled[stage](self.trainer.state, self.trainer.batch(step))
        classes = by_class(stats)
        for kind, row in classes.items():
            before, row["scale_drift"] = self.scales.get(kind), 0.0
            if before and row["scale"] > 0:
                row["scale_drift"] = math.log2(row["scale"] / before)
            self.scales[kind] = float(row["scale"])
        sites = {
            site: {name: {key: np.asarray(value).tolist() for key, value in row.items()} for name, row in rows.items()}
            for site, rows in summarize(stats).items()
        }
        return {**classes, "sites": sites}

    def statistics(self, step: int, program: Program) -> Any:
        """The statistics of another program's recipe on the trainer's parameters and a step's batch."""
        state, batch = self.trainer.state, self.trainer.batch(step)
        quant = program.train_step.loss.init(state.params, batch, 1.0, 1.0)
        return self._jitted(step, program)(dataclasses.replace(state, quant=quant), batch)

    def _jitted(self, step: int, program: Program) -> Any:
        low = telemetry(program.train_step.loss.at(step)[0])
        axes = names((*program.batch_sharding.spec, None)[0])
        # At least one row for each device that holds some.
        least = math.prod(program.mesh.shape[axis] for axis in axes)
        fraction = SHARE * self.trainer.config.gradient_accumulation_steps
        rows = max(1, -(-(program.batch_size // fraction) // least)) * least
        fn = functools.partial(_probe, low, rows)
        return jax.jit(fn) if program.is_single_device else jax.jit(fn, out_shardings=program.replicated)


def _probe(low: Any, rows: int, state: TrainState, batch: Batch) -> Any:
    batch = {name: x[:rows] for name, x in batch.items()}
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    call = low.stateful(state.quant, key=key)
    return call(apply_masks(state.params, state.masks), batch, total_weights(batch), 1.0)


# Static bounds.


def fixed_method(largest: float) -> str:
    """The calibration method of a static range that holds a magnitude.

    The range is a power of two, so that scales of float formats are exact.

    >>> fixed_method(0.9), fixed_method(100.0)
    ('fixed,-2,2', 'fixed,-128,128')
    """
    limit = 2.0 ** math.ceil(math.log2(largest * MARGIN)) if largest > 0 else 1.0
    return f"fixed,-{limit:g},{limit:g}"


def largest_magnitudes(trainer: Trainer) -> dict[str, float]:
    """The largest magnitude of weights, activations and gradients in the next batch; the trainer is not changed.

    They are measured with dynamic ranges, so that bounds of the configuration do not clip them.
    """
    config = trainer.config
    dynamic = dict.fromkeys(METHODS.values(), "absmax") | {"quantization_calibration_method": ""}
    program = Program(config.replace(**dynamic), trainer.mesh, vocab_size=trainer.model.vocab_size)
    stats = Telemetry(trainer).statistics(program.quantized_step, program)
    found: dict[str, float] = {}
    for operands in stats.values():
        for s in operands.values():
            largest = float(np.max(np.asarray(s.largest_scale), initial=0.0)) * get_format(s.qtype).bound
            found[s.kind] = max(found.get(s.kind, 0.0), largest)
    return found


def format_bounds(largest: Mapping[str, float]) -> str:
    """Static bounds for magnitudes as a log line, with the keys to set."""
    reached = "; ".join(f"{kind}s reach {value:.3g}" for kind, value in largest.items())
    keys = " ".join(f"{METHODS[kind]}={fixed_method(value)}" for kind, value in largest.items() if kind != "gradient")
    return f"calibration=auto: {reached}. Static bounds: {keys} (gradients change most: leave them dynamic)"


def range_warnings(measured: Mapping[str, Any], *, learned: bool = False) -> Iterator[str]:
    """Warnings about ranges that clip, or that flush values to zero, by class of tensor.

    The ranges of weights may be `learned`: then no key widens them.
    """
    for kind, row in measured.items():
        if kind not in METHODS or (learned and kind == "weight"):
            continue
        if row["saturation"] > CLIPS:
            yield (
                f"warning: {100 * row['saturation']:.2g} % of {kind} values are clipped, worst at {row['worst_site']}: "
                f"widen {METHODS[kind]}"
            )
        if row["underflow"] > VANISHES:
            yield (
                f"warning: {100 * row['underflow']:.2g} % of {kind} values underflow to zero, worst at "
                f"{row['worst_underflow_site']}: narrow {METHODS[kind]}, or use smaller tiles"
            )
        if kind == "gradient" and row["to_noise"] < DROWNS:
            yield (
                f"warning: gradients are {row['to_noise']:.2g} times their quantization error, less than the square "
                f"root of 3, worst at {row['worst_site']}: use more bits, or finish in float by quantization_stop_step"
            )


# Weights.


def worst_weights(trainer: Trainer) -> list[dict[str, Any]]:
    """Histograms of the quantized weights with the lowest signal to noise, the worst first.

    The layers of a stack are separate weights. Weights that are represented exactly are left out.
    """
    floats = flatten_paths(apply_masks(trainer.state.params, trainer.state.masks))
    found: list[tuple[float, str, np.ndarray, QArray]] = []
    for path, q in flatten_paths(trainer.quantized_params(), is_leaf=is_qarray).items():
        if not isinstance(q, QArray):
            continue
        stack = np.asarray(floats[path], np.float32)
        for name, i in unstacked_paths(path, len(stack)):
            x, codes = (stack, q) if i is None else (stack[i], q[i])
            db = sqnr_db(x, np.asarray(codes.dequantize("float32")))
            if db is not None:
                found = sorted([*found, (db, name, x, codes)], key=lambda entry: entry[:2])[:WORST]
    return [histogram(name, x, codes, sqnr_db=db) for db, name, x, codes in found]
