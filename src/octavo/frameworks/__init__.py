"""Model objects: Flax Linen, Flax NNX and Equinox, each a thin way into the transformation."""

from octavo.frameworks.model import plan, quantize_model
from octavo.frameworks.params import WithAux, quantize_params

__all__ = ["WithAux", "plan", "quantize_model", "quantize_params"]
