"""Names of a decoder's parameters in the files of other programs."""

import re

from octavo._tree import flatten_paths
from octavo.models import ModelConfig, abstract_params

_LAYER = re.compile(r"decoder/layers_(\d+)/(.*)")

# By path, or path within a layer: the names of Hugging Face and of GGUF.
_NAMES = {
    "token_embedder/embedding": ("model.embed_tokens.weight", "token_embd.weight"),
    "decoder/decoder_norm/scale": ("model.norm.weight", "output_norm.weight"),
    "decoder/logits_dense/kernel": ("lm_head.weight", "output.weight"),
}
_LAYER_NAMES = {
    "pre_self_attention_layer_norm/scale": ("input_layernorm.weight", "attn_norm.weight"),
    "post_self_attention_layer_norm/scale": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "self_attention/query/kernel": ("self_attn.q_proj.weight", "attn_q.weight"),
    "self_attention/key/kernel": ("self_attn.k_proj.weight", "attn_k.weight"),
    "self_attention/value/kernel": ("self_attn.v_proj.weight", "attn_v.weight"),
    "self_attention/out/kernel": ("self_attn.o_proj.weight", "attn_output.weight"),
    "self_attention/query/bias": ("self_attn.q_proj.bias", "attn_q.bias"),
    "self_attention/key/bias": ("self_attn.k_proj.bias", "attn_k.bias"),
    "self_attention/value/bias": ("self_attn.v_proj.bias", "attn_v.bias"),
    "self_attention/query_norm/scale": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "self_attention/key_norm/scale": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "mlp/wi_0/kernel": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "mlp/wi_1/kernel": ("mlp.up_proj.weight", "ffn_up.weight"),
    "mlp/wo/kernel": ("mlp.down_proj.weight", "ffn_down.weight"),
}


def huggingface_names(config: ModelConfig) -> dict[str, str]:
    """The name in Hugging Face's files of each parameter, by its path.

    >>> sizes = dict(vocab_size=8, emb_dim=8, num_query_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8, num_layers=1)
    >>> huggingface_names(ModelConfig(**sizes, scan_layers=False))["decoder/layers_0/mlp/wo/kernel"]
    'model.layers.0.mlp.down_proj.weight'
    """
    return _file_names(config, 0, "model.layers.{}.{}")


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """The name in GGUF files of each parameter, by its path.

    >>> sizes = dict(vocab_size=8, emb_dim=8, num_query_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8, num_layers=1)
    >>> gguf_names(ModelConfig(**sizes, scan_layers=False))["decoder/layers_0/mlp/wo/kernel"]
    'blk.0.ffn_down.weight'
    """
    return _file_names(config, 1, "blk.{}.{}")


def is_transposed(path: str) -> bool:
    """Whether files store a parameter as [out, in]: kernels are [in, out]."""
    return path.endswith("/kernel")


def _file_names(config: ModelConfig, column: int, form: str) -> dict[str, str]:
    if config.num_experts > 1:
        raise ValueError("models with experts are not supported in such files: use Octavo's own format instead")
    names = {}
    for path in flatten_paths(abstract_params(config)):
        match = _LAYER.fullmatch(path)
        names[path] = form.format(match[1], _LAYER_NAMES[match[2]][column]) if match else _NAMES[path][column]
    return names
