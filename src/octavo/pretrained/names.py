"""How the parameters of a decoder are called, here and in the files of others."""

import re

from octavo.models import ModelConfig, abstract_params
from octavo.pretrained.source import paths_of

_LAYER = re.compile(r"decoder/layers_(\d+)/(.*)")

_HUGGINGFACE = {
    "token_embedder/embedding": "model.embed_tokens.weight",
    "decoder/decoder_norm/scale": "model.norm.weight",
    "decoder/logits_dense/kernel": "lm_head.weight",
}
_HUGGINGFACE_LAYER = {
    "pre_self_attention_layer_norm/scale": "input_layernorm.weight",
    "post_self_attention_layer_norm/scale": "post_attention_layernorm.weight",
    "self_attention/query/kernel": "self_attn.q_proj.weight",
    "self_attention/key/kernel": "self_attn.k_proj.weight",
    "self_attention/value/kernel": "self_attn.v_proj.weight",
    "self_attention/out/kernel": "self_attn.o_proj.weight",
    "self_attention/query/bias": "self_attn.q_proj.bias",
    "self_attention/key/bias": "self_attn.k_proj.bias",
    "self_attention/value/bias": "self_attn.v_proj.bias",
    "self_attention/query_norm/scale": "self_attn.q_norm.weight",
    "self_attention/key_norm/scale": "self_attn.k_norm.weight",
    "mlp/wi_0/kernel": "mlp.gate_proj.weight",
    "mlp/wi_1/kernel": "mlp.up_proj.weight",
    "mlp/wo/kernel": "mlp.down_proj.weight",
}

_GGUF = {
    "token_embedder/embedding": "token_embd.weight",
    "decoder/decoder_norm/scale": "output_norm.weight",
    "decoder/logits_dense/kernel": "output.weight",
}
_GGUF_LAYER = {
    "pre_self_attention_layer_norm/scale": "attn_norm.weight",
    "post_self_attention_layer_norm/scale": "ffn_norm.weight",
    "self_attention/query/kernel": "attn_q.weight",
    "self_attention/key/kernel": "attn_k.weight",
    "self_attention/value/kernel": "attn_v.weight",
    "self_attention/out/kernel": "attn_output.weight",
    "self_attention/query/bias": "attn_q.bias",
    "self_attention/key/bias": "attn_k.bias",
    "self_attention/value/bias": "attn_v.bias",
    "self_attention/query_norm/scale": "attn_q_norm.weight",
    "self_attention/key_norm/scale": "attn_k_norm.weight",
    "mlp/wi_0/kernel": "ffn_gate.weight",
    "mlp/wi_1/kernel": "ffn_up.weight",
    "mlp/wo/kernel": "ffn_down.weight",
}

_LLAMA = {
    "token_embedder/embedding": "tok_embeddings.weight",
    "decoder/decoder_norm/scale": "norm.weight",
    "decoder/logits_dense/kernel": "output.weight",
}
_LLAMA_LAYER = {
    "pre_self_attention_layer_norm/scale": "attention_norm.weight",
    "post_self_attention_layer_norm/scale": "ffn_norm.weight",
    "self_attention/query/kernel": "attention.wq.weight",
    "self_attention/key/kernel": "attention.wk.weight",
    "self_attention/value/kernel": "attention.wv.weight",
    "self_attention/out/kernel": "attention.wo.weight",
    "mlp/wi_0/kernel": "feed_forward.w1.weight",
    "mlp/wi_1/kernel": "feed_forward.w3.weight",
    "mlp/wo/kernel": "feed_forward.w2.weight",
}


def huggingface_names(config: ModelConfig) -> dict[str, str]:
    """The name in Hugging Face's files of each parameter, by its path.

    >>> sizes = dict(vocab_size=8, emb_dim=8, num_query_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8, num_layers=1)
    >>> huggingface_names(ModelConfig(**sizes, scan_layers=False))["decoder/layers_0/mlp/wo/kernel"]
    'model.layers.0.mlp.down_proj.weight'
    """
    return _names(config, _HUGGINGFACE, _HUGGINGFACE_LAYER, "model.layers.{}.{}")


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """The name in GGUF files of each parameter, by its path.

    >>> sizes = dict(vocab_size=8, emb_dim=8, num_query_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8, num_layers=1)
    >>> gguf_names(ModelConfig(**sizes, scan_layers=False))["decoder/layers_0/mlp/wo/kernel"]
    'blk.0.ffn_down.weight'
    """
    return _names(config, _GGUF, _GGUF_LAYER, "blk.{}.{}")


def llama_names(config: ModelConfig) -> dict[str, str]:
    """The name in Meta's own checkpoints, and in those of llama2.c, of each parameter, by its path.

    >>> sizes = dict(vocab_size=8, emb_dim=8, num_query_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8, num_layers=1)
    >>> llama_names(ModelConfig(**sizes, scan_layers=False))["decoder/layers_0/mlp/wo/kernel"]
    'layers.0.feed_forward.w2.weight'
    """
    return _names(config, _LLAMA, _LLAMA_LAYER, "layers.{}.{}")


def is_matrix(path: str) -> bool:
    """Whether others keep a parameter the other way round, as [out, in]."""
    return path.endswith("/kernel")


def _names(config: ModelConfig, tops: dict[str, str], layer: dict[str, str], form: str) -> dict[str, str]:
    if config.num_experts > 1:
        raise ValueError("models with experts have no common names in such files yet: keep this one as Octavo's own")
    found = {}
    for path in paths_of(abstract_params(config)):
        if match := _LAYER.fullmatch(path):
            found[path] = form.format(match[1], layer[match[2]])
        else:
            found[path] = tops[path]
    return found
