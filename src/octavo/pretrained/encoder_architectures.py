"""The architectures of encoders in files, as data: fields of `EncoderConfig`, and names that differ from BERT's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.pretrained.names import TensorNames

_BERT = {
    "embeddings/word": "embeddings.word_embeddings",
    "embeddings/position": "embeddings.position_embeddings",
    "embeddings/type": "embeddings.token_type_embeddings",
    "embeddings/norm": "embeddings.LayerNorm",
    "relative_bias": "encoder.relative_attention_bias",
    "self_attention/query": "attention.self.query",
    "self_attention/key": "attention.self.key",
    "self_attention/value": "attention.self.value",
    "self_attention/out": "attention.output.dense",
    "self_attention_norm": "attention.output.LayerNorm",
    "mlp/wi_0": "intermediate.dense",
    "mlp/wo": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


@dataclasses.dataclass(frozen=True)
class EncoderArchitecture:
    """A family of encoders.

    Args:
      huggingface: The class of its models in Hugging Face's transformers.
      fixed: The fields of `EncoderConfig` that all of its models have.
      varied: Fields that its files describe, and those of BERT do not.
      names: Names of modules in its files that differ from BERT's.
      layer: The prefix of a layer in its files.
      keys: The keys in config.json that differ from BERT's, by BERT's.
      defaults: The values of keys that config.json may leave out, where they differ from BERT's.
    """

    huggingface: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    varied: tuple[str, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer: str = "encoder.layer.{}."
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> TensorNames:
        """The tensors of its files."""
        return TensorNames(self.layer, {**_BERT, **self.names})


ENCODERS = {
    "bert": EncoderArchitecture("BertModel"),
    "roberta": EncoderArchitecture("RobertaModel", varied=("padding_id",)),
    "xlm-roberta": EncoderArchitecture("XLMRobertaModel", varied=("padding_id",)),
    "mpnet": EncoderArchitecture(
        "MPNetModel",
        fixed={"num_types": 0, "padding_id": 1, "relative_buckets": 32},
        names={
            **{f"self_attention/{part}": f"attention.attn.{part[0]}" for part in ("query", "key", "value", "out")},
            "self_attention_norm": "attention.LayerNorm",
        },
    ),
    "distilbert": EncoderArchitecture(
        "DistilBertModel",
        fixed={"num_types": 0, "norm_eps": 1e-12},
        names={
            **{f"self_attention/{part}": f"attention.{part[0]}_lin" for part in ("query", "key", "value")},
            "self_attention/out": "attention.out_lin",
            "self_attention_norm": "sa_layer_norm",
            "mlp/wi_0": "ffn.lin1",
            "mlp/wo": "ffn.lin2",
            "mlp_norm": "output_layer_norm",
        },
        layer="transformer.layer.{}.",
        keys={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
    ),
    "modernbert": EncoderArchitecture(
        "ModernBertModel",
        fixed={"num_types": 0, "norm_place": "pre", "gated_mlp": True},
        varied=("rope_theta", "sliding_window", "attention_bias", "mlp_bias", "norm_bias"),
        names={
            "embeddings/word": "embeddings.tok_embeddings",
            "embeddings/norm": "embeddings.norm",
            **{f"self_attention/{part}": f"attn.Wqkv:{part}" for part in ("query", "key", "value")},
            "self_attention/out": "attn.Wo",
            "self_attention_norm": "attn_norm",
            "mlp/wi_0": "mlp.Wi:gate",
            "mlp/wi_1": "mlp.Wi:up",
            "mlp/wo": "mlp.Wo",
            "mlp_norm": "mlp_norm",
            "norm": "final_norm",
        },
        layer="layers.{}.",
        keys={
            "hidden_act": "hidden_activation",
            "layer_norm_eps": "norm_eps",
            "rope_theta": "global_rope_theta",
            "rope_local_base_freq": "local_rope_theta",
        },
        defaults={
            "layer_norm_eps": 1e-5,
            "rope_theta": 160_000.0,
            "rope_local_base_freq": 10_000.0,
            "max_position_embeddings": 8192,
        },
    ),
}
