"""Decoders and encoders in the files of other programs: their architectures, and a table of names for each format."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from octavo._tree import flatten_paths
from octavo.models import ModelConfig

EMBEDDING = "token_embedder/embedding"
LOGITS = "decoder/logits_dense/kernel"
_LAYER = re.compile(r"(?:decoder|encoder)/layers_(\d+)/(.*)")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A family of decoders, by its name in files.

    Args:
      huggingface: The class of its models in Hugging Face's transformers.
      in_gguf: Whether GGUF files have this name; those of Mistral say "llama".
      interleaved: Whether GGUF files have the rows of queries and keys in the order of interleaved RoPE.
    """

    huggingface: str
    in_gguf: bool = True
    interleaved: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", interleaved=True),
    "mistral": Architecture("MistralForCausalLM", in_gguf=False),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
}


def architecture_of(config: ModelConfig) -> str:
    """The architecture as which a model is written."""
    return "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """The names of modules in a file format, by path or by path within a layer; `layer` is the prefix of the latter.

    >>> from octavo.models import abstract_params
    >>> sizes = dict(vocab_size=8, emb_dim=8, num_query_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8, num_layers=1)
    >>> GGUF.param_names(abstract_params(ModelConfig(**sizes, scan_layers=False)))["decoder/layers_0/mlp/wo/kernel"]
    'blk.0.ffn_down.weight'
    """

    layer: str
    modules: Mapping[str, str]

    def param_names(self, params: Any) -> dict[str, str]:
        """The name of each parameter of a tree, by its path."""
        found = {}
        for path in flatten_paths(params):
            match = _LAYER.fullmatch(path)
            module, _, param = (match[2] if match else path).rpartition("/")
            if module not in self.modules:
                raise ValueError(f"{path!r} has no name in such files: use Octavo's own format instead")
            prefix = self.layer.format(match[1]) if match else ""
            found[path] = f"{prefix}{self.modules[module]}.{'bias' if param == 'bias' else 'weight'}"
        return found


HUGGINGFACE = TensorNames(
    "model.layers.{}.",
    {
        "token_embedder": "model.embed_tokens",
        "decoder/decoder_norm": "model.norm",
        "decoder/logits_dense": "lm_head",
        "pre_self_attention_layer_norm": "input_layernorm",
        "post_self_attention_layer_norm": "post_attention_layernorm",
        "self_attention/query": "self_attn.q_proj",
        "self_attention/key": "self_attn.k_proj",
        "self_attention/value": "self_attn.v_proj",
        "self_attention/out": "self_attn.o_proj",
        "self_attention/query_norm": "self_attn.q_norm",
        "self_attention/key_norm": "self_attn.k_norm",
        "mlp/wi_0": "mlp.gate_proj",
        "mlp/wi_1": "mlp.up_proj",
        "mlp/wo": "mlp.down_proj",
    },
)

GGUF = TensorNames(
    "blk.{}.",
    {
        "token_embedder": "token_embd",
        "decoder/decoder_norm": "output_norm",
        "decoder/logits_dense": "output",
        "pre_self_attention_layer_norm": "attn_norm",
        "post_self_attention_layer_norm": "ffn_norm",
        "self_attention/query": "attn_q",
        "self_attention/key": "attn_k",
        "self_attention/value": "attn_v",
        "self_attention/out": "attn_output",
        "self_attention/query_norm": "attn_q_norm",
        "self_attention/key_norm": "attn_k_norm",
        "mlp/wi_0": "ffn_gate",
        "mlp/wi_1": "ffn_up",
        "mlp/wo": "ffn_down",
    },
)

BERT = TensorNames(
    "encoder.layer.{}.",
    {
        "embeddings/word": "embeddings.word_embeddings",
        "embeddings/position": "embeddings.position_embeddings",
        "embeddings/type": "embeddings.token_type_embeddings",
        "embeddings/norm": "embeddings.LayerNorm",
        "self_attention/query": "attention.self.query",
        "self_attention/key": "attention.self.key",
        "self_attention/value": "attention.self.value",
        "self_attention/out": "attention.output.dense",
        "self_attention_norm": "attention.output.LayerNorm",
        "mlp/wi": "intermediate.dense",
        "mlp/wo": "output.dense",
        "mlp_norm": "output.LayerNorm",
    },
)


def is_transposed(path: str) -> bool:
    """Whether files store a parameter as [out, in]: kernels are [in, out]."""
    return path.endswith("/kernel")
