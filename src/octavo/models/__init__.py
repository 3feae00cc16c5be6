"""A decoder language model in plain Flax NNX, which knows nothing of quantization."""

from octavo.models.cached import Cache
from octavo.models.config import ModelConfig
from octavo.models.decoder import Aux, Decoder, layer_groups
from octavo.models.functional import abstract_params, apply, count_params, init_params
from octavo.models.fusing import fuse
from octavo.models.layers import ACTIVATIONS
from octavo.models.remat import POLICIES
from octavo.models.stacking import stack_layers, unstack_layers

__all__ = [
    "ACTIVATIONS",
    "POLICIES",
    "Aux",
    "Cache",
    "Decoder",
    "ModelConfig",
    "abstract_params",
    "apply",
    "count_params",
    "fuse",
    "init_params",
    "layer_groups",
    "stack_layers",
    "unstack_layers",
]
