"""Hidden states and embeddings of small random encoders, by transformers and sentence-transformers: encoders.npz.

Nothing of Octavo is imported here, except for the values of weights. In the environment of make.py:

    oracle/bin/python tests/pretrained/golden/encoders.py

Made with torch 2.13.0, transformers 5.23.0 and sentence-transformers 6.2.0, in float32. For each model the file holds
`NAME/config` (its config.json), `NAME/tensors` (JSON: the shape of each tensor in its safetensors), `NAME/tokens`
(padded), `NAME/states` (the last hidden states at `positions`), and `NAME/POOLING`, the pooled states. `mask` is that
of all models. `saved/files` (JSON: texts by path) is a directory of sentence-transformers with prompts, and
`saved/PROMPT` has the embeddings of `saved/texts`.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from weights import tensor

sys.path.remove(str(Path(__file__).parent))  # whose folder peft is not the library that transformers looks for

import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedTokenizerFast

LENGTHS = [140, 37, 1]
POSITIONS = [0, 1, 2, 3, 5, 12, 36, 37, 60, 100, 127, 128, 139]
POOLINGS = ("mean", "cls", "max")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 144,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 1,
}
LOCAL = {**SIZES, "num_hidden_layers": 5, "local_attention": 16, "cls_token_id": 2, "sep_token_id": 3}
MODELS = {
    "bert": {**SIZES, "model_type": "bert", "pad_token_id": 0},
    "bert, masked LM": {**SIZES, "model_type": "bert", "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    "roberta": {**SIZES, "model_type": "roberta", "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "roberta, masked LM": {**SIZES, "model_type": "roberta", "pad_token_id": 3},
    "xlm-roberta": {**SIZES, "model_type": "xlm-roberta", "type_vocab_size": 1},
    "mpnet": {**SIZES, "model_type": "mpnet", "layer_norm_eps": 1e-5},
    "mpnet, masked LM": {**SIZES, "model_type": "mpnet", "num_attention_heads": 2, "hidden_act": "relu"},
    "distilbert": {
        "model_type": "distilbert",
        "vocab_size": 64,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 144,
    },
    "modernbert": {**LOCAL, "model_type": "modernbert"},
    "modernbert, masked LM": {
        **LOCAL,
        "model_type": "modernbert",
        "local_attention": 9,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "full", "sliding", "sliding")],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "norm_eps": 1e-3,
    },
}


def fill(file: Path) -> dict[str, tuple[int, ...]]:
    """Replace the values of a safetensors file; the shapes of its tensors."""
    with safe_open(file, "np") as found:
        shapes = {key: tuple(found.get_slice(key).get_shape()) for key in found.keys()}  # noqa: SIM118
    save_file({key: tensor(key, shape) for key, shape in shapes.items()}, file, {"format": "pt"})
    return shapes


@torch.no_grad()
def make(name: str, described: dict) -> dict[str, np.ndarray]:
    kind = AutoModelForMaskedLM if name.endswith("masked LM") else AutoModel
    model = kind.from_config(AutoConfig.for_model(**described))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        shapes = fill(Path(folder) / "model.safetensors")
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        config = json.loads((Path(folder) / "config.json").read_text())
    mask = np.arange(max(LENGTHS))[None] < np.asarray(LENGTHS)[:, None]
    tokens = np.random.default_rng(0).integers(4, 64, mask.shape)
    # A token in a text that is also the padding: positions of some models do not count it.
    tokens[0, 20] = model.config.pad_token_id
    tokens = np.where(mask, tokens, model.config.pad_token_id)
    inputs = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask.astype(np.int64))}
    states = model(**inputs, output_hidden_states=True).hidden_states[-1]
    if kind is AutoModel:
        states = model(**inputs).last_hidden_state
    elif described["model_type"] == "modernbert":
        states = model.model(**inputs).last_hidden_state
    print(f"{name}: {len(shapes)} tensors, states of standard deviation {states.std():.2f}")
    assert torch.isfinite(states).all()
    features = {"token_embeddings": states, "attention_mask": inputs["attention_mask"]}
    return {
        "mask": mask,
        f"{name}/config": np.asarray(json.dumps(config)),
        f"{name}/tensors": np.asarray(json.dumps(shapes)),
        f"{name}/tokens": tokens.astype(np.int32),
        f"{name}/states": states.numpy()[:, POSITIONS],
        **{
            f"{name}/{pooling}": Pooling(32, pooling)(dict(features))["sentence_embedding"].numpy()
            for pooling in POOLINGS
        },
    }


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each letter."""
    words = ["<s>", "<pad>", "</s>", "<unk>", ":", *"abcdefghijklmnop"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<s>", 0), ("</s>", 2)]
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def saved() -> dict[str, np.ndarray]:
    """A directory as sentence-transformers saves it, of an MPNet."""
    texts = ["a b c", "", "d e f g h i j k l m n o p a b c d e f", "q P"]
    with tempfile.TemporaryDirectory() as folder:
        base, out = Path(folder) / "base", Path(folder) / "out"
        AutoModel.from_config(AutoConfig.for_model(**MODELS["mpnet"])).save_pretrained(base)
        fill(base / "model.safetensors")
        tokenizer().save_pretrained(base)
        modules = [Transformer(str(base)), Pooling(32, "max"), Normalize()]
        prompts = {"query": "g h: ", "document": "", "other": "p "}
        model = SentenceTransformer(modules=modules, prompts=prompts, default_prompt_name="query", device="cpu")
        model.max_seq_length = 12
        model.save(str(out))
        again = SentenceTransformer(str(out), device="cpu")
        found = {f"saved/{name}": again.encode(texts, prompt_name=name) for name in prompts}
        np.testing.assert_array_equal(found["saved/query"], again.encode(texts))
        files = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*.json")}
    return {"saved/files": np.asarray(json.dumps(files)), "saved/texts": np.asarray(texts), **found}


if __name__ == "__main__":
    result = {"positions": np.asarray(POSITIONS), **saved()}
    for name, described in MODELS.items():
        result |= make(name, dict(described))
    np.savez_compressed(Path(__file__).with_suffix(".npz"), **result)
