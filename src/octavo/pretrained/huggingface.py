"""Directories as Hugging Face has them: config.json, safetensors in the layouts of several quantizers, a tokenizer."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from octavo.files.layouts import Layout, layout_of
from octavo.files.safetensors import SafeTensors
from octavo.models import ModelConfig
from octavo.numerics import nearest_names
from octavo.pretrained.names import huggingface_names, is_matrix
from octavo.pretrained.registry import Kind, register_kind
from octavo.pretrained.source import Leaf, Source
from octavo.pretrained.tokenizer import read_tokenizer
from octavo.qarray import QArray

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "relu": "relu"}


def fits(path: Path) -> bool:
    """Whether a path is such a directory."""
    return path.is_dir() and (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def read(directory: Path) -> Source:
    """Open the model of a directory."""
    described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    file = SafeTensors(directory)
    layout = layout_of(described["quantization_config"]) if described.get("quantization_config") else None
    names = file.names() if layout is None else layout.names(file.names())
    config = model_config(described, directory, set(names))
    leaves = {path: _leaf(file, layout, name, is_matrix(path)) for path, name in huggingface_names(config).items()}
    origin = {
        "kind": "Hugging Face",
        "path": directory.name,
        "name": described.get("_name_or_path") or directory.resolve().name,
        "architecture": described.get("model_type"),
        "max_length": described.get("max_position_embeddings"),
    }
    return Source(config, leaves, read_tokenizer(directory), origin=origin)


def model_config(described: dict[str, Any], directory: Path, names: set[str]) -> ModelConfig:
    """The model that a config.json describes."""

    def need(key: str) -> Any:
        if key not in described:
            raise ValueError(f"{directory / 'config.json'} has no {key!r}: it describes no decoder")
        return described[key]

    kind = described.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{directory / 'config.json'}: model_type {kind!r} is none that Octavo knows: "
            f"{nearest_names(str(kind), ARCHITECTURES)}"
        )
    activation = described.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r}: {nearest_names(activation, tuple(_ACTIVATIONS))}")
    length = described.get("max_position_embeddings", 0)
    window = described.get("sliding_window") if described.get("use_sliding_window", kind == "mistral") else None
    if window and window < length:
        raise ValueError(f"its attention looks back {window} tokens only (sliding_window), which is not supported")
    if any(name.endswith(("o_proj.bias", "down_proj.bias")) for name in names):
        raise ValueError(f"{directory} has biases on output projections, which is not supported")
    heads = need("num_attention_heads")
    return ModelConfig(
        vocab_size=need("vocab_size"),
        emb_dim=need("hidden_size"),
        num_layers=need("num_hidden_layers"),
        num_query_heads=heads,
        num_kv_heads=described.get("num_key_value_heads") or heads,
        head_dim=described.get("head_dim") or need("hidden_size") // heads,
        mlp_dim=need("intermediate_size"),
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
        return (
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            float(rope["original_max_position_embeddings"]),
        )
    raise ValueError(f"rotary positions scaled as {kind!r} are not supported: llama3 and default are")


def _leaf(file: SafeTensors, layout: Layout | None, name: str, turned: bool) -> Leaf:
    info: Any
    if layout is None:
        info, load = file.info(name), functools.partial(file.read, name)
        stored = str(info.dtype)
    else:
        info, load = layout.info(file, name), functools.partial(layout.read, file, name)
        stored = layout.method if info.quantized else str(info.dtype)
    shape = tuple(info.shape)
    return Leaf(shape[::-1] if turned else shape, str(info.dtype), functools.partial(_turned, load, turned), stored)


def _turned(load: Callable[[], np.ndarray | QArray], turned: bool) -> np.ndarray | QArray:
    value = load()
    return value.T if turned else value


register_kind(Kind("huggingface", "a Hugging Face directory (config.json and safetensors)", fits=fits, read=read))
