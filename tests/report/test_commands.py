"""The commands write their pages: a run is trained, converted and evaluated, and each step leaves one."""

import json
import subprocess
import sys

import pytest

from tests.report.page import read

pytestmark = [pytest.mark.slow, pytest.mark.standard_promotion]


def octavo(*words, cwd):
    done = subprocess.run([sys.executable, "-m", "octavo", *words], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_quantize_eval_report(tmp_path):
    words = ["model_name=1m", "steps=4", "dataset_type=python", "max_target_length=32", "per_device_batch_size=2"]
    words += ["num_devices=1", "quantization_metrics_interval=2", "enable_tensorboard=false"]
    octavo("train", "run_name=plain", *words, cwd=tmp_path)
    octavo("train", "run_name=low", "quantization=int8", *words, cwd=tmp_path)
    page = read(tmp_path / "runs" / "low" / "report.html")
    assert "It is measured against plain, in float." in page.text
    assert "Weights with the lowest signal to noise, from the checkpoint of step 4." in page.text
    assert page.source.count('<figure class="small">') == 4
    assert page.source.count('class="heat"') == 4
    assert "missing" not in {attrs.get("class") for _, attrs in page.tags}

    out = octavo("quantize", "runs/plain", "int4", "small", "--quiet", cwd=tmp_path)
    assert "report: small/report.html" in out
    record = json.loads((tmp_path / "small" / "conversion.json").read_text())
    assert record["command"] == "octavo quantize plain int4 small"
    read(tmp_path / "small" / "report.html")

    out = octavo("quantize", "runs/plain", "int4", "small.gguf", "--format", "gguf", "--quiet", cwd=tmp_path)
    assert "report: small.gguf.report.html" in out
    as_gguf = json.loads((tmp_path / "small.gguf.conversion.json").read_text())
    measured = [t["sqnr_db"] for t in as_gguf["tensors"] if t["quantized"]]
    assert measured
    # Q4_0 has a scale for 32 values and four bits, as our int4 in groups has.
    ours = [t["sqnr_db"] for t in record["tensors"] if t["kind"] == "int4 g32"]
    assert min(measured) == pytest.approx(min(ours), abs=2.0)

    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    words = ["--against", "runs/plain", "--text", "text.txt", "--length", "32"]
    assert "report: runs/eval-small-text/report.html" in octavo("eval", "small", *words, cwd=tmp_path)
    page = read(tmp_path / "runs" / "eval-small-text" / "report.html")
    assert "Signal to noise by layer" in page.source

    octavo(
        "report", "runs/plain", "runs/low", "small", "small.gguf.conversion.json", "runs/eval-small-text", cwd=tmp_path
    )
    assert "2 trainings and 2 conversions and 1 evaluation" in read(tmp_path / "report.html").text
