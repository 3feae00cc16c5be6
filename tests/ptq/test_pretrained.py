"""The command: `octavo quantize MODEL int4:gptq OUT --data text`."""

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.cli import main
from octavo.files.gguf import write_imatrix
from octavo.pretrained import (
    CalibrationData,
    PretrainedModel,
    Request,
    convert_model,
    export_model,
    open_model,
    weight_rules,
)
from octavo.pretrained.calibrated import calibrated_codes
from octavo.pretrained.native import write_model
from octavo.pretrained.rounding import check_rounding
from octavo.qarray import QArray
from octavo.serve import Engine, SamplingParams
from octavo.serve.evaluate import evaluate
from tests.pretrained.conftest import SMALL, source_of
from tests.pretrained.real import real

pytestmark = pytest.mark.standard_promotion
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model and a text."""
    path = tmp_path_factory.mktemp("ptq")
    source = source_of()
    write_model(source, {name: leaf.load() for name, leaf in source.leaves.items()}, path / "float", facts={})
    (path / "text.txt").write_text(TEXT)
    return path


@pytest.mark.slow
def test_the_command_calibrates(folder, capsys, monkeypatch):
    words = ["quantize", str(folder / "float"), "int4:gptq", str(folder / "low"), "--data", str(folder / "text.txt")]
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stderr, "isatty", lambda: True)
        assert main([*words, "--data-tokens", "1024"]) == 0
    out, shown = capsys.readouterr()
    assert "calibrating on 1024 tokens" in out
    assert re.search(r"peak memory \d+ MiB", out)
    assert "\rcalibrated on 1 of 1 batches" in shown
    last = re.findall(r"\rquantized (\d+) of (\d+) weights", shown)[-1]
    assert last[0] == last[1]
    card = (folder / "low" / "README.md").read_text()
    assert "octavo quantize float int4:gptq low --data text.txt" in card
    assert main(["quantize", str(folder / "float"), "int4", str(folder / "plain"), "--quiet"]) == 0
    capsys.readouterr()
    found = {}
    for name in ("low", "plain"):
        words = ["eval", str(folder / name), "--against", str(folder / "float"), "--text", str(folder / "text.txt")]
        shown = main([*words, "--max-tokens", "512", "--json", "--out", str(folder / f"eval-{name}")])
        assert shown == 0
        found[name] = json.loads(capsys.readouterr().out)["kl"]["mean"]
    assert found["low"] < 0.7 * found["plain"]


@pytest.mark.slow
def test_distillation_trains_scales_and_keeps_codes(folder, capsys):
    words = ["quantize", str(folder / "float"), "int3:search", "--data", str(folder / "text.txt"), "--quiet"]
    assert main([*words[:3], str(folder / "before"), *words[3:], "--data-tokens", "1024"]) == 0
    assert main([*words[:3], str(folder / "after"), *words[3:], "--data-tokens", "1024", "--distill", "20"]) == 0
    before, after, source = (open_model(folder / name) for name in ("before", "after", "float"))
    moved = []
    for path, leaf in before.leaves.items():
        old, new = leaf.load(), after.leaves[path].load()
        assert old.dtype == new.dtype
        if isinstance(old, QArray):
            np.testing.assert_array_equal(old.qvalue, new.qvalue, err_msg=path)
            assert old.scale.dtype == new.scale.dtype
            moved.append(bool(np.any(old.scale != new.scale)))
    assert all(moved)
    assert len(moved) > 7
    ids = source.tokenizer.encode(TEXT)[1024:1536]
    kl = [evaluate(model, ids, against=source, layers=False).kl.mean for model in (before, after)]
    assert kl[1] < 0.8 * kl[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["int4:gptq"], "int4:gptq needs text that the model would read: pass --data FILE"),
        (["int4", "--distill", "3"], "--distill needs text that the model would read: pass --data FILE"),
        (["int4", "--distill", "-3", "--data", "text.txt"], "at least 1: got -3"),
        (["int8", "--distill", "3", "--data", "text.txt", "--format", "gguf"], "--distill is not for --format gguf"),
        (["recipe:int8", "--distill", "3", "--data", "text.txt"], "these rules quantize activations"),
        (["int4", "--data", "text.txt"], "--data is for a recipe with a method, such as int4:gptq, and for --distill"),
        (["int4:gptq", "--data", "none.txt"], "--data: "),
        (["int4:gptq", "--data", "short.txt"], "the calibration text has 6 tokens, less than one window of 256"),
        (["int4:gptq", "--data", "text.txt", "--data-tokens", "9999"], "fewer than the 9999 asked for"),
        (["int4:gptk", "--data", "text.txt"], "gptk"),
        (["nf4:autoround", "--data", "text.txt"], "is quantized to nf4, but AutoRound is for integers: use 'gptq'"),
        (["nf4:signed", "--data", "text.txt"], "is quantized to nf4, but 'signed' is for symmetric signed integers"),
        (["mixed:gptq", "--bits", "4.5", "--mebibytes", "3", "--data", "text.txt"], "--bits and --mebibytes are two"),
    ],
)
def test_errors_come_before_the_work(folder, capsys, monkeypatch, words, message):
    monkeypatch.chdir(folder)
    (folder / "short.txt").write_text("short")
    assert main(["quantize", "float", words[0], "new", *words[1:]]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_other_layouts_hold_the_calibrated_codes(folder):
    source = source_of()
    request = Request("int4:search", data=CalibrationData(TEXT, tokens=512))
    done = export_model("compressed-tensors", source, folder / "ct", request)
    kernel = done.params["decoder/layers_0/mlp/wo/kernel"]
    assert kernel.qtype.name == "int4"
    again = open_model(folder / "ct").leaves["decoder/layers_0/mlp/wo/kernel"].load()
    np.testing.assert_allclose(
        again.dequantize(jnp.float32), kernel._map(jnp.asarray).dequantize(jnp.float32), rtol=1e-3, atol=1e-4
    )


@pytest.mark.slow
def test_awq_scales_the_norms(folder):
    source = source_of()
    rules = weight_rules("int3", source.config, head="float")
    data = CalibrationData(TEXT, tokens=512)
    norm = "decoder/layers_0/pre_self_attention_layer_norm/scale"
    codes = calibrated_codes(source, rules, data, method="awq", scale_dtype="bfloat16")
    params, summary = convert_model(source, rules, codes=codes)
    assert not np.array_equal(params[norm], source.leaves[norm].load())
    assert norm not in summary.ratios
    low = PretrainedModel.from_params(source.config, params)
    plain = PretrainedModel.from_params(source.config, convert_model(source, rules, scale_dtype="bfloat16")[0])
    tokens = data.batches(source)[0][:1, :64]
    wanted, *found = (np.asarray(m.function()(m.params(), tokens)[0]) for m in (source, low, plain))
    errors = [np.mean((logits - wanted) ** 2) for logits in found]
    assert errors[0] < errors[1]


@pytest.mark.slow
def test_autoround_trains_the_codes_of_gptq_layer_by_layer(folder):
    source, data = source_of(), CalibrationData(TEXT, tokens=1024)
    rules, lines, found = weight_rules("int2", source.config, head="float"), [], {}
    for method in ("gptq", "autoround"):
        codes = calibrated_codes(source, rules, data, method=method, scale_dtype="bfloat16", log=lines.append)
        params, _ = convert_model(source, rules, codes=codes)
        low = PretrainedModel.from_params(source.config, params, tokenizer=source.tokenizer, origin=source.origin)
        found[method] = params, evaluate(low, source.tokenizer.encode(TEXT)[1024:1536], against=source, layers=False)
    assert found["autoround"][1].kl.mean < 0.9 * found["gptq"][1].kl.mean
    for path, q in found["gptq"][0].items():
        if isinstance(q, QArray):
            np.testing.assert_array_equal(q.scale, found["autoround"][0][path].scale)
    told = [line for line in lines if "error of the outputs" in line]
    assert [line.split(":")[0] for line in told] == ["layers_0", "layers_1"]
    stacked = source.config.replace(scan_layers=True)
    with pytest.raises(ValueError, match="the layers of this model are one stack: use gptq"):
        check_rounding(stacked, {})


@pytest.mark.slow
def test_k_quants_with_importances(tmp_path):
    source = source_of(SMALL.replace(emb_dim=256, head_dim=64, mlp_dim=256, num_layers=2))
    data = CalibrationData(TEXT, tokens=512)
    matrix = tmp_path / "imatrix.gguf"
    export_model("gguf", source, tmp_path / "a.gguf", Request("q4_k_m", data=data, imatrix=matrix))
    export_model("gguf", source, tmp_path / "b.gguf", Request("q4_k_m", imatrix=matrix))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    export_model("gguf", source, tmp_path / "plain.gguf", Request("q4_k_m"))
    export_model("gguf", source, tmp_path / "old.gguf", Request("int4", head="int8"))
    files = {name: open_model(tmp_path / f"{name}.gguf") for name in ("a", "plain", "old")}
    stored = {name: leaf.stored for name, leaf in files["a"].leaves.items()}
    assert stored["token_embedder/embedding"] == "Q6_K"
    assert stored["decoder/layers_1/mlp/wo/kernel"] == "Q6_K"
    assert stored["decoder/layers_1/mlp/wi_0/kernel"] == "Q4_K"
    tokens = data.batches(source)[0][:1, :64]
    run = jax.jit(source.function())
    wanted, *found = (np.asarray(run(m.params("float32"), tokens)[0]) for m in (source, *files.values()))
    errors = dict(zip(files, (float(np.mean((logits - wanted) ** 2)) for logits in found), strict=True))
    assert errors["a"] < 0.95 * errors["plain"] < 0.8 * errors["old"]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("int4", imatrix=Path("m")), "importances are for K-quants such as q4_k, not for int4"),
        (Request("q4_k", imatrix=Path("m")), "the importance matrix is of another model: it has 'x'"),
    ],
)
def test_importances_that_do_not_fit(tmp_path, monkeypatch, request_, message):
    monkeypatch.chdir(tmp_path)
    write_imatrix("m", {"x": np.ones(3, np.float32)}, tokens=1)
    with pytest.raises(ValueError, match=message):
        export_model("gguf", source_of(), tmp_path / "new.gguf", request_)
    with pytest.raises(ValueError, match="--imatrix is for K-quants in GGUF files: add --format gguf"):
        export_model("octavo", source_of(), tmp_path / "new", request_.__class__("int4", imatrix=Path("m")))


@pytest.mark.slow
def test_a_budget_of_bits(folder, capsys):
    words = ["quantize", str(folder / "float"), "int3,int4,int8:search", str(folder / "mixed"), "--bits", "5.5"]
    assert main([*words, "--data", str(folder / "text.txt"), "--data-tokens", "512"]) == 0
    out = capsys.readouterr().out
    bits = float(out.split("layers: ")[1].split(" bits per weight")[0])
    assert 5.2 < bits <= 5.5
    leaves = open_model(folder / "mixed").leaves
    stored = {name: leaf.stored for name, leaf in leaves.items() if "kernel" in name}
    assert len(set(stored.values())) > 1
    for layer in range(2):
        group = {stored[f"decoder/layers_{layer}/self_attention/{name}/kernel"] for name in ("query", "key", "value")}
        assert len(group) == 1
    record = json.loads((folder / "mixed" / "conversion.json").read_text())
    costs = {row["path"]: row["predicted_kl"] for row in record["tensors"]}
    assert {path for path, cost in costs.items() if cost} == {name for name in stored if "layers" in name}
    page = next((folder / "mixed").glob("*.html")).read_text()
    assert "Bits per weight, scales included" in page
    assert "Bits and sensitivity by layer" in page
    assert main([*words[:2], "int4:search", str(folder / "x"), *words[4:], "--data", str(folder / "text.txt")]) == 2
    assert "a budget chooses between several formats, such as" in capsys.readouterr().err


def stories(source, count):
    """Texts that the model tells."""
    engine = Engine(source, slots=16, max_length=258)
    start = [source.tokenizer.bos_id]
    told = [[] for _ in range(count)]
    sampling = [SamplingParams(temperature=1.0, max_tokens=256, seed=i) for i in range(count)]
    for event in engine.generate([start] * count, sampling):
        told[event.request_id].append(event.token)
    return [source.tokenizer.decode(tokens) for tokens in told]


@pytest.mark.data("stories15m")
def test_four_bits_of_a_real_model():
    """As in docs/ptq.md: 5000 tokens of calibration, more than the 768 inputs of the largest Hessian by far."""
    source = real("stories15m")
    texts = stories(source, 32)
    data = CalibrationData("\n\n".join(texts[:24]))
    ids = source.tokenizer.encode("\n\n".join(texts[24:]))
    rules = weight_rules("int4", source.config, head="float")
    kl = {}
    for method in ("round", "signed", "search", "gptq"):
        codes = calibrated_codes(source, rules, data, method=method, scale_dtype="bfloat16")
        params, _ = convert_model(source, rules, codes=codes)
        low = PretrainedModel.from_params(source.config, params, tokenizer=source.tokenizer, origin=source.origin)
        kl[method] = evaluate(low, ids, against=source, layers=False).kl.mean
    assert kl["signed"] < 0.8 * kl["round"]
    assert kl["search"] < 0.55 * kl["round"]
    assert kl["gptq"] < 0.4 * kl["round"]
    assert kl["gptq"] < 0.06
