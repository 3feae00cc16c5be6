"""Small random models of many architectures have the logits of transformers: see golden/architectures.py."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.files.safetensors import write
from octavo.models import apply
from octavo.pretrained import gguf, open_model
from octavo.pretrained.huggingface import write_huggingface
from octavo.serve import KVCache, KVConfig
from tests.cases import slow_except
from tests.pretrained.golden.weights import tensor

pytestmark = pytest.mark.standard_promotion
with np.load(Path(__file__).parent / "golden" / "architectures.npz") as _file:
    GOLDEN = dict(_file)
GEMMA4 = "gemma4_text, as E2B"
NAMES = [key.removesuffix("/config") for key in GOLDEN if key.endswith("/config")]
LOGITS = jax.jit(apply, static_argnums=0)


def write_golden(name, folder, **changes):
    """The model of the golden file as a directory; `changes` are of its config.json."""
    shapes = json.loads(str(GOLDEN[f"{name}/tensors"]))
    write(folder, {key: tensor(key, tuple(shape)) for key, shape in shapes.items()})
    described = {**json.loads(str(GOLDEN[f"{name}/config"])), **changes}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def difference(source, name):
    """The largest difference of a logit."""
    logits = LOGITS(source.config, source.params(), jnp.asarray(GOLDEN["tokens"])[None])[0][0]
    return np.abs(np.asarray(logits) - GOLDEN[f"{name}/logits"]).max()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name, tmp_path):
    assert difference(open_model(write_golden(name, tmp_path)), name) < 1e-4


@pytest.mark.parametrize("name", slow_except(["deepseek_v3", "gemma3_text", "gpt_oss", "phi3"], NAMES))
def test_files_that_are_written_hold_the_same_model(name, tmp_path):
    source = open_model(write_golden(name, tmp_path))
    write_huggingface(source, {path: leaf.load() for path, leaf in source.leaves.items()}, tmp_path / "again")
    again = open_model(tmp_path / "again")
    assert again.config == source.config
    for path, leaf in source.leaves.items():
        np.testing.assert_allclose(again.leaves[path].load(), leaf.load(), rtol=0, atol=1e-6)
    if name in ("llama, rope dynamic", "mistral", "gemma2", "deepseek_v2", "deepseek_v3, one group, halves"):
        with pytest.raises(ValueError, match=r"GGUF files have no .*: write safetensors instead"):
            gguf.write_model(source, "float32", tmp_path / "m.gguf")
        return
    gguf.write_model(source, "float32", tmp_path / "m.gguf")
    assert difference(open_model(tmp_path / "m.gguf"), name) < 1e-4


CACHED = ["gemma2", "gemma3_text", GEMMA4, "gpt_oss", "gpt2"]


@pytest.mark.parametrize("name", slow_except(["gemma3_text", GEMMA4, "gpt_oss"], CACHED))
def test_a_cache_gives_the_same_logits(name, tmp_path):
    """Windows, caps, sinks and learned positions with keys and values of earlier calls."""
    source, tokens = open_model(write_golden(name, tmp_path)), jnp.asarray(GOLDEN["tokens"])[None]
    np.testing.assert_allclose(cached_logits(source, tokens), GOLDEN[f"{name}/logits"], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["model.language_model.", "language_model.model."])
def test_the_text_model_of_files_with_images_is_opened(first, tmp_path):
    """Gemma 3 and 4 as they are published; with keys and values that layers which share those of others do not read."""
    described = json.loads(str(GOLDEN[f"{GEMMA4}/config"]))
    shapes = json.loads(str(GOLDEN[f"{GEMMA4}/tensors"]))
    tensors = {name.replace("model.", first, 1): tensor(name, tuple(shape)) for name, shape in shapes.items()}
    for module in ("k_proj", "v_proj", "k_norm"):
        tensors[f"{first}layers.8.self_attn.{module}.weight"] = np.full(4, np.nan, np.float32)
    tensors |= {"model.vision_tower.patch.weight": np.ones(3, np.float32)}
    write(tmp_path, tensors)
    outer = {"model_type": "gemma4", "text_config": described, "vision_config": {}, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    with pytest.warns(
        UserWarning, match=r"'model\.vision_tower\.patch\.weight' and 0 more, are left out: only the text"
    ):
        source = open_model(tmp_path)
    assert difference(source, GEMMA4) < 1e-4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"enable_moe_block": True}, "enable_moe_block=True is not supported, only False"),
        ({"vocab_size_per_layer_input": 32}, "vocab_size_per_layer_input differs from vocab_size"),
        ({"per_layer_config": {"2": {"head_dim": 16}}}, "per_layer_config is supported for all layers with full_att"),
        (
            {"per_layer_config": {"2": {"head_dim": 16}, "5": {"head_dim": 8}, "8": {"head_dim": 16}}},
            "per_layer_config is supported with one head_dim",
        ),
        ({"num_kv_shared_layers": 7}, "kv_shared_layers=7 leaves no layer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_layers_of_gemma_4_that_are_not_supported_raise(changes, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        open_model(write_golden(GEMMA4, tmp_path, **changes))


def cached_logits(source, tokens, kv=None):
    """The logits of a text in calls of six tokens."""
    cache = KVCache.empty(source.config, kv or KVConfig(), slots=1, max_length=32)

    @jax.jit
    def run(params, tokens, cache):
        return apply(source.config, params, tokens, cache=cache)

    params, found = source.params(), []
    for start in range(0, tokens.shape[1], 6):
        logits, _, cache = run(params, tokens[:, start : start + 6], cache)
        found.append(logits[0])
    return np.concatenate(found)
