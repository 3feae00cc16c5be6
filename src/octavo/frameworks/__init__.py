"""Models of Flax Linen, Flax NNX and Equinox: adapters to the transformation of functions."""

from octavo.frameworks.gradient_state import accumulate_gradients, overwrite_with_gradients, split_gradients
from octavo.frameworks.model import plan, quantize_model
from octavo.frameworks.params import WithAux, quantize_params
from octavo.frameworks.serving import convert, served

__all__ = [
    "WithAux",
    "accumulate_gradients",
    "convert",
    "overwrite_with_gradients",
    "plan",
    "quantize_model",
    "quantize_params",
    "served",
    "split_gradients",
]
