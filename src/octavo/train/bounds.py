"""Bounds for static ranges: proposed from what tensors hold, and watched while the run trains with them."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from octavo.numerics import get_format
from octavo.train.setup import Setup
from octavo.train.telemetry import Telemetry
from octavo.train.trainer import Trainer

METHODS = {
    "weight": "weight_quantization_calibration_method",
    "activation": "act_quantization_calibration_method",
    "gradient": "bwd_quantization_calibration_method",
}
MARGIN = 1.25
"""How much larger than what was seen a bound is at least, before it is rounded up to a power of two."""
CLIPS, VANISHES = 1e-3, 0.1
"""From which share of values on beyond the range, or lost below it, the log says so."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """The largest magnitude of a class of tensors in any product, and the range that would hold it."""

    largest: float

    @property
    def method(self) -> str:
        """The range, as a calibration method: a power of two, so that scales of float formats lose no bits.

        >>> Bound(0.9).method, Bound(100.0).method
        ('fixed,-2,2', 'fixed,-128,128')
        """
        limit = 2.0 ** math.ceil(math.log2(self.largest * MARGIN)) if self.largest > 0 else 1.0
        return f"fixed,-{limit:g},{limit:g}"


def propose(trainer: Trainer) -> dict[str, Bound]:
    """Bounds for weights, activations and gradients, from the next batch as it is now; nothing is changed.

    The tensors are those of the run's recipe with ranges of their own: bounds that it has clip nothing here.
    """
    config = trainer.config
    free = dict.fromkeys((*METHODS.values(), "quantization_calibration_method"), "absmax")
    free["quantization_calibration_method"] = ""
    setup = Setup(config.replace(**free), trainer.setup.mesh, vocab_size=trainer.model.vocab_size)
    stats = Telemetry(trainer).statistics(setup.quantized_step, setup)
    found: dict[str, float] = {}
    for operands in stats.values():
        for s in operands.values():
            most = float(np.max(np.asarray(s.largest_scale), initial=0.0)) * get_format(s.qtype).bound
            found[s.kind] = max(found.get(s.kind, 0.0), most)
    return {kind: Bound(largest) for kind, largest in found.items()}


def proposal(bounds: Mapping[str, Bound]) -> str:
    """Bounds in the words of the command line."""
    said = "; ".join(f"{kind}s reach {bound.largest:.3g}" for kind, bound in bounds.items())
    keys = " ".join(f"{METHODS[kind]}={bound.method}" for kind, bound in bounds.items() if kind != "gradient")
    return f"calibration=auto: {said}. Static bounds that hold them: {keys} (gradients change most: leave them dynamic)"


def clipping(measured: Mapping[str, Any]) -> Iterator[str]:
    """What is to be said of ranges that do not fit, by class of tensor, after a measurement of telemetry."""
    for kind, row in measured.items():
        if kind not in METHODS:
            continue
        if row["saturation"] > CLIPS:
            yield (
                f"warning: {100 * row['saturation']:.2g} % of {kind} values lie beyond their range and are clipped, "
                f"worst at {row['worst_site']}: widen {METHODS[kind]}"
            )
        if row["underflow"] > VANISHES:
            yield (
                f"warning: {100 * row['underflow']:.2g} % of {kind} values become zero, worst at "
                f"{row['worst_underflow_site']}: narrow {METHODS[kind]}, or give smaller parts scales of their own"
            )
