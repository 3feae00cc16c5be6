"""The architectures of decoders in files, as data: fields of `ModelConfig`, and names that differ from Llama's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.models import ModelConfig
from octavo.models.config import LATENT, PER_LAYER, VARIANTS
from octavo.pretrained.names import GGUF, HUGGINGFACE, TensorNames


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A family of decoders.

    Args:
      huggingface: The class of its models in Hugging Face's transformers.
      gguf: Its name in GGUF files; empty if they have none.
      interleaved: Whether GGUF files have the rows of queries and keys in the order of interleaved RoPE.
      fixed: The fields that all of its models have; others of `VARIANTS` have their defaults.
      varied: Further fields of `VARIANTS` that its files describe.
      has_experts: Whether layers have experts.
      scaled_embedding: Whether embeddings are multiplied by sqrt(emb_dim).
      names: Names of modules in Hugging Face's files that differ from Llama's.
      gguf_names: The same in GGUF files.
      layer: The prefix of a layer in Hugging Face's files.
      transposed: Whether Hugging Face's files store matrices as [out, in].
      norm_offset: What Hugging Face's models add to the scales of norms.
      keys: The keys in config.json that differ from Llama's, by Llama's.
      defaults: The values of keys that config.json may leave out, where they differ from Llama's.
      sliding: The pattern of layers with a sliding window, where files do not say.
    """

    huggingface: str
    gguf: str = ""
    interleaved: bool = False
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    varied: tuple[str, ...] = ()
    has_experts: bool = False
    scaled_embedding: bool = False
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gguf_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer: str = HUGGINGFACE.layer
    transposed: bool = True
    norm_offset: float = 0.0
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sliding: tuple[bool, ...] = (True,)

    @property
    def huggingface_names(self) -> TensorNames:
        """The tensors of Hugging Face's files."""
        return TensorNames(self.layer, {**HUGGINGFACE.modules, **self.names}, self.transposed, self.norm_offset)

    @property
    def gguf_tensors(self) -> TensorNames:
        """The tensors of GGUF files."""
        return TensorNames(GGUF.layer, {**GGUF.modules, **self.gguf_names})

    def describes(self, config: ModelConfig) -> bool:
        """Whether a model is one of this architecture."""
        default = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
        free = {*self.varied, "embedding_scale"}
        wanted = {name: default[name] for name in (*VARIANTS, "qkv_bias", "qk_norm") if name not in free}
        scale = config.emb_dim**0.5 if self.scaled_embedding else 1.0
        return (
            all(getattr(config, name) == value for name, value in {**wanted, **self.fixed}.items())
            and (config.num_experts > 1) == self.has_experts
            and abs(config.embedding_scale - scale) < 1e-3
            and (config.kv_lora_rank > 0) == ("kv_lora_rank" in self.varied)
            and (not config.first_dense_layers or "first_dense_layers" in self.varied)
            and ("out_bias" not in self.varied or config.out_bias == config.qkv_bias)
        )


_FUSED = {
    "self_attention/query": "self_attn.qkv_proj:query",
    "self_attention/key": "self_attn.qkv_proj:key",
    "self_attention/value": "self_attn.qkv_proj:value",
    "mlp/wi_0": "mlp.gate_up_proj:gate",
    "mlp/wi_1": "mlp.gate_up_proj:up",
}
_GGUF_FUSED = {f"self_attention/{part}": f"attn_qkv:{part}" for part in ("query", "key", "value")}
_OUT_NORMS = {
    "self_attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_GEMMA: dict[str, Any] = {
    "scaled_embedding": True,
    "names": {**_OUT_NORMS, "post_self_attention_layer_norm": "pre_feedforward_layernorm"},
    "keys": {"hidden_act": "hidden_activation"},
}
_LATENT: dict[str, Any] = {
    "has_experts": True,
    "names": {
        f"moe_block/shared_experts/{module}": f"mlp.shared_experts.{name}_proj"
        for module, name in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down"))
    },
    "keys": {"num_experts": "n_routed_experts"},
}
_LATENT_VARIED = (*LATENT, "rotary_dim", "attention_scale", "first_dense_layers")
_LATENT_VARIED += ("router_groups", "router_top_groups", "router_scale")
_LAYERED = (*PER_LAYER, "kv_shared_mlp_dim", "sliding_window", "logits_softcap")
_GEMMA_VARIED = ("sliding_window", "attention_scale", "attention_softcap", "logits_softcap")

ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved=True, varied=("qkv_bias", "out_bias", "mlp_bias")),
    "mistral": Architecture(
        "MistralForCausalLM", varied=("sliding_window",), defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096}
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", fixed={"qkv_bias": True}, varied=("sliding_window",)),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", fixed={"qk_norm": True}, varied=("sliding_window",)),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        "llama",
        interleaved=True,
        has_experts=True,
        varied=("sliding_window",),
        names={
            "moe_block/router": "block_sparse_moe.gate",
            "moe_block/wi_0": "block_sparse_moe.experts.{}.w1",
            "moe_block/wi_1": "block_sparse_moe.experts.{}.w3",
            "moe_block/wo": "block_sparse_moe.experts.{}.w2",
        },
        keys={"moe_intermediate_size": "intermediate_size"},
        defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": True, "rope_theta": 1e6},
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2moe",
        has_experts=True,
        fixed={"qkv_bias": True, "shared_gate": True},
        varied=("normalize_router", "sliding_window"),
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3moe",
        has_experts=True,
        fixed={"qk_norm": True},
        varied=("normalize_router", "sliding_window"),
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        varied=("rotary_dim", "sliding_window"),
        names=_FUSED,
        gguf_names={**_GGUF_FUSED, "mlp/wi_0": "ffn_up:gate", "mlp/wi_1": "ffn_up:up"},
        defaults={"rms_norm_eps": 1e-5},
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        fixed={
            "norm": "layer",
            "gated_mlp": False,
            "rotary_dim": 0,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
        },
        varied=("learned_positions",),
        names={
            "token_embedder": "transformer.wte",
            "position_embedder": "transformer.wpe",
            "decoder/decoder_norm": "transformer.ln_f",
            "pre_self_attention_layer_norm": "ln_1",
            "post_self_attention_layer_norm": "ln_2",
            **{f"self_attention/{part}": f"attn.c_attn:{part}" for part in ("query", "key", "value")},
            "self_attention/out": "attn.c_proj",
            "mlp/wi_0": "mlp.c_fc",
            "mlp/wo": "mlp.c_proj",
        },
        gguf_names={**_GGUF_FUSED, "mlp/wi_0": "ffn_up"},
        layer="transformer.h.{}.",
        transposed=False,
        keys={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
            "max_position_embeddings": "n_positions",
        },
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "gelu_new"},
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        "olmo2",
        fixed={"norm_place": "post", "qk_norm": True, "qk_norm_wide": True},
        names=_OUT_NORMS,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        norm_offset=1.0,
        fixed={"norm_place": "both"},
        varied=_GEMMA_VARIED,
        sliding=(True, False),
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
        },
        **_GEMMA,
    ),
    "gemma3_text": Architecture(
        "Gemma3ForCausalLM",
        "gemma3",
        norm_offset=1.0,
        fixed={"norm_place": "both", "qk_norm": True},
        varied=_GEMMA_VARIED,
        sliding=(True, True, True, True, True, False),
        # Files of models with images leave out what their class has by default.
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_208,
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window": 4096,
        },
        **_GEMMA,
    ),
    "gemma4_text": Architecture(
        "Gemma4ForCausalLM",
        "gemma4",
        fixed={
            "norm_place": "both",
            "qk_norm": True,
            "value_norm": True,
            "layer_scale": True,
            "attention_scale": 1.0,
        },
        varied=_LAYERED,
        sliding=(True, True, True, True, True, False),
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "rope_local_base_freq": 1e4,
            "sliding_window": 512,
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 256,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
        },
        **_GEMMA,
    ),
    "deepseek_v2": Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek2",
        fixed={"rope_interleaved": True, "normalize_router": False},
        varied=_LATENT_VARIED,
        defaults={"topk_method": "greedy"},
        **_LATENT,
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM",
        "deepseek2",
        fixed={"router_scores": "sigmoid", "router_bias": True},
        varied=(*_LATENT_VARIED, "rope_interleaved", "normalize_router"),
        defaults={"topk_method": "noaux_tc", "norm_topk_prob": True},
        **_LATENT,
    ),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        "gpt-oss",
        has_experts=True,
        fixed={
            "activation": "swiglu_clamped",
            "attention_sinks": True,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
        },
        varied=("sliding_window",),
        sliding=(True, False),
        names={
            "self_attention/sinks": "self_attn.sinks!",
            "moe_block/router": "mlp.router",
            "moe_block/wi_0": "mlp.experts.gate_up_proj!:even",
            "moe_block/wi_1": "mlp.experts.gate_up_proj!:odd",
            "moe_block/wo": "mlp.experts.down_proj!",
        },
        gguf_names={"post_self_attention_layer_norm": "post_attention_norm"},
        keys={"moe_intermediate_size": "intermediate_size"},
        defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": True, "rope_theta": 150_000.0, "sliding_window": 128},
    ),
}


def architecture_of(config: ModelConfig) -> str:
    """The architecture as which a model is written."""
    for name, architecture in ARCHITECTURES.items():
        if architecture.describes(config):
            return name
    used = [*config.variants(), *(name for name in ("qkv_bias", "qk_norm") if getattr(config, name))]
    used += ["num_experts"] if config.num_experts > 1 else []
    raise ValueError(
        f"no architecture of other programs has {', '.join(used)} together: use Octavo's own format instead"
    )
