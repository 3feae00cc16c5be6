"""Metadata and tensors that change what a model computes are used, or raise by name."""

import json
import time

import numpy as np
import pytest

from octavo.cli import main
from octavo.files.gguf import Gguf, write_gguf
from octavo.files.safetensors import SafeTensors, write
from octavo.models import RopeScaling
from octavo.pretrained import convert_model, gguf, native, open_model, weight_rules
from octavo.pretrained.huggingface import write_huggingface
from tests.pretrained.conftest import SMALL, source_of


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    gguf.write_model(source_of(SMALL.replace(num_layers=1)), "float32", path)
    return path


@pytest.fixture
def with_metadata(gguf_path, tmp_path):
    """Opens the GGUF file with other metadata and tensors."""
    with Gguf(gguf_path) as file:
        metadata = file.typed_metadata()
        tensors = {name: file.read(name) for name in file.names()}

    def opened(changes, more=()):
        path = tmp_path / "changed.gguf"
        write_gguf(
            path, {**metadata, **{f"llama.{key}": value for key, value in changes.items()}}, {**tensors, **dict(more)}
        )
        return open_model(path)

    return opened


@pytest.fixture
def with_config(tmp_path):
    """Opens the Hugging Face directory with another config.json and further tensors."""
    source = source_of(SMALL.replace(num_layers=1))
    write_huggingface(source, {path: leaf.load() for path, leaf in source.leaves.items()}, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    with SafeTensors(tmp_path) as file:
        tensors = {name: file.read(name) for name in file.names()}

    def opened(more=(), **changes):
        (tmp_path / "config.json").write_text(json.dumps({**described, **changes}))
        write(tmp_path, {**tensors, **dict(more)})
        return open_model(tmp_path)

    opened.path = tmp_path
    return opened


def test_rope_scaling_of_gguf_files_is_used(with_metadata):
    linear = with_metadata({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}).config.rope
    assert linear == RopeScaling(kind="linear", factor=4.0)
    assert with_metadata({"rope.scale_linear": 2.0}).config.rope == RopeScaling(kind="linear", factor=2.0)
    yarn = with_metadata({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}).config.rope
    assert (yarn.kind, yarn.length) == ("yarn", 64)
    assert with_metadata({"rope.scaling.type": "none"}).config.rope is None
    with pytest.raises(ValueError, match=r"rope.scaling.type 'ntk' is not supported; known: none, linear, yarn"):
        with_metadata({"rope.scaling.type": "ntk"})


def test_rope_freqs_of_gguf_files_are_used(with_metadata):
    assert with_metadata({}, {"rope_freqs.weight": np.ones(8, np.float32)}.items()).config.rope is None
    table = np.arange(1, 9, dtype=np.float32)
    found = with_metadata({}, {"rope_freqs.weight": table}.items()).config.rope
    np.testing.assert_allclose(found.multipliers(1e4, 16, 64), 1 / table)
    with pytest.raises(ValueError, match=r"rope_freqs.weight is not a table of 8 positive numbers"):
        with_metadata({}, {"rope_freqs.weight": np.ones(4, np.float32)}.items())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attention.temperature_scale": 0.1}, r"llama.attention.temperature_scale=.*does not know"),
        ({"logit_scale": 0.5}, r"llama.logit_scale=0.5 is not supported"),
        ({"block_count": 4_000_000_000}, r"block_count is an integer"),
        ({"block_count": 2_000_000_000}, r"block_count is 2000000000, but the file has the tensors of 1 layers"),
        ({"attention.head_count": 0}, r"attention.head_count is an integer from 1"),
        ({"attention.head_count": "four"}, r"attention.head_count is an integer from 1 .*'four'"),
        ({"embedding_length": 10**9}, r"has the shape .*, but the config makes it"),
    ],
)
def test_metadata_that_gguf_readers_would_ignore_raises(with_metadata, changes, text):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=text):
        with_metadata(changes)
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000, but the file has the tensors of 1 layers"),
        ({"num_attention_heads": 0}, r"num_attention_heads is an integer from 1 to 2\*\*31, got 0"),
        ({"hidden_size": "64"}, r"hidden_size is an integer .*got '64'"),
        ({"vocab_size": [1]}, r"vocab_size is an integer .*got \[1\]"),
        ({"rope_scaling": 7}, r"rope_scaling and rope_parameters are objects"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, r"factor is a number, got 'x'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 3}}, r"'beta' of RoPE scaling 'linear'"),
        ({"model_type": 3}, r"model_type 3 is not supported"),
        ({"model_type": "falcon"}, r"model_type 'falcon' is not supported: Known: deepseek_v2, deepseek_v3, gemma2"),
        ({"logits_scaling": 8.0}, r"logits_scaling=8.0 is not supported"),
        ({"tie_word_embeddings": False}, r"tie_word_embeddings is false, but there is no tensor 'lm_head.weight'"),
        ({"intermediate_size": 10**12}, r"intermediate_size is an integer"),
        ({"layer_types": ["linear_attention"], "model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True},
         r"layer_types 'linear_attention' is not supported"),
    ],
)  # fmt: skip
def test_sizes_and_types_of_a_config_are_checked_first(with_config, changes, text):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=text):
        with_config(**changes)
    assert time.perf_counter() - start < 60


def test_a_config_key_that_is_unknown_warns(with_config):
    with pytest.warns(UserWarning, match=r"config.json: new_trick are not known here"):
        with_config(new_trick=2.0)


def test_a_config_that_is_no_json_is_an_error_of_the_command(with_config, capsys):
    with_config()
    (with_config.path / "config.json").write_text("{")
    assert main(["generate", str(with_config.path), "--prompt", "x"]) == 2
    assert "config.json is not JSON" in capsys.readouterr().err


def test_tensors_without_a_place_raise(with_config, with_metadata):
    norm = {"model.layers.1.input_layernorm.weight": np.ones(64, np.float32)}
    with pytest.raises(ValueError, match=r"num_hidden_layers is 1, but the file has the tensors of 2 layers"):
        with_config(norm.items())
    with pytest.raises(ValueError, match=r"has the tensors score.weight, which have no place in the model"):
        with_config({"score.weight": np.ones((2, 64), np.float32)}.items())
    with pytest.raises(ValueError, match=r"has the tensors blk.0.extra.weight, which have no place"):
        with_metadata({}, {"blk.0.extra.weight": np.ones(64, np.float32)}.items())


def test_weights_that_are_not_finite_warn(with_config):
    weight = np.ones((64, 64), np.float32)
    weight[0, :2] = np.nan, np.inf
    source = with_config({"model.layers.0.self_attn.q_proj.weight": weight}.items())
    with pytest.warns(UserWarning, match=r"self_attention/query/kernel has 2 values that are not finite"):
        source.params()


def test_a_full_disk_is_one_line_and_leaves_nothing(with_config, tmp_path, capsys, monkeypatch):
    with_config()
    out = tmp_path / "out"

    def on_a_full_disk(source, params, directory, **kwargs):
        (directory / "params").mkdir(parents=True)
        (directory / "params" / "half").write_bytes(b"0")
        raise RuntimeError("NOT_FOUND: No space left on device\nin the storage library")  # not an OSError there

    monkeypatch.setattr(native, "write_model", on_a_full_disk)
    assert main(["quantize", str(with_config.path), "int8", str(out), "--quiet"]) == 2
    found = capsys.readouterr().err
    assert found == f"octavo quantize: {out} could not be written: NOT_FOUND: No space left on device\n"
    assert not out.exists()


@pytest.mark.slow
def test_fp4_exports_are_in_bfloat16(tmp_path):
    """Other programs dequantize these weights to bfloat16, and cannot multiply them with float32."""
    source = source_of(SMALL.replace(num_layers=1))
    params, _ = convert_model(source, weight_rules("nvfp4", source.config, head="float"))
    write_huggingface(source, params, tmp_path, method="compressed-tensors")
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with SafeTensors(tmp_path) as file:
        kinds = {name.rpartition(".")[2]: file.info(name).dtype.name for name in file.names()}
    assert (kinds["weight"], kinds["weight_global_scale"]) == ("bfloat16", "float32")
