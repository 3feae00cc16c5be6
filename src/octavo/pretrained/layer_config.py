"""Gemma 4's layers of several sizes: the keys of config.json and of GGUF files."""

from collections.abc import Sequence
from typing import Any

from octavo.files.gguf import Gguf
from octavo.models import ModelConfig, RopeScaling
from octavo.pretrained.fields import Fields

READ = ("attention.shared_kv_layers",)
"""The keys that other architectures may have only with values that turn them off."""


def read_layers(fields: Fields, sliding: tuple[bool, ...], layers: int) -> dict[str, Any]:
    """The fields of layers in a config.json."""
    # The last layer has no window, whatever files say.
    pattern = (*(sliding[i % len(sliding)] for i in range(layers - 1)), False)
    dim, heads = fields.int("head_dim"), fields.int("num_key_value_heads")
    shares, full = fields.flag("attention_k_eq_v"), _full_sizes(fields, pattern)
    full_heads = full.int("num_key_value_heads", None)
    width, shared = (
        fields.int("hidden_size_per_layer_input", 0, least=0),
        fields.int("num_kv_shared_layers", 0, least=0),
    )
    if fields.int("vocab_size_per_layer_input", fields.int("vocab_size")) != fields.int("vocab_size") and width:
        raise ValueError(f"{fields.path}: vocab_size_per_layer_input differs from vocab_size, which is not supported")
    wide = fields.flag("use_double_wide_mlp") and shared > 0
    return {
        "sliding_layers": pattern,
        "full_head_dim": _unless(full.int("head_dim", dim), dim),
        "full_kv_heads": _unless(full_heads or heads, heads),
        "full_shared_kv": shares,
        "kv_shared_layers": shared,
        "kv_shared_mlp_dim": 2 * fields.int("intermediate_size") if wide else 0,
        "layer_embed_dim": width,
    }


def _unless(value: int, usual: int) -> int:
    return 0 if value == usual else value


def _full_sizes(fields: Fields, pattern: Sequence[bool]) -> Fields:
    """The sizes of layers without a window: keys of their own, or in newer files objects by layer."""
    by_layer, dim = fields.get("per_layer_config", None), fields.int("global_head_dim")
    heads = fields.int("num_global_key_value_heads", None)
    if by_layer is None:
        found = {"head_dim": dim} | (
            {"num_key_value_heads": heads} if heads and fields.flag("attention_k_eq_v") else {}
        )
        return Fields(found, fields.path)
    own = [str(i) for i, is_sliding in enumerate(pattern) if not is_sliding]
    if not isinstance(by_layer, dict) or sorted(by_layer) != sorted(own):
        raise ValueError(
            f"{fields.path}: per_layer_config is supported for all layers with full_attention, and no others"
        )
    first = by_layer[own[0]]
    known = isinstance(first, dict) and set(first) <= {"head_dim", "num_key_value_heads"}
    if not known or any(one != first for one in by_layer.values()):
        raise ValueError(f"{fields.path}: per_layer_config is supported with one head_dim and num_key_value_heads only")
    return Fields(first, fields.path, "")


def describe_layers(config: ModelConfig) -> dict[str, Any]:
    """The same keys of a model."""
    if config.kv_shared_mlp_dim not in (0, 2 * config.mlp_dim):
        raise ValueError("files of Gemma 4 have kv_shared_mlp_dim of 2 * mlp_dim only: use Octavo's own format instead")
    if config.full_kv_heads and not config.full_shared_kv:
        raise ValueError(
            "files of Gemma 4 have full_kv_heads with full_shared_kv only: use Octavo's own format instead"
        )
    rope = config.rope or RopeScaling(kind="proportional")
    if rope.kind != "proportional" or config.sliding_rope_theta is None:
        raise ValueError("files of Gemma 4 have proportional RoPE only: use Octavo's own format instead")
    full = {"rope_type": "proportional", "partial_rotary_factor": rope.part, "factor": rope.factor}
    return {
        "global_head_dim": config.full_head_dim or config.head_dim,
        "num_global_key_value_heads": config.full_kv_heads or None,
        "attention_k_eq_v": config.full_shared_kv,
        "num_kv_shared_layers": config.kv_shared_layers,
        "use_double_wide_mlp": bool(config.kv_shared_mlp_dim),
        "hidden_size_per_layer_input": config.layer_embed_dim,
        "vocab_size_per_layer_input": config.vocab_size,
        "rope_parameters": {
            "full_attention": {**full, "rope_theta": config.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.sliding_rope_theta},
        },
    }


def read_gguf_layers(file: Gguf, fields: Fields, layers: int) -> dict[str, Any]:
    """The fields of layers in the metadata of a GGUF file."""
    pattern = [bool(x) for x in fields.get("attention.sliding_window_pattern")]
    if len(pattern) != layers:
        raise ValueError(f"{file.path}: attention.sliding_window_pattern has an entry for each of the {layers} layers")
    full, own = fields.int("attention.key_length"), fields.int("attention.key_length_swa")
    for key, value in (("", full), ("_swa", own)):
        for name in (f"attention.value_length{key}", f"rope.dimension_count{key}"):
            if fields.int(name, value) != value:
                raise ValueError(f"{file.path}: {name} is not that of keys, {value}, which is not supported")
    shared = fields.int("attention.shared_kv_layers", 0, least=0)
    in_window = {is_sliding: [i for i in range(layers) if pattern[i] == is_sliding] for is_sliding in (True, False)}
    heads = _each(fields, "attention.head_count_kv", layers)
    kv_heads, full_heads = (_one(fields, heads, in_window[x] or range(layers)) for x in (True, False))
    hidden = _each(fields, "feed_forward_length", layers)
    mlp_dim = _one(fields, hidden, range(layers - shared))
    names = set(file.names())
    return {
        "sliding_layers": tuple(pattern),
        "head_dim": own,
        "num_kv_heads": kv_heads,
        "mlp_dim": mlp_dim,
        "full_head_dim": _unless(full, own),
        "full_kv_heads": _unless(full_heads, kv_heads),
        "full_shared_kv": any(f"blk.{i}.attn_v.weight" not in names for i in in_window[False] if i < layers - shared),
        "kv_shared_layers": shared,
        "kv_shared_mlp_dim": _unless(_one(fields, hidden, range(layers - shared, layers)), mlp_dim) if shared else 0,
        "layer_embed_dim": fields.int("embedding_length_per_layer_input", 0, least=0),
    }


def _each(fields: Fields, key: str, layers: int) -> list[int]:
    """A size by layer, where files have one or one for each."""
    found = fields.get(key)
    found = [fields.int(key)] * layers if isinstance(found, int) else [int(x) for x in found]
    if len(found) != layers or min(found) < 1:
        raise ValueError(f"{fields.path}: {fields.prefix}{key} is a size, or one for each of the {layers} layers")
    return found


def _one(fields: Fields, sizes: Sequence[int], layers: Sequence[int]) -> int:
    found = {sizes[i] for i in layers}
    if len(found) != 1:
        raise ValueError(
            f"{fields.path}: layers of one kind have several sizes, {sorted(found)}, which is not supported"
        )
    return found.pop()


def layer_metadata(config: ModelConfig) -> dict[str, Any]:
    """The metadata of a GGUF file."""
    full, layers = config.full, range(config.num_layers)
    found: dict[str, Any] = {
        "attention.sliding_window_pattern": [config.is_sliding(i) for i in layers],
        "attention.shared_kv_layers": config.kv_shared_layers,
        "embedding_length_per_layer_input": config.layer_embed_dim,
        "rope.freq_base_swa": float(config.sliding_rope_theta or config.rope_theta),
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": config.head_dim,
    }
    for kind in ("key", "value"):
        found |= {f"attention.{kind}_length": full.head_dim, f"attention.{kind}_length_swa": config.head_dim}
    if config.full_kv_heads:
        found["attention.head_count_kv"] = [config.of_layer(i).num_kv_heads for i in layers]
    if config.kv_shared_mlp_dim:
        found["feed_forward_length"] = [config.of_layer(i).mlp_dim for i in layers]
    return found
