"""Logits of small random models of many architectures, as transformers computes them: architectures.npz.

Nothing of Octavo is imported here, except for the values of weights. In the environment of make.py:

    oracle/bin/python tests/pretrained/golden/architectures.py [NAME ...]

Made with torch 2.13.0 and transformers 5.23.0, in float32. For each model the file holds `NAME/config` (its
config.json), `NAME/tensors` (JSON: the shape of each tensor in its safetensors) and `NAME/logits` for `tokens`.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from weights import tensor

TOKENS = np.random.default_rng(0).integers(0, 64, 24)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {"model_type": "llama", **SIZES, "rope_theta": 10000.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 6.0, 9.0]}
LONG_OF_SIX = {key: [*values, values[-1] + 1, values[-1] + 2] for key, values in LONG.items()}
GEMMA4 = {
    **SIZES,
    "model_type": "gemma4_text",
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 8,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
}


def rope(**fields):
    return {**LLAMA, "max_position_embeddings": 64, "rope_scaling": fields}


MODELS = {
    "llama": {**LLAMA, "tie_word_embeddings": False},
    "llama, attention bias": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama, rope linear": rope(rope_type="linear", factor=4.0),
    "llama, rope dynamic": {**rope(rope_type="dynamic", factor=2.0), "max_position_embeddings": 16},
    "llama, rope llama3": rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "llama, rope yarn": rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "mistral": {**SIZES, "model_type": "mistral", "sliding_window": 8},
    "qwen2": {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**SIZES, "model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6},
    "qwen2_moe": {
        **SIZES,
        **MOE,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {**SIZES, **MOE, "model_type": "qwen3_moe", "head_dim": 8, "norm_topk_prob": True},
    "mixtral": {**SIZES, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {
        **SIZES,
        "model_type": "phi3",
        "original_max_position_embeddings": 16,
        "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "longrope", **LONG},
        "sliding_window": None,
    },
    "phi3, partial rotary": {
        **SIZES,
        "model_type": "phi3",
        "partial_rotary_factor": 0.5,
        "hidden_size": 64,
        "tie_word_embeddings": True,
    },
    "phi3, as Phi-4-mini": {
        **SIZES,
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "hidden_size": 64,
        "tie_word_embeddings": True,
        "original_max_position_embeddings": 16,
        "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "longrope", **LONG_OF_SIX},
        "sliding_window": 262144,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "olmo2": {**SIZES, "model_type": "olmo2"},
    "gemma2": {
        **SIZES,
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "num_hidden_layers": 3,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma2, scale of heads": {
        **SIZES,
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        **SIZES,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "num_hidden_layers": 6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gemma4_text, as E2B": {
        **GEMMA4,
        "num_hidden_layers": 9,
        "layer_types": [*(["sliding_attention"] * 2 + ["full_attention"]) * 3],
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 64,
    },
    "gemma4_text, as 31B": {
        **GEMMA4,
        "num_hidden_layers": 6,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gpt_oss": {
        **SIZES,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
        "rope_theta": 150000.0,
        "max_position_embeddings": 2048,
    },
    "deepseek_v3": {
        **LATENT,
        "model_type": "deepseek_v3",
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "max_position_embeddings": 64,
    },
    "deepseek_v3, one group, halves": {
        **LATENT,
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "rope_interleave": False,
    },
    "deepseek_v2": {
        **LATENT,
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.8},
        "max_position_embeddings": 64,
    },
    "deepseek_v2, greedy": {
        **LATENT,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
}


@torch.no_grad()
def make(name: str, described: dict) -> dict[str, np.ndarray]:
    kind = described.pop("model_type")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **described), attn_implementation="eager")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        with safe_open(file, "np") as found:
            shapes = {key: tuple(found.get_slice(key).get_shape()) for key in found.keys()}  # noqa: SIM118
        save_file({key: tensor(key, shape) for key, shape in shapes.items()}, file, {"format": "pt"})
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        logits = model(torch.tensor(TOKENS)[None]).logits[0].float().numpy()
        config = json.loads((Path(folder) / "config.json").read_text())
    print(f"{name}: {len(shapes)} tensors, logits of standard deviation {logits.std():.2f}")
    assert np.isfinite(logits).all()
    return {
        f"{name}/config": np.asarray(json.dumps(config)),
        f"{name}/tensors": np.asarray(json.dumps(shapes)),
        f"{name}/logits": logits,
    }


if __name__ == "__main__":
    path, found = Path(__file__).with_suffix(".npz"), {"tokens": TOKENS.astype(np.int32)}
    if names := sys.argv[1:]:  # the others stay as they are
        with np.load(path) as file:
            found |= dict(file)
    for name in names or MODELS:
        found |= make(name, dict(MODELS[name]))
    np.savez_compressed(path, **found)
