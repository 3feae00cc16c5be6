"""A decoder language model in plain Flax NNX, independent of quantization."""

from octavo.models.attention import QKV, AttentionOptions, Cache
from octavo.models.config import ModelConfig
from octavo.models.decoder import Aux, Decoder, layer_groups
from octavo.models.functional import abstract_params, apply, init_params, unstack_layers
from octavo.models.fused_weights import fuse
from octavo.models.layers import ACTIVATIONS
from octavo.models.remat import POLICIES
from octavo.models.rope import RopeScaling

__all__ = [
    "ACTIVATIONS",
    "POLICIES",
    "QKV",
    "AttentionOptions",
    "Aux",
    "Cache",
    "Decoder",
    "ModelConfig",
    "RopeScaling",
    "abstract_params",
    "apply",
    "fuse",
    "init_params",
    "layer_groups",
    "unstack_layers",
]
