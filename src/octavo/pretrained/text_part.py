"""The text model in files of models that also read images and sounds, and tensors that no computation reads."""

from collections.abc import Collection, Mapping
from typing import Any

from octavo.models import ModelConfig
from octavo.pretrained.architectures import ARCHITECTURES
from octavo.pretrained.names import TensorNames

_PREFIXES = {"model.": ("model.language_model.", "language_model.model."), "lm_head.": ("language_model.lm_head.",)}
"""How the names of the text model begin, and how they do in such files."""
_KEYS = ("key", "value", "key_norm", "value_norm")


def text_model(described: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The config.json of the text model, and the names of its tensors in the file by those that it has by itself."""
    text = described.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    own = described.get("model_type")
    if not isinstance(text, dict) or kind not in ARCHITECTURES or own in ARCHITECTURES:
        return dict(described), {name: name for name in names}
    shared = {key: described[key] for key in ("tie_word_embeddings", "_name_or_path") if key in described}
    found = {name: name for name in names if name.startswith("lm_head.")}
    for prefix, others in _PREFIXES.items():
        found |= {
            prefix + name.removeprefix(other): name for other in others for name in names if name.startswith(other)
        }
    return {**shared, **text}, found


def unread_keys(config: ModelConfig, tensors: TensorNames) -> tuple[str, ...]:
    """The tensors of keys and values, which some files have, of layers that attend to those of others."""
    first = config.num_layers - config.kv_shared_layers
    modules = [tensors.modules.get(f"self_attention/{key}", f"self_attn.{key[0]}_norm") for key in _KEYS]
    layers = range(first, config.num_layers)
    return tuple(f"{tensors.layer.replace('{}', str(i))}{module}.weight" for i in layers for module in modules)
