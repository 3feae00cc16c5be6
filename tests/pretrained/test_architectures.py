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


@pytest.mark.parametrize("name", slow_except(["gemma3_text", "gpt_oss"], ["gemma2", "gemma3_text", "gpt_oss", "gpt2"]))
def test_a_cache_gives_the_same_logits(name, tmp_path):
    """Windows, caps, sinks and learned positions with keys and values of earlier calls."""
    source, tokens = open_model(write_golden(name, tmp_path)), jnp.asarray(GOLDEN["tokens"])[None]
    np.testing.assert_allclose(cached_logits(source, tokens), GOLDEN[f"{name}/logits"], rtol=0, atol=1e-4)


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
