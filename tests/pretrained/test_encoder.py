"""Encoders from directories: what is read of them, and what is refused."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers

import octavo
from octavo.files.safetensors import write
from octavo.models.encoder import EncoderConfig, abstract_encoder_params, encoder_apply
from octavo.models.pooling import mean_pool, normalize
from octavo.pretrained.encoder import Encoder, _batches, is_encoder, open_encoder
from tests.arrays import random_params
from tests.pretrained.encoder import DESCRIBED, tensors, write_encoder

SMALL = EncoderConfig(vocab_size=13, emb_dim=64, num_layers=2, num_heads=4, mlp_dim=96, max_length=16)


@pytest.fixture
def folder(tmp_path):
    write_encoder(tmp_path)
    return tmp_path


def describe(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**DESCRIBED, **changes}))


def test_a_directory_is_read(folder):
    encoder = open_encoder(folder)
    assert encoder.config == SMALL
    assert (encoder.pooling, encoder.max_length) == ("mean", 16)
    kernel = encoder.params["encoder"]["layers_1"]["mlp"]["wi_0"]["kernel"]
    np.testing.assert_array_equal(kernel, tensors()["encoder.layer.1.intermediate.dense.weight"].T)
    assert encoder.nbytes == 4 * sum(x.size for name, x in tensors().items() if not name.startswith("pooler"))
    found = encoder.embed(["a b c", "", "e d nothing a"])
    ids, mask = jnp.asarray([[2, 4, 5, 6, 3, 0], [2, 3, 0, 0, 0, 0], [2, 8, 7, 1, 4, 3]]), np.zeros((3, 6), bool)
    mask[0, :5] = mask[1, :2] = mask[2] = True
    embed = jax.jit(lambda params, mask: normalize(mean_pool(encoder_apply(SMALL, params, ids, mask), mask)))
    np.testing.assert_allclose(found, embed(encoder.params, jnp.asarray(mask)), rtol=0, atol=1e-5)


def test_texts_are_cut(folder):
    long = " ".join("abcde" * 10)
    assert len(open_encoder(folder).tokenizer.encode(long).ids) == 16
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    encoder = open_encoder(folder)
    assert encoder.max_length == len(encoder.tokenizer.encode(long).ids) == 8
    assert len(open_encoder(folder, max_length=5).tokenizer.encode(long).ids) == 5
    with pytest.raises(ValueError, match="max_length is 1 to 16, the model's own; got 17"):
        open_encoder(folder, max_length=17)


def pooling(folder, **changes):
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(changes))


def test_pooling_is_that_of_the_file(folder):
    pooling(folder, pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    assert open_encoder(folder).pooling == "cls"
    pooling(folder, pooling_mode="max", include_prompt=True, embedding_dimension=64)
    assert open_encoder(folder).pooling == "max"
    pooling(folder, pooling_mode_mean_tokens=False)
    assert open_encoder(folder).pooling == "mean"  # as sentence-transformers does


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pooling_mode": ["mean", "max"]}, "asks for mean, max; Octavo has one of mean, cls, max"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, "asks for max, cls; Octavo has one of"),
        ({"pooling_mode_lasttoken": True}, "asks for pooling_mode_lasttoken; Octavo has one of mean, cls, max"),
        ({"pooling_mode": "mean", "include_prompt": False}, "include_prompt=False is not supported with prompts"),
    ],
)
def test_poolings_that_are_not_supported(folder, changes, text):
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "a "}}')
    pooling(folder, **changes)
    with pytest.raises(ValueError, match=text):
        open_encoder(folder)


def modules(folder, *kinds):
    found = [{"idx": i, "path": "" if i == 0 else f"{i}_{kind}", "type": f"a.b.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(found))


def test_embeddings_are_normalized_where_modules_say_so(folder):
    pooling(folder, pooling_mode="max")
    modules(folder, "Transformer", "Pooling", "Normalize")
    encoder = open_encoder(folder)
    assert (encoder.pooling, encoder.normalized) == ("max", True)
    modules(folder, "Transformer", "Pooling")
    plain = open_encoder(folder)
    assert not plain.normalized
    assert open_encoder(folder, normalized=True).normalized
    vectors = jnp.asarray(plain.embed(["a b"]))
    np.testing.assert_allclose(normalize(vectors), encoder.embed(["a b"]), rtol=0, atol=1e-6)
    assert np.linalg.norm(vectors) > 2


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (("Transformer", "Pooling", "Dense", "Normalize"), "has the modules Dense: only Transformer, Pooling, Normal"),
        (("Transformer", "WeightedLayerPooling", "Pooling"), "has the modules WeightedLayerPooling: only"),
        (("Transformer",), "has the modules Transformer: only Transformer, Pooling, Normalize are supported"),
    ],
)
def test_modules_that_are_not_supported(folder, kinds, text):
    modules(folder, *kinds)
    with pytest.raises(ValueError, match=text):
        open_encoder(folder)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("sentence_bert_config.json", {"transformer_task": "text-generation"}, "transformer_task='text-generation' is"),
        ("sentence_bert_config.json", {"query_length": 32}, "query_length=32 is not supported, only None"),
        ("sentence_bert_config.json", {"max_seq_length": "a"}, "max_seq_length is an integer"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "model_type='SparseEncoder' is not"),
        ("modules.json", {"idx": 0}, "modules.json is not a list of modules with a type and a path"),
    ],
)
def test_settings_that_are_not_supported(folder, name, changes, text):
    (folder / name).write_text(json.dumps(changes))
    with pytest.raises(ValueError, match=text):
        open_encoder(folder)


def test_unknown_keys_are_named(folder):
    describe(folder, attention_temperature=2.0)
    with pytest.warns(UserWarning, match=r"config.json: attention_temperature are not known here, and have no effect"):
        open_encoder(folder)


def test_prompts(folder):
    prompts = {"query": "a b ", "document": ""}
    settings = folder / "config_sentence_transformers.json"
    settings.write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))
    encoder = open_encoder(folder)
    np.testing.assert_array_equal(encoder.embed(["c"], prompt_name="query"), encoder.embed(["a b c"]))
    np.testing.assert_array_equal(encoder.embed(["c"], prompt_name="document"), encoder.embed(["c"]))
    with pytest.raises(ValueError, match=r"unknown prompt 'passage': Known: document, query"):
        encoder.embed(["c"], prompt_name="passage")
    settings.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "query"}))
    np.testing.assert_array_equal(open_encoder(folder).embed(["c"]), encoder.embed(["a b c"]))


def test_an_encoder_in_a_folder_of_its_own(folder, tmp_path):
    (outer := tmp_path / "outer" / "0_Transformer").mkdir(parents=True)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        (folder / file).rename(outer / file)
    (outer / "sentence_roberta_config.json").write_text('{"max_seq_length": 9, "do_lower_case": true}')
    found = [{"path": f"{i}_{kind}", "type": kind} for i, kind in enumerate(("Transformer", "Pooling"))]
    (outer.parent / "modules.json").write_text(json.dumps(found))
    encoder = open_encoder(outer.parent)
    assert encoder.max_length == 9
    assert encoder.tokenizer.encode("A B").ids == [2, 4, 5, 3]
    assert is_encoder(outer.parent)
    assert not is_encoder(tmp_path)


def test_tensors_without_a_place_are_named(folder):
    write(folder / "model.safetensors", {**tensors(), "encoder.layer.0.attention.gate": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"has the tensors encoder.layer.0.attention.gate, which have no place in the"):
        open_encoder(folder)
    write(folder / "model.safetensors", {**tensors(), "embeddings.LayerNorm.bias": np.ones(3, np.float32)})
    with pytest.raises(
        ValueError, match=r"'embeddings.LayerNorm.bias' makes 'embeddings/norm/bias' of the shape \(3,\)"
    ):
        open_encoder(folder)


def test_without_a_description(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config.json with the number of heads: pass num_heads="):
        open_encoder(folder)
    assert open_encoder(folder, num_heads=4).config == SMALL


def test_part_of_a_larger_model_and_in_half_precision(folder):
    write(folder / "model.safetensors", tensors("bert.", ml_dtypes.bfloat16))
    encoder = open_encoder(folder)
    assert encoder.config == SMALL.replace(weight_dtype="bfloat16")
    assert np.isfinite(encoder.embed(["a b"])).all()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"model_type": "rembert"},
            "model_type 'rembert' is not a supported encoder: .*Known: bert, distilbert, modernb",
        ),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type='relative_key' is not supported, only 'absolute'",
        ),
        ({"hidden_act": "gelux"}, "hidden_act 'gelux': .*gelu"),
        ({"hidden_size": 32}, "says hidden_size=32, but by its tensors it is 64"),
        ({"num_attention_heads": 5}, "num_heads=5 does not divide emb_dim=64"),
    ],
)
def test_descriptions_that_do_not_fit(folder, changes, text):
    describe(folder, **changes)
    with pytest.raises(ValueError, match=text):
        open_encoder(folder)


def test_files_that_are_none(folder):
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config.json is not a JSON object but a list"):
        open_encoder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        open_encoder(folder)
    describe(folder)
    write(folder / "model.safetensors", {"weight": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"no tensor 'embeddings.word_embeddings.weight': it is not a BertModel"):
        open_encoder(folder)
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        open_encoder(folder / "missing")


def test_tokenizers_that_do_not_fit(folder):
    model = tokenizers.models.WordLevel({str(i): i for i in range(14)}, unk_token="0")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json has 14 tokens, but the model 13"):
        open_encoder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*tokenizer.json, which tokenizes texts"):
        open_encoder(folder)


@pytest.fixture(scope="module")
def random():
    return Encoder(SMALL, random_params(abstract_encoder_params(SMALL)), max_length=16)


def test_embed_raises(random, folder):
    with pytest.raises(ValueError, match="has no tokenizer: give ids to embed_tokens"):
        random.embed(["a"])
    encoder = open_encoder(folder)
    with pytest.raises(TypeError, match=r"write embed\(\[text\]\)"):
        encoder.embed("a")
    with pytest.raises(ValueError, match="batch_size is at least 1, got 0"):
        encoder.embed(["a"], batch_size=0)
    assert encoder.embed([]).shape == (0, 64)
    with pytest.raises(ValueError, match=r"unknown pooling 'men': .*mean"):
        Encoder(SMALL, {}, pooling="men", max_length=16)


def test_quantized_parameters(random):
    low = random.quantize("int4", words="int4")
    kernel, table = (
        low.params["encoder"]["layers_0"]["mlp"]["wi_0"]["kernel"],
        low.params["embeddings"]["word"]["embedding"],
    )
    assert (kernel.qvalue.shape, kernel.scale.shape) == ((32, 96), (2, 96))  # two codes in a byte, groups of 32
    assert (table.qvalue.shape, table.scale.shape) == ((13, 32), (13, 1))
    assert low.rules == (*low.rules[:1], octavo.QuantizationRule(weight_qtype="int4", tile_size=32, scope="weights"))
    kept = random.quantize("int8", words=None).params["embeddings"]["word"]["embedding"]
    assert kept is random.params["embeddings"]["word"]["embedding"]
    with pytest.raises(ValueError, match="this encoder is quantized already"):
        low.quantize("int8")
    with pytest.raises(ValueError, match=r"'int9' is not a number format: .*int"):
        random.quantize("int9")


@pytest.mark.slow
def test_quantized_embeddings(random):
    ids, mask = jnp.asarray([[3, 4, 5], [6, 0, 0]]), jnp.asarray([[True, True, True], [True, False, False]])
    rule = octavo.QuantizationRule(module_path=".*/mlp/.*", weight_qtype="int8", scope="weights")
    whole, part = random.embed_tokens(ids, mask), random.quantize(rule, words=None)
    assert part.params["encoder"]["layers_0"]["self_attention"]["out"]["kernel"].dtype == jnp.float32
    error = float(jnp.abs(part.embed_tokens(ids, mask) - whole).max())
    both = random.quantize([rule.replace(module_path=".*")], activations="int8")
    assert both.rules[0].act_qtype == "int8"
    assert 0 < error < float(jnp.abs(both.embed_tokens(ids, mask) - whole).max()) < 0.05


def test_long_texts_are_fewer_in_a_batch():
    lengths = [3, 4096, 500, 513, 700, 2, 512]
    found = _batches(lengths, 4)
    assert sorted(i for batch in found for i in batch) == list(range(7))
    assert [[lengths[i] for i in batch] for batch in found] == [[4096], [700, 513], [512, 500, 3, 2]]
    assert _batches([], 4) == []


def test_texts_longer_than_a_block_of_attention():
    """In low precision too, and with neighbours of another length."""
    config = SMALL.replace(max_length=1200, rope_theta=1e4, sliding_window=40, sliding_layers=(False, True))
    encoder = Encoder(config, random_params(abstract_encoder_params(config)), max_length=1200)
    tokens = np.random.default_rng(0).integers(0, 13, (2, 600))
    mask = np.arange(600)[None] < np.asarray([600, 30])[:, None]
    whole, short = encoder.embed_tokens(tokens, mask), encoder.embed_tokens(tokens[1:, :30], mask[1:, :30])
    np.testing.assert_allclose(whole[1], short[0], rtol=0, atol=1e-5)
    low = encoder.quantize("int8", activations="int8").embed_tokens(tokens, mask)
    assert (np.sum(np.asarray(low * whole), axis=1) > 0.99).all()
