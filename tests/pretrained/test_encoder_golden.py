"""Small random encoders have the hidden states of transformers, and its embeddings: see golden/encoders.py."""

import functools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.files.safetensors import write
from octavo.models.encoder import encoder_apply
from octavo.models.pooling import POOLINGS
from octavo.pretrained import Encoder, open_encoder
from octavo.pretrained.encoder_files import read_encoder
from tests.cases import slow_except
from tests.pretrained.golden.weights import tensor

with np.load(Path(__file__).parent / "golden" / "encoders.npz") as _file:
    GOLDEN = dict(_file)
NAMES = [key.removesuffix("/config") for key in GOLDEN if key.endswith("/config")]
PLAIN = [name for name in NAMES if "," not in name]
STATES = jax.jit(encoder_apply, static_argnums=0)


def write_golden(name, folder, **changes):
    """The model of the golden file as a directory; `changes` are of its config.json."""
    shapes = json.loads(str(GOLDEN[f"{name}/tensors"]))
    write(folder, {key: tensor(key, tuple(shape)) for key, shape in shapes.items()})
    described = {**json.loads(str(GOLDEN[f"{name}/config"])), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in described.items() if v is not ...}))
    return folder


@functools.cache
def opened(name):
    """The config and parameters of a golden model."""
    with tempfile.TemporaryDirectory() as folder:
        return read_encoder(write_golden(name, Path(folder)), None)


@functools.cache
def states_of(name):
    """Hidden states with another padding than that of transformers."""
    tokens = jnp.asarray(np.where(GOLDEN["mask"], GOLDEN[f"{name}/tokens"], 7))
    return np.asarray(STATES(*opened(name), tokens, jnp.asarray(GOLDEN["mask"])))


@pytest.mark.parametrize("name", NAMES)
def test_states_are_those_of_transformers(name):
    mask = GOLDEN["mask"][:, GOLDEN["positions"]]
    found, wanted = states_of(name)[:, GOLDEN["positions"]], GOLDEN[f"{name}/states"]
    assert wanted.std() > 0.2
    np.testing.assert_allclose(found[mask], wanted[mask], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_are_those_of_sentence_transformers(name):
    for pooling, pool in POOLINGS.items():
        found = np.asarray(pool(jnp.asarray(states_of(name)), jnp.asarray(GOLDEN["mask"])))
        wanted = GOLDEN[f"{name}/{pooling}"]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4, err_msg=pooling)
        cosine = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
        assert (cosine > 0.99999).all(), pooling


@pytest.mark.parametrize("name", PLAIN)
def test_quantized_encoders(name):
    check_quantized(name, "int8")


@pytest.mark.parametrize("name", slow_except(["modernbert", "mpnet"], PLAIN))
def test_encoders_quantized_by_a_recipe(name):
    check_quantized(name, "recipe:qat_int8")


def check_quantized(name, recipe):
    """All matmuls with weights have codes, and embeddings stay close."""
    config, params = opened(name)
    encoder = Encoder(config, params, max_length=16)
    low = encoder.quantize(recipe)
    for layer in low.params["encoder"].values():
        kernels = {**layer["self_attention"], **layer["mlp"]}
        assert {kernel["kernel"].qtype.name for kernel in kernels.values()} == {"int8"}
    assert low.nbytes < 0.5 * encoder.nbytes
    tokens, mask = (jnp.asarray(x[1:, :37]) for x in (GOLDEN[f"{name}/tokens"], GOLDEN["mask"]))
    cosine = np.sum(np.asarray(low.embed_tokens(tokens, mask) * encoder.embed_tokens(tokens, mask)), axis=1)
    assert (cosine > 0.998).all()
    assert (cosine < 1 - 1e-6).any()


@pytest.fixture
def saved(tmp_path):
    """The directory that sentence-transformers saved."""
    for path, text in json.loads(str(GOLDEN["saved/files"])).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    shapes = json.loads(str(GOLDEN["mpnet/tensors"]))
    write(tmp_path, {key: tensor(key, tuple(shape)) for key, shape in shapes.items()})
    return tmp_path


def test_a_saved_directory_embeds_as_in_sentence_transformers(saved):
    encoder = open_encoder(saved)
    assert (encoder.pooling, encoder.max_length, encoder.normalized) == ("max", 12, True)
    texts = GOLDEN["saved/texts"].tolist()
    for prompt in ("query", "document", "other"):
        found = encoder.embed(texts, prompt_name=prompt)
        np.testing.assert_allclose(found, GOLDEN[f"saved/{prompt}"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(encoder.embed(texts), GOLDEN["saved/query"], rtol=0, atol=1e-5)
    assert np.abs(GOLDEN["saved/query"] - GOLDEN["saved/document"]).max() > 0.1


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        (
            "mpnet",
            {"relative_attention_num_buckets": 64},
            "relative_attention_num_buckets=64 is not supported, only 32",
        ),
        ("mpnet", {"max_position_embeddings": 512}, "says max_position_embeddings=512, but there are 144"),
        ("distilbert", {"dim": 64}, "says dim=64, but by its tensors it is 32"),
        ("modernbert", {"num_hidden_layers": 6}, "says num_hidden_layers=6, but by its tensors it is 5"),
        ("modernbert", {"layer_types": ["chunked"] * 5}, "layer_types 'chunked' is not supported"),
        ("modernbert", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling=.* is not supported"),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
            "scaled or partial RoPE is not supported in encoders",
        ),
        ("modernbert", {"attention_bias": True}, "attn.Wqkv.bias"),
        ("modernbert, masked LM", {"norm_bias": False}, "embeddings.norm.bias, .*no place in the model"),
        ("roberta", {"is_decoder": True}, "is_decoder=True is not supported, only False"),
        ("roberta", {"model_type": "mpnet"}, "token_type_embeddings.weight, .*no place in the model"),
    ],
)
def test_what_config_json_says_is_checked(name, changes, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        open_encoder(write_golden(name, tmp_path, **changes))


def test_modernbert_of_older_files(tmp_path):
    """Before `layer_types` and `rope_parameters`, with keys that have no effect."""
    old = {"layer_types": ..., "rope_parameters": ..., "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    inert = {"position_embedding_type": "absolute", "reference_compile": True, "repad_logits_with_grad": False}
    folder = write_golden("modernbert", tmp_path, **old, **inert, layer_norm_eps=1e-5, global_attn_every_n_layers=3)
    assert read_encoder(folder, None)[0] == opened("modernbert")[0]
    write_golden("modernbert", tmp_path, **old, global_attn_every_n_layers=2)
    assert read_encoder(folder, None)[0].sliding_layers == (False, True, False, True, False)
