"""Models in Hugging Face directories: config.json, safetensors in float or in a quantized layout, a tokenizer."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from octavo._names import unknown_name
from octavo.files.layouts import Layout, Scheme, get_layout, layout_of
from octavo.files.safetensors import SafeTensors, write
from octavo.models import ModelConfig, abstract_params
from octavo.pretrained.export import Export, Exporter, converting, register_exporter
from octavo.pretrained.model import Leaf, ModelFormat, PretrainedModel, register_format, to_float
from octavo.pretrained.names import ARCHITECTURES, HUGGINGFACE, architecture_of, is_transposed
from octavo.pretrained.tokenizer import read_tokenizer
from octavo.qarray import QArray

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "relu": "relu"}
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "emb_dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_query_heads",
}
"""The sizes that a config.json must have, and the fields of `ModelConfig` that they are."""
_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SHARD_BYTES = 5 * 10**9


def matches(path: Path) -> bool:
    """Whether a path is a directory with config.json and safetensors."""
    return path.is_dir() and (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def read(directory: Path) -> PretrainedModel:
    """Open the model of a directory."""
    described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    file = SafeTensors(directory)
    layout = layout_of(described["quantization_config"]) if described.get("quantization_config") else None
    names = file.names() if layout is None else layout.names(file.names())
    config = model_config(described, directory, set(names))
    params = HUGGINGFACE.param_names(abstract_params(config))
    leaves = {path: _leaf(file, layout, path, name) for path, name in params.items()}
    origin = {
        "kind": "Hugging Face",
        "path": directory.name,
        "name": described.get("_name_or_path") or directory.resolve().name,
        "architecture": described.get("model_type"),
        "max_length": described.get("max_position_embeddings"),
    }
    return PretrainedModel(config, leaves, read_tokenizer(directory), origin=origin)


def model_config(described: dict[str, Any], directory: Path, names: set[str]) -> ModelConfig:
    """The model that a config.json describes."""
    kind = described.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{directory / 'config.json'}: model_type {kind!r} is not supported: "
            f"{unknown_name(str(kind), tuple(ARCHITECTURES))}"
        )
    activation = described.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r}: {unknown_name(activation, tuple(_ACTIVATIONS))}")
    length = described.get("max_position_embeddings", 0)
    window = described.get("sliding_window") if described.get("use_sliding_window", kind == "mistral") else None
    if window and window < length:
        raise ValueError(f"sliding-window attention (sliding_window={window}) is not supported")
    if any(name.endswith(("o_proj.bias", "down_proj.bias")) for name in names):
        raise ValueError(f"{directory} has biases on output projections, which is not supported")
    for key in _SIZES:
        if key not in described:
            raise ValueError(f"{directory / 'config.json'} has no {key!r}, which a decoder needs")
    sizes = {field: described[key] for key, field in _SIZES.items()}
    return ModelConfig(
        **sizes,
        num_kv_heads=described.get("num_key_value_heads") or sizes["num_query_heads"],
        head_dim=described.get("head_dim") or sizes["emb_dim"] // sizes["num_query_heads"],
        activation=_ACTIVATIONS[activation],
        norm_eps=described.get("rms_norm_eps", 1e-6),
        rope_theta=float(_rope(described).get("rope_theta") or described.get("rope_theta", 10_000.0)),
        rope_scaling=_scaling(_rope(described)),
        tied_logits="lm_head.weight" not in names,
        qkv_bias=any(name.endswith("q_proj.bias") for name in names),
        qk_norm=any(name.endswith("q_norm.weight") for name in names),
        scan_layers=False,
    )


def _rope(described: dict[str, Any]) -> dict[str, Any]:
    return described.get("rope_parameters") or described.get("rope_scaling") or {}


def _scaling(rope: dict[str, Any]) -> tuple[float, float, float, float] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "llama3":
        factor, low, high, length = (float(rope[key]) for key in _ROPE)
        return factor, low, high, length
    raise ValueError(f"RoPE scaling {kind!r} is not supported: llama3 and default are")


def _leaf(file: SafeTensors, layout: Layout | None, path: str, name: str) -> Leaf:
    if layout is None:
        info, load = file.info(name), functools.partial(file.read, name)
        stored = str(info.dtype)
    else:
        info, load = layout.info(file, name), functools.partial(layout.read, file, name)
        stored = layout.method if info.quantized else str(info.dtype)
    leaf = Leaf(info.shape, str(info.dtype), load, stored)
    return leaf.T if is_transposed(path) else leaf


def write_huggingface(
    source: PretrainedModel, params: Mapping[str, Any], out: Path, *, method: str | None = None
) -> None:
    """Write a directory with config.json, safetensors and the tokenizer.

    Args:
      source: The model.
      params: Its parameters by path, floats and QArrays.
      out: The directory.
      method: The `quant_method` of the layout for QArrays; without one they are dequantized.
    """
    layout = None if method is None else get_layout(method)
    tensors: dict[str, np.ndarray] = {}
    schemes: dict[str, Scheme | None] = {}
    for path, name in HUGGINGFACE.param_names(abstract_params(source.config)).items():
        value = params[path]
        if isinstance(value, QArray) and layout is not None and is_transposed(path):
            q = value._map(jnp.asarray).unpack().T
            tensors |= layout.write(name, q)
            schemes[name.removesuffix(".weight")] = Scheme.of(q)
            continue
        value = to_float(value)
        if is_transposed(path):
            schemes[name.removesuffix(".weight")] = None
            value = np.ascontiguousarray(value.T)
        tensors[name] = value
    out.mkdir(parents=True, exist_ok=True)
    write(out, tensors, {"format": "pt"}, max_shard_bytes=_SHARD_BYTES)
    described = describe_model(source, str(tensors["model.norm.weight"].dtype))
    if layout is not None:
        described["quantization_config"] = layout.config_for(schemes)
    (out / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    if source.tokenizer is not None:
        source.tokenizer.save(out)
        named = {**source.tokenizer.special, "add_bos_token": source.tokenizer.add_bos}
        if source.tokenizer.template:
            named["chat_template"] = source.tokenizer.template
        (out / "tokenizer_config.json").write_text(json.dumps(named, indent=2), encoding="utf-8")


def describe_model(source: PretrainedModel, dtype: str) -> dict[str, Any]:
    """The config.json of a model."""
    config = source.config
    architecture = architecture_of(config)
    described = {
        "architectures": [ARCHITECTURES[architecture].huggingface],
        "model_type": architecture,
        **{key: getattr(config, field) for key, field in _SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "gelu_pytorch_tanh" if config.activation == "gelu" else config.activation,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": source.origin.get("max_length") or 2048,
        "tie_word_embeddings": config.tied_logits,
        "torch_dtype": dtype,
    }
    if config.rope_scaling is not None:
        scaling = dict(zip(_ROPE, (*config.rope_scaling[:3], int(config.rope_scaling[3])), strict=True))
        described["rope_scaling"] = {"rope_type": "llama3", **scaling}
    if source.tokenizer is not None:
        ends = list(source.tokenizer.eos_ids)
        described |= {"bos_token_id": source.tokenizer.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    return described


register_format(
    ModelFormat("huggingface", "a Hugging Face directory (config.json and safetensors)", matches=matches, read=read)
)


def _exporter(method: str | None, scale_dtype: str | None) -> Exporter:
    def write_params(source: PretrainedModel, done: Export, out: Path) -> None:
        write_huggingface(source, done.params, out, method=method)

    # Quantized embeddings and logits are unknown to these layouts.
    return converting(write_params, head="float", scale_dtype=scale_dtype)


register_exporter("safetensors", _exporter(None, None))
for _method in ("compressed-tensors", "gptq", "awq"):
    register_exporter(_method, _exporter(_method, "float16"))
