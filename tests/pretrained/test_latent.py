"""DeepSeek's files and caches, beyond the logits of test_architectures.py."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.files import FileError
from octavo.files.gguf import Gguf, write_gguf
from octavo.files.safetensors import SafeTensors, write
from octavo.models import abstract_params, apply
from octavo.pretrained import gguf, open_model
from octavo.serve import Engine, KVCache, KVConfig, SamplingParams
from tests.arrays import random_params
from tests.pretrained.test_architectures import GOLDEN, cached_logits, difference, write_golden

pytestmark = pytest.mark.standard_promotion
NAME = "deepseek_v3"
TOKENS = jnp.asarray(GOLDEN["tokens"])[None]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_model(write_golden(NAME, tmp_path_factory.mktemp("v3")))


@pytest.mark.parametrize("latent", [False, True])
def test_a_cache_of_keys_and_values_or_of_latents_gives_the_same_logits(source, latent):
    found = cached_logits(source, TOKENS, KVConfig(latent=latent))
    np.testing.assert_allclose(found, GOLDEN[f"{NAME}/logits"], rtol=0, atol=1e-4)


def test_latents_take_a_fraction_of_keys_and_values_also_when_quantized(source):
    per_token = lambda kv: KVCache.empty(source.config, kv, slots=1, max_length=8).bytes_per_token / 3  # noqa: E731
    config, heads = source.config, source.config.num_kv_heads
    assert per_token(KVConfig()) == 4 * heads * (config.head_dim + config.v_head_dim)
    assert per_token(KVConfig(latent=True)) == 4 * (config.kv_lora_rank + config.rotary_dim)
    assert per_token(KVConfig.of("int8", latent=True)) == config.kv_lora_rank + config.rotary_dim + 4
    found = cached_logits(source, TOKENS, KVConfig.of("int8", latent=True))
    assert np.abs(found - GOLDEN[f"{NAME}/logits"]).mean() < 0.03


@pytest.fixture(scope="module")
def small(source):
    """A dense model of one layer, and its parameters."""
    dense = {"num_experts": 1, "experts_per_token": 1, "shared_experts": 0, "first_dense_layers": 0}
    dense |= {"router_bias": False, "router_groups": 1, "router_top_groups": 1}
    config = source.config.replace(num_layers=1, **dense)
    return config, random_params(abstract_params(config))


def test_latents_of_long_texts_are_read_in_blocks(small):
    """Of a text in one of two slots, in a cache of more than one block."""
    config, params = small
    run = jax.jit(lambda params, tokens, cache: apply(config, params, tokens, cache=cache))
    long, found = jnp.tile(TOKENS, (1, 22)), []
    for kv in (KVConfig(), KVConfig(latent=True)):
        cache = KVCache.empty(config, kv, slots=2, max_length=1024)
        _, _, cache = run(params, long, cache.at([1]))
        logits, _, cache = run(params, TOKENS[:, :2].reshape(2, 1), cache.at())
        assert cache.lengths.tolist() == [1, 529]
        found.append(logits)
    np.testing.assert_allclose(*found, rtol=0, atol=1e-4)


def test_the_engine_generates_the_same_with_latents(small):
    tokens = []
    for kv in (KVConfig(), KVConfig(latent=True)):
        engine = Engine(*small, slots=2, max_length=32, chunk=8, kv=kv)
        events = engine.generate([[3, 14, 15], [9, 2]], SamplingParams(temperature=0, max_tokens=6))
        tokens.append(sorted((event.request_id, i, event.token) for i, event in enumerate(events)))
    assert tokens[0] == tokens[1]


def test_latents_need_such_a_model_one_format_and_float_activations(source):
    plain = source.config.replace(kv_lora_rank=0, q_lora_rank=0, v_head_dim=0)
    with pytest.raises(ValueError, match="latent=True is for models with latent attention"):
        KVCache.empty(plain, KVConfig(latent=True), slots=1, max_length=8)
    with pytest.raises(ValueError, match="latent=True stores one tensor for keys and values"):
        KVConfig(keys="int8", latent=True)
    rules = octavo.recipe("int8")
    with pytest.raises(ValueError, match="latent=True multiplies queries by weights whose inputs the rules quantize"):
        Engine(source.config, source.params(), rules=rules, max_length=16, chunk=8, kv=KVConfig(latent=True))


def test_gguf_files_with_split_tensors_are_read(source, tmp_path):
    """Files of 2025 and later have keys and values of W_kvb as tensors of their own."""
    gguf.write_model(source, "float32", tmp_path / "joined.gguf")
    file, config = Gguf(tmp_path / "joined.gguf"), source.config
    tensors, metadata = {name: file.read(name) for name in file.names()}, dict(file.metadata)
    plain = config.head_dim - config.rotary_dim
    for i in range(config.num_layers):
        both = tensors.pop(f"blk.{i}.attn_kv_b.weight").reshape(config.num_kv_heads, -1, config.kv_lora_rank)
        tensors[f"blk.{i}.attn_k_b.weight"] = np.ascontiguousarray(both[:, :plain].swapaxes(1, 2))
        tensors[f"blk.{i}.attn_v_b.weight"] = np.ascontiguousarray(both[:, plain:])
    widths = {"key": config.kv_lora_rank + config.rotary_dim, "value": config.kv_lora_rank}
    widths |= {"key_mla": config.head_dim, "value_mla": config.v_head_dim}
    for name, width in widths.items():
        part, _, ending = name.partition("_")
        metadata["_".join(filter(None, (f"deepseek2.attention.{part}_length", ending)))] = width
    write_gguf(tmp_path / "split.gguf", metadata | {"deepseek2.attention.head_count_kv": 1}, tensors)
    found = open_model(tmp_path / "split.gguf")
    assert found.config == config
    assert difference(found, NAME) < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "has no 'kv_lora_rank'"),
        ({"routed_scaling_factor": None}, "has no 'routed_scaling_factor'"),
        ({"n_group": None}, "has no 'n_group'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, but other keys make it 4"),
        ({"qk_nope_head_dim": 16}, "qk_head_dim is 20, but other keys make it 24"),
        ({"v_head_dim": 12}, r"out/kernel' has the shape \(40, 32\), but the config makes it \(48, 32\)"),
        ({"q_lora_rank": None}, r"q_a_layernorm.weight.*have no place"),
        ({"n_group": 3}, "num_experts=8 are 3 equal groups"),
        ({"num_experts_per_tok": 5}, "groups of 2 experts, router_top_groups=2 of them, are too small"),
        ({"topk_method": "greedy"}, "topk_method='greedy' with scoring_func='sigmoid' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ({"first_k_dense_replace": 2}, "have no place|differ in shape|'model.layers.1"),
    ],
)
def test_keys_that_are_missing_or_contradict_tensors_raise(changes, message, tmp_path):
    with pytest.raises((ValueError, FileError), match=message):
        open_model(write_golden(NAME, tmp_path, **changes))


def test_normalized_softmax_scores_raise(tmp_path):
    with pytest.raises(ValueError, match="norm_topk_prob=True of softmax scores is not supported"):
        open_model(write_golden("deepseek_v2", tmp_path, norm_topk_prob=True))


def test_layers_of_multi_token_prediction_are_left_out_by_name(tmp_path):
    folder = write_golden(NAME, tmp_path)
    file = SafeTensors(folder)
    tensors = {name: file.read(name) for name in file.names()}
    extra = {re.sub(r"layers.2", "layers.3", name): x for name, x in tensors.items() if ".layers.2." in name}
    extra["model.layers.3.eh_proj.weight"] = np.zeros((32, 64), np.float32)
    write(folder, tensors | extra)
    with pytest.warns(UserWarning, match="multi-token prediction, 'model.layers.3.eh_proj.weight' and"):
        found = open_model(folder)
    assert found.config.num_layers == 3
    assert difference(found, NAME) < 1e-4
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match="num_hidden_layers is 3, but the file has the tensors of 4 layers"):
        open_model(folder)
