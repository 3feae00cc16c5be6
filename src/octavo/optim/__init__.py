"""Optimizers with states in few bits, and weights in bfloat16 with stochastic rounding, as Optax transformations."""

from octavo.optim.moment import MOMENTS, ExpandedMoment, MomentFormat, is_moment
from octavo.optim.optimizers import adamw, lion, muon, sgd
from octavo.optim.quantized import dequantize_state, quantize_state, quantize_state_like
from octavo.optim.rounding import StochasticRoundingState, stochastic_round, with_stochastic_rounding

__all__ = [
    "MOMENTS",
    "ExpandedMoment",
    "MomentFormat",
    "StochasticRoundingState",
    "adamw",
    "dequantize_state",
    "is_moment",
    "lion",
    "muon",
    "quantize_state",
    "quantize_state_like",
    "sgd",
    "stochastic_round",
    "with_stochastic_rounding",
]
