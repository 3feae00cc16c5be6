"""How well the number formats fit, measured every so many steps on a part of a batch."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from octavo.inspect.telemetry import by_class, probe, summarize
from octavo.train.loss import total_weights
from octavo.train.setup import Setup
from octavo.train.sparse import masked
from octavo.train.state import TrainState
from octavo.train.step import Batch
from octavo.train.trainer import Trainer

SHARE = 4
"""A quarter of a microbatch is enough for shares and ratios, and takes a quarter of the time."""


class Telemetry:
    """Measurements of a trainer's quantization; the first one compiles the program that makes them."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.interval = trainer, trainer.config.quantization_metrics_interval
        self._scales: dict[str, float] = {}
        self._compiled: dict[int, Any] = {}

    def due(self, step: int) -> bool:
        """Whether a step is followed by a measurement: one in `quantization_metrics_interval` that is quantized."""
        return self.interval > 0 and (step + 1) % self.interval == 0 and bool(self.trainer.schedule.at(step)[0])

    def measure(self, step: int) -> dict[str, Any]:
        """Saturation, underflow, signal-to-noise, scale and its drift: by class of tensor, and by product.

        `scale_drift` is the factor by which the mean scale has changed since the measurement before, in powers of 2.
        """
        stats = self._program(step)(self.trainer.state, self.trainer.batch(step))
        classes = by_class(stats)
        for kind, row in classes.items():
            before, row["scale_drift"] = self._scales.get(kind), 0.0
            if before and row["scale"] > 0:
                row["scale_drift"] = math.log2(row["scale"] / before)
            self._scales[kind] = row["scale"]
        sites = {
            site: {name: {key: np.asarray(value).tolist() for key, value in row.items()} for name, row in rows.items()}
            for site, rows in summarize(stats).items()
        }
        return {**classes, "sites": sites}

    def statistics(self, step: int, setup: Setup) -> Any:
        """What the recipe of another setup would measure on the trainer's parameters and a step's batch."""
        state = self.trainer.state
        quant = setup.stepper.loss.init(state.params, self.trainer.batch(step), 1.0, 1.0)
        return self._make(step, setup)(dataclasses.replace(state, quant=quant), self.trainer.batch(step))

    def _program(self, step: int) -> Any:
        stage = self.trainer.schedule.stage(step)
        if stage not in self._compiled:
            self._compiled[stage] = self._make(step, self.trainer.setup)
        return self._compiled[stage]

    def _make(self, step: int, setup: Setup) -> Any:
        low = probe(setup.stepper.loss.at(step)[0])
        cut = setup.batch_sharding.spec[0] if len(setup.batch_sharding.spec) else None
        # As many rows as devices that hold some, at least: fewer could not be cut.
        least = math.prod(setup.mesh.shape[axis] for axis in ((cut,) if isinstance(cut, str) else cut or ()))
        parts = SHARE * self.trainer.config.gradient_accumulation_steps
        rows = max(1, -(-(setup.rows // parts) // least)) * least
        fn = functools.partial(_probe, low, rows)
        return jax.jit(fn) if setup.is_single else jax.jit(fn, out_shardings=setup.everywhere)


def _probe(low: Any, rows: int, state: TrainState, batch: Batch) -> Any:
    batch = {name: x[:rows] for name, x in batch.items()}
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    call = low.stateful(state.quant, key=key)
    return call(masked(state.params, state.masks), batch, total_weights(batch), 1.0)
