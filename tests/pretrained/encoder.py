"""The directory of a small BERT encoder in the layout of Hugging Face."""

import json

import numpy as np
import tokenizers

from octavo.files.safetensors import write

DESCRIBED = {
    "model_type": "bert",
    "vocab_size": 13,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "hidden_act": "gelu",
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d", "e"]


def tensors(prefix="", dtype=np.float32):
    """Random ones by the names of Hugging Face, matrices as [out, in]."""
    random = np.random.default_rng(0)
    shapes = {"embeddings.LayerNorm": 64}
    for i in range(2):
        here = f"encoder.layer.{i}."
        shapes |= {f"{here}attention.self.{part}": (64, 64) for part in ("query", "key", "value")}
        shapes |= {here + "attention.output.dense": (64, 64), here + "attention.output.LayerNorm": 64}
        shapes |= {
            here + "intermediate.dense": (96, 64),
            here + "output.dense": (64, 96),
            here + "output.LayerNorm": 64,
        }
    found = {f"{name}.weight": random.normal(size=shape) * 0.2 for name, shape in shapes.items()}
    found |= {f"{name}.bias": random.normal(size=np.atleast_1d(shape)[0]) for name, shape in shapes.items()}
    for name, count in (("word", 13), ("position", 16), ("token_type", 2)):
        found[f"embeddings.{name}_embeddings.weight"] = random.normal(size=(count, 64))
    found["pooler.dense.weight"] = random.normal(size=(64, 64))  # of no use here
    return {prefix + name: x.astype(dtype) for name, x in found.items()}


def write_encoder(path):
    """Write its weights, config and tokenizer."""
    write(path / "model.safetensors", tensors())
    (path / "config.json").write_text(json.dumps(DESCRIBED))
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(path / "tokenizer.json"))
