"""The real files that `make data` fetches, against what other programs say of them (golden/real.json)."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from octavo.files.gguf import Gguf, tokenizer_of
from octavo.files.safetensors import SafeTensors
from octavo.pretrained.tokenizer import read_tokenizer

DATA = Path(__file__).parents[2] / ".cache" / "data"
GOLDEN = json.loads((Path(__file__).parent / "golden" / "real.json").read_text())


@pytest.fixture(scope="module")
def smollm2():
    with Gguf(DATA / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf") as file:
        yield file


@pytest.mark.data("smollm2")
def test_smollm2_has_the_values_of_the_reference(smollm2):
    assert smollm2.metadata["llama.attention.head_count_kv"] == 3
    assert len(smollm2.names()) == 272
    for name, wanted in GOLDEN["smollm2 float32"].items():
        assert hashlib.sha256(smollm2.read(name).tobytes()).hexdigest() == wanted, name


@pytest.mark.data("smollm2")
def test_smollm2_keeps_its_embedding_in_codes(smollm2):
    q = smollm2.read_quantized("token_embd.weight")
    assert (q.shape, q.qtype.name, q.scale.shape) == ((49152, 576), "int8", (49152, 18))
    rows = slice(100, 110)
    assert np.array_equal(np.asarray(q[rows].dequantize()), smollm2.read("token_embd.weight")[rows])
    assert smollm2.read_quantized("blk.0.attn_q.weight") is None


@pytest.mark.data("smollm2")
def test_smollm2_tokens_are_those_of_llama_cpp(smollm2):
    found = tokenizer_of(smollm2)
    assert (found.bos_id, found.eos_ids, found.add_bos) == (1, (2, 0), False)
    assert "<|im_start|>" in found.template
    assert len(GOLDEN["smollm2 tokens"]) >= 20
    for text, ids in GOLDEN["smollm2 tokens"].items():
        assert found.tokenizer.encode(text).ids == ids, text
        assert found.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.data("stories15m")
def test_stories15m():
    with SafeTensors(DATA / "stories15m") as file:
        assert len(file.names()) == 56
        assert file.info("model.embed_tokens.weight").shape == (32000, 288)
        # RMSNorm gains are near one to a few; random bytes would not be.
        assert 5 < file.read("model.norm.weight").mean() < 9
        assert abs(file.read("model.layers.5.mlp.down_proj.weight").mean()) < 1e-3
    tokenizer = read_tokenizer(DATA / "stories15m")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (32000, 1, (1, 2), True)
    for text, ids in GOLDEN["llama tokens"].items():
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text
