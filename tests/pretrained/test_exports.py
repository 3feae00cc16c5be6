"""Files for other programs hold the same model: what is written is opened again, and by their own formulas."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo import QArray
from octavo._tree import unflatten_paths
from octavo.cli import main
from octavo.pretrained import Request, convert_model, export_model, gguf, open_model, weight_rules
from octavo.pretrained.huggingface import write_huggingface
from octavo.pretrained.model import on_device
from tests.cases import slow_except
from tests.pretrained.conftest import SMALL, source_of
from tests.pretrained.real import real

pytestmark = pytest.mark.standard_promotion

TOKENS = jnp.asarray([[1, 5, 9, 200, 7, 3, 90, 17]])


def logits(source, params=None):
    params = source.params() if params is None else params
    return np.asarray(jax.jit(source.function())(params, TOKENS)[0])


@pytest.mark.parametrize(
    "config",
    slow_except(
        [SMALL.replace(tied_logits=False)],
        [
            SMALL,
            SMALL.replace(tied_logits=False),
            SMALL.replace(qkv_bias=True),
            SMALL.replace(qk_norm=True, rope_theta=5e5),
            SMALL.replace(rope_scaling=(8.0, 1.0, 4.0, 32.0)),
        ],
    ),
)
def test_a_float_model_goes_to_hugging_face_and_back(config, tmp_path):
    source = source_of(config)
    write_huggingface(source, {p: leaf.load() for p, leaf in source.leaves.items()}, tmp_path)
    found = open_model(tmp_path)
    assert found.config == config
    np.testing.assert_array_equal(logits(found), logits(source))


@pytest.mark.parametrize(
    ("method", "asked"),
    slow_except(
        [("gptq", "int4:g32")],
        [
            ("compressed-tensors", "int4:g32"),
            ("compressed-tensors", "int8"),
            ("compressed-tensors", "fp8"),
            ("gptq", "int4:g32"),
            ("awq", "int4:g32"),
        ],
    ),
)
def test_codes_go_to_the_layouts_of_others_and_back(small, tmp_path, method, asked):
    params, _ = convert_model(small, weight_rules(asked, small.config, head="float"))
    write_huggingface(small, params, tmp_path, method=method)
    # Tied logits are a module of transformers that would have codes otherwise.
    assert "lm_head" in str(json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    found = open_model(tmp_path)
    for path, value in params.items():
        back = found.leaves[path].load()
        if not isinstance(value, QArray):
            np.testing.assert_array_equal(back, value)
            continue
        assert isinstance(back, QArray)
        np.testing.assert_array_equal(on_device(back, "float32").dequantize(), on_device(value, "float32").dequantize())
    tree = unflatten_paths({p: on_device(x, "float32") for p, x in params.items()})
    np.testing.assert_allclose(logits(found), logits(small, tree), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "tolerance"),
    slow_except([("int4", 0.8)], [("float32", 1e-5), ("float16", 5e-3), ("int8", 0.05), ("int4", 0.8)]),
)
def test_a_model_goes_to_gguf_and_back(tmp_path, asked, tolerance):
    source = source_of(SMALL.replace(tied_logits=False))
    summary = gguf.write_model(source, asked, tmp_path / "m.gguf")
    found = open_model(tmp_path / "m.gguf")
    assert found.config == source.config
    assert summary.after <= (tmp_path / "m.gguf").stat().st_size
    assert np.abs(logits(found) - logits(source)).max() < tolerance
    with pytest.raises(ValueError, match="is not a type that is written to GGUF files"):
        gguf.write_model(source, "int3", tmp_path / "n.gguf")


@pytest.mark.slow
def test_trained_codes_are_written_to_gguf_as_they_are(tmp_path):
    from gguf import GGUFReader
    from gguf.quants import dequantize

    source = source_of(SMALL)
    rules = weight_rules("int4:mse", source.config, head="float")
    params, _ = convert_model(source, rules)
    low = type(source).from_params(source.config, params, rules=rules)
    export_model("gguf", low, tmp_path / "m.gguf", Request("trained", head="f32"))
    found = open_model(tmp_path / "m.gguf")
    for path, codes in params.items():
        if isinstance(codes, QArray):
            again = found.leaves[path].load()
            np.testing.assert_array_equal(again.unpack().qvalue, codes.unpack().qvalue)
            np.testing.assert_array_equal(again.scale, np.float16(codes.scale).astype(np.float32))
    (tensor,) = [t for t in GGUFReader(tmp_path / "m.gguf").tensors if t.name == "blk.0.ffn_down.weight"]
    ours = found.leaves["decoder/layers_0/mlp/wo/kernel"].load().dequantize()
    np.testing.assert_array_equal(dequantize(tensor.data, tensor.tensor_type), np.asarray(ours).T)
    # A model in float with the rules of its training is the same.
    trained = type(source).from_params(source.config, {p: x.load() for p, x in source.leaves.items()}, rules=rules)
    export_model("gguf", trained, tmp_path / "n.gguf", Request("trained", head="f32"))
    assert (tmp_path / "n.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    params, _ = convert_model(source, weight_rules("int4:minmax", source.config, head="float"))
    other = type(source).from_params(source.config, params, rules=rules)
    with pytest.raises(ValueError, match=r"the trained codes of 'decoder/layers_0.*symmetric int4 and int8 in groups"):
        export_model("gguf", other, tmp_path / "o.gguf", Request("trained"))


def test_the_command_writes_gguf_with_a_card(small, tmp_path, capsys):
    write_huggingface(small, {p: leaf.load() for p, leaf in small.leaves.items()}, tmp_path / "float")
    out = tmp_path / "m.gguf"
    words = ["quantize", str(tmp_path / "float"), "int4", str(out), "--format", "gguf"]
    assert main(words) == 0
    assert "blk.1.ffn_down.weight" in capsys.readouterr().out
    files = {"m.gguf", "m.gguf.README.md", "m.gguf.conversion.json", "m.gguf.report.html"}
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == files
    card = (tmp_path / "m.gguf.README.md").read_text()
    assert "octavo quantize float int4 m.gguf --format gguf" in card
    assert "| stored as Q4_0 |" in card
    assert main(words) == 2
    assert "is there already" in capsys.readouterr().err
    assert main([*words, "--force", "--quiet"]) == 0


@pytest.mark.data("stories15m", "smollm2")
def test_real_models_go_to_gguf_with_their_tokenizers(tmp_path):
    text = "Once upon a time, there was a dog named Max. He said: “Hi, 42!” naïve\n\n  ok"
    for name in ("stories15m", "smollm2"):
        source = real(name)
        gguf.write_model(source, "int8", tmp_path / f"{name}.gguf")
        found = open_model(tmp_path / f"{name}.gguf")
        assert found.config == source.config
        assert found.tokenizer.encode(text) == source.tokenizer.encode(text)
        assert found.tokenizer.decode(found.tokenizer.encode(text)) == text


def test_a_config_that_no_decoder_has_raises(small, tmp_path):
    write_huggingface(small, {p: leaf.load() for p, leaf in small.leaves.items()}, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())

    def with_(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**described, **changes}))
        return open_model(tmp_path)

    with pytest.raises(ValueError, match="model_type 'mamba' is not supported"):
        with_(model_type="mamba")
    with pytest.raises(ValueError, match="RoPE scaling 'ntk' is not supported"):
        with_(rope_scaling={"rope_type": "ntk"})
    with pytest.raises(ValueError, match="but the config makes it"):
        with_(intermediate_size=64)
