"""Models written as Hugging Face has them, in float or in the layouts of compressed-tensors, GPTQ and AWQ."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from octavo.files.layouts import Layout, Scheme, get_layout
from octavo.files.safetensors import write
from octavo.models import ModelConfig
from octavo.pretrained.export import register_exporter
from octavo.pretrained.names import huggingface_names, is_matrix
from octavo.pretrained.source import Source
from octavo.qarray import QArray

_SHARD = 5 * 10**9


def write_huggingface(source: Source, params: Mapping[str, Any], out: Path, *, method: str | None = None) -> None:
    """Write a directory with config.json, safetensors and the tokenizer.

    `method` is the layout of weights in low precision; without one they are written as the floats that they stand for.
    """
    layout = None if method is None else get_layout(method)
    tensors: dict[str, np.ndarray] = {}
    schemes: dict[str, Scheme | None] = {}
    for path, name in huggingface_names(source.config).items():
        value = params[path]
        if isinstance(value, QArray) and layout is not None and is_matrix(path):
            q = _turned(value)
            tensors |= layout.write(name, q)
            schemes[name.removesuffix(".weight")] = Scheme.of(q)
            continue
        if isinstance(value, QArray):
            value = np.asarray(value._map(jnp.asarray).dequantize())
        if is_matrix(path):
            schemes[name.removesuffix(".weight")] = None
            value = np.ascontiguousarray(value.T)
        tensors[name] = value
    out.mkdir(parents=True, exist_ok=True)
    write(out, tensors, {"format": "pt"}, max_shard_bytes=_SHARD)
    described = described_as(source, str(tensors["model.norm.weight"].dtype))
    if layout is not None:
        described["quantization_config"] = _config(layout, schemes, method)
    (out / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    if source.tokenizer is not None:
        source.tokenizer.save(out)
        named = {**source.tokenizer.special, "add_bos_token": source.tokenizer.add_bos}
        if source.tokenizer.template:
            named["chat_template"] = source.tokenizer.template
        (out / "tokenizer_config.json").write_text(json.dumps(named, indent=2), encoding="utf-8")


def _turned(value: QArray) -> QArray:
    """[in, out] as [out, in], one code to an element."""
    return value._map(jnp.asarray).unpack().T


def _config(layout: type[Layout], schemes: dict[str, Scheme | None], method: str | None) -> dict[str, Any]:
    if not any(schemes.values()):
        raise ValueError(f"no weight is in low precision: the layout {method} would be of no use")
    return layout.config_for(schemes)


def described_as(source: Source, dtype: str) -> dict[str, Any]:
    """The config.json of a model."""
    config = source.config
    kind = _kind(config)
    described = {
        "architectures": [
            {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
        ],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.emb_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
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
        factor, low, high, length = config.rope_scaling
        described["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": int(length),
        }
    if source.tokenizer is not None:
        ends = list(source.tokenizer.eos_ids)
        described |= {"bos_token_id": source.tokenizer.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    return described


def _kind(config: ModelConfig) -> str:
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.qkv_bias else "llama"


register_exporter("safetensors", write_huggingface)
for _method in ("compressed-tensors", "gptq", "awq"):
    register_exporter(_method, functools.partial(write_huggingface, method=_method))
