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
from octavo.models.bert import BertConfig, abstract_bert_params, bert_apply, mean_pool, normalize
from octavo.pretrained.bert import Encoder, open_encoder
from tests.arrays import random_params
from tests.pretrained.encoder import DESCRIBED, tensors, write_encoder

SMALL = BertConfig(vocab_size=13, emb_dim=64, num_layers=2, num_heads=4, mlp_dim=96, max_length=16)


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
    kernel = encoder.params["encoder"]["layers_1"]["mlp"]["wi"]["kernel"]
    np.testing.assert_array_equal(kernel, tensors()["encoder.layer.1.intermediate.dense.weight"].T)
    assert encoder.nbytes == 4 * sum(x.size for name, x in tensors().items() if not name.startswith("pooler"))
    found = encoder.embed(["a b c", "", "e d nothing a"])
    ids, mask = jnp.asarray([[2, 4, 5, 6, 3, 0], [2, 3, 0, 0, 0, 0], [2, 8, 7, 1, 4, 3]]), np.zeros((3, 6), bool)
    mask[0, :5] = mask[1, :2] = mask[2] = True
    embed = jax.jit(lambda params, mask: normalize(mean_pool(bert_apply(SMALL, params, ids, mask), mask)))
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


def test_the_first_token_may_stand_for_a_text(folder):
    (folder / "1_Pooling").mkdir()
    place = folder / "1_Pooling" / "config.json"
    place.write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')
    assert open_encoder(folder).pooling == "cls"
    place.write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ValueError, match="asks for pooling_mode_max_tokens; Octavo has mean, cls"):
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
        ({"model_type": "roberta"}, "model_type 'roberta' is not a supported encoder"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not supported"),
        ({"hidden_act": "gelux"}, "unknown hidden_act 'gelux': .*gelu"),
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
    with pytest.raises(ValueError, match=r"no tensor 'embeddings.word_embeddings.weight': it is not a BERT model"):
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
    return Encoder(SMALL, random_params(abstract_bert_params(SMALL)), max_length=16)


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
        low.params["encoder"]["layers_0"]["mlp"]["wi"]["kernel"],
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
