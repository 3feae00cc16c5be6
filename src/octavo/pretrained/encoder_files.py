"""Encoders in Hugging Face directories: config.json and safetensors to `EncoderConfig` and parameters."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from octavo._names import did_you_mean
from octavo._tree import flatten_paths, unflatten_paths
from octavo.files.safetensors import SafeTensors
from octavo.models.encoder import EncoderConfig, abstract_encoder_params
from octavo.models.module_params import Params
from octavo.pretrained.encoder_architectures import ENCODERS, EncoderArchitecture
from octavo.pretrained.fields import Fields, check_placed
from octavo.pretrained.huggingface_config import read_activation, read_layer_types, read_rope, warn_unknown
from octavo.pretrained.tokenizer import read_json

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "emb_dim",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "mlp_dim",
    "type_vocab_size": "num_types",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("is_decoder", "add_cross_attention", "is_encoder_decoder"), (False,)),
    **dict.fromkeys(("embedding_size", "rope_scaling", "sliding_window", "quantization_config"), (None,)),
    "position_embedding_type": ("absolute",),
    "relative_attention_num_buckets": (32,),
}
"""Keys of computations that are not supported, with the values that turn them off."""
_INERT = (
    *("adapters", "attention_probs_dropout_prob", "chunk_size_feed_forward", "cls_token_id", "decoder_bias", "dropout"),
    *("embedding_dropout", "gradient_checkpointing", "hidden_dropout_prob", "initializer_cutoff_factor"),
    *("layer_norm_eps", "mask_token_id", "mlp_dropout", "output_past", "qa_dropout", "reference_compile"),
    *("seq_classif_dropout", "sinusoidal_pos_embds", "sparse_pred_ignore_index", "tie_weights_", "tie_word_embeddings"),
    *("type_vocab_size", "classifier_bias", "classifier_dropout"),
    *(f"pooler_{name}" for name in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head")),
)
"""Keys that do not change the hidden states, in addition to those of decoders."""
_UNUSED = re.compile(
    r"(pooler|cls|lm_head|head|decoder|classifier|pre_classifier|qa_outputs|vocab_\w+)\..+|embeddings\.position_ids"
)
"""Tensors that the hidden states do not depend on: of poolers and heads, and constants."""


def read_encoder(directory: Path, num_heads: int | None) -> tuple[EncoderConfig, Params]:
    """The config and the parameters of the encoder in a directory."""
    described = read_json(directory / "config.json")
    kind = described.get("model_type", "bert")
    if kind not in ENCODERS:
        raise ValueError(
            f"{directory / 'config.json'}: model_type {kind!r} is not a supported encoder: "
            f"{did_you_mean(str(kind), ENCODERS, most=1)}Known: {', '.join(sorted(ENCODERS))}"
        )
    architecture = ENCODERS[kind]
    tensors = architecture.tensors
    with SafeTensors(directory) as file:
        prefix = _prefix(file, architecture, directory)
        names = [name.removeprefix(prefix) for name in file.names()]

        def info(name: str) -> tuple[tuple[int, ...], str, str]:
            found = file.info(prefix + name)
            return found.shape, found.dtype.name, ""

        sizes = _sizes(architecture, names, info)
        config = _config(sizes, architecture, described, num_heads, directory)
        shapes = abstract_encoder_params(config)
        places = tensors.places(shapes, config)
        used = [place.name for place in places.values()]
        check_placed(directory, [name for name in names if not _UNUSED.fullmatch(name)], used)
        leaves = {path: place.leaf(info, lambda name: file.read(prefix + name)) for path, place in places.items()}
        for path, wanted in flatten_paths(shapes).items():
            if leaves[path].shape != wanted.shape:
                raise ValueError(
                    f"{directory}: the tensor {places[path].name!r} makes {path!r} of the shape {leaves[path].shape}, "
                    f"but config.json of {wanted.shape}"
                )
        return config, unflatten_paths({path: jnp.asarray(leaf.load()) for path, leaf in leaves.items()})


def _prefix(file: SafeTensors, architecture: EncoderArchitecture, directory: Path) -> str:
    """The prefix of the encoder's tensors in a larger model."""
    words = f"{architecture.tensors.modules['embeddings/word']}.weight"
    for name in file.names():
        if name.endswith(words):
            return name.removesuffix(words)
    raise ValueError(f"{directory} has no tensor {words!r}: it is not a {architecture.huggingface}")


def _sizes(
    architecture: EncoderArchitecture, names: list[str], info: Callable[[str], tuple[Any, str, str]]
) -> dict[str, Any]:
    """Fields of the config that the tensors show."""
    tensors = architecture.tensors
    layer = re.compile(re.escape(tensors.layer).replace(r"\{\}", r"(\d+)") + ".*")
    layers = [int(found[1]) for name in names if (found := layer.fullmatch(name))]

    def shape(module: str) -> tuple[int, ...]:
        return info(f"{tensors.modules[module]}.weight")[0]

    vocab_size, emb_dim = shape("embeddings/word")
    (_, mlp_dim), dtype, _ = info(f"{tensors.layer.format(0)}{tensors.modules['mlp/wo']}.weight")
    sizes = {"vocab_size": vocab_size, "emb_dim": emb_dim, "num_layers": 1 + max(layers, default=0), "mlp_dim": mlp_dim}
    if "num_types" not in architecture.fixed:
        sizes["num_types"] = shape("embeddings/type")[0]
    if "rope_theta" not in architecture.varied:
        sizes["max_length"] = shape("embeddings/position")[0]
    return {**sizes, "weight_dtype": dtype}


def _config(
    sizes: dict[str, Any],
    architecture: EncoderArchitecture,
    described: dict[str, Any],
    num_heads: int | None,
    directory: Path,
) -> EncoderConfig:
    """The architecture, from the sizes of the tensors and config.json, which must agree."""
    values = {**architecture.defaults, **{key: value for key, value in described.items() if value is not None}}
    values |= {key: described[other] for key, other in architecture.keys.items() if described.get(other) is not None}
    fields = Fields(values, directory / "config.json")
    for other in architecture.keys.values():
        fields.get(other, None)
    for key, field in _SIZES.items():
        if (size := sizes.get(field)) is not None and (said := fields.get(key, size)) != size:
            name = architecture.keys.get(key, key)
            raise ValueError(f"{fields.path} says {name}={said}, but by its tensors it is {size}")
    heads = fields.int("num_attention_heads", None)
    if not num_heads and not heads:
        raise ValueError(f"{directory} has no config.json with the number of heads: pass num_heads=")
    found: dict[str, Any] = {
        **sizes,
        "num_heads": num_heads or heads,
        "activation": read_activation(fields, "gelu"),
        "norm_eps": fields.float("layer_norm_eps", 1e-12),
        **_varied(fields, architecture, sizes, num_heads or heads),
        **architecture.fixed,
    }
    if found.get("rope_theta") is None:
        rows = fields.int("max_position_embeddings", sizes["max_length"])
        if rows != sizes["max_length"]:
            raise ValueError(f"{fields.path} says max_position_embeddings={rows}, but there are {sizes['max_length']}")
        # Positions begin after the id of the padding.
        found["max_length"] = rows - (0 if (padding := found.get("padding_id")) is None else padding + 1)
    fields.int("pad_token_id", 0, least=0)
    fields.check_neutral(_NEUTRAL)
    warn_unknown(fields, *_INERT)
    return EncoderConfig(**found)


def _varied(fields: Fields, architecture: EncoderArchitecture, sizes: dict[str, Any], num_heads: int) -> dict[str, Any]:
    """The fields that the files of some architectures describe."""
    found: dict[str, Any] = {name: fields.flag(name) for name in architecture.varied if name.endswith("_bias")}
    if "padding_id" in architecture.varied:
        found["padding_id"] = fields.int("pad_token_id", 1, least=0)
    if "rope_theta" not in architecture.varied:
        return found
    window, every = fields.int("local_attention", 128, least=2), fields.int("global_attn_every_n_layers", 3)
    layers, length = sizes["num_layers"], fields.int("max_position_embeddings")
    pattern = read_layer_types(fields, layers) or tuple(i % every > 0 for i in range(layers))
    rope = read_rope(fields, sizes["emb_dim"] // num_heads, length, sliding=any(pattern))
    for name in ("rope_scaling", "rotary_dim"):
        if rope.pop(name) is not None:
            raise ValueError(f"{fields.path}: scaled or partial RoPE is not supported in encoders")
    window = {"sliding_window": window // 2, "sliding_layers": pattern} if any(pattern) else {}
    return {**found, **rope, **window, "max_length": length}
