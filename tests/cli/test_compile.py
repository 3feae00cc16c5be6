"""`octavo compile` as a command."""

import dataclasses
import json

import pytest

from octavo.cli import main
from octavo.cli.compile import render
from octavo.train.ahead import Look
from octavo.train.chips import topology

_LOOK = Look(
    name="float",
    dtype="bfloat16",
    mesh="fsdp=8",
    parameters=1000,
    rows=8,
    tokens=4096,
    held={"params": 4_000_000_000, "opt_state": 8_000_000_000},
    temporaries=5_000_000_000,
    flops={"bf16 x bf16": 4 * 10**12},
    memory_traffic=10**10,
    traffic={"total": 3000, "weights": 2000, "by_kind": {"all-gather": 2000, "all-reduce": 1000}},
    largest=[
        {"kind": "all-gather", "dtype": "s8", "shape": [8, 4], "group_size": 8, "count": 16, "total": 2000, "name": "x"}
    ],
    seconds={"compute": 0.02, "memory": 0.01, "network": 0.005},
    low={"forward": 0.9, "backward": 0.75},
    even=1e12,
    matmuls=[
        {"path": "mlp/wo", "weight": "w", "shapes": "(8,4) x (4,2)", "times": 16, "fwd": "a", "dlhs": "", "drhs": ""}
    ],
    lowered=[{"op": "dot_general", "lhs": "bf16", "rhs": "bf16", "out": "f32", "count": 3}],
    notes=["something"],
    took=1.0,
)
_LOW = {
    "name": "int8",
    "flops": {"s8 x s8": 4 * 10**12},
    "traffic": {"total": 1500, "weights": 500, "by_kind": {"all-gather": 500, "all-reduce": 1000}},
    "seconds": {"compute": 0.01, "memory": 0.008, "network": 0.002},
    "temporaries": 2_000_000_000,
    "replicated": 2,
}


def _looks():
    return [_LOOK, dataclasses.replace(_LOOK, **_LOW)]


def test_help(capsys):
    assert main(["compile", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: octavo compile [CONFIG.yml] topology=PLATFORM:CHIP-N")
    assert "tpu:v5e-N" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "topology is missing: topology=tpu:v5e-256, for example"),
        (["topology=tpu:v9-8"], "topology=tpu:v9-8: no topology is called so; there are tpu:v"),
        (["topology=cpu:8", "stepz=3"], "unknown key 'stepz' (command line): did you mean 'steps'?"),
        (["topology=cpu:8", "quantization=int9"], "quantization=int9"),
        (["topology=cpu:8", "--json"], "--json FILE: the file is missing"),
    ],
)
def test_what_is_refused(words, text, capsys):
    assert main(["compile", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("octavo compile: the configuration has a problem:")
    assert text in err


def test_render():
    text = render(_looks(), topology("tpu:v5e-8"), "mine")
    lines = [line.split() for line in text.splitlines()]
    assert "mine on tpu:v5e-8: 1,000 parameters, mesh fsdp=8, 8 rows with 4,096 tokens a step" in text
    for row in (
        ["mlp/wo", "(8,4)", "x", "(4,2)", "16", "a", "a", "a"],
        ["on", "each", "device", "bfloat16", "int8", "ratio"],
        ["parameters", "4", "GB", "4", "GB", "1.00"],
        ["memory,", "of", "16", "GB", "17", "GB", "14", "GB", "0.82"],
        ["s8", "x", "s8", "0", "4", "T"],
        ["all-gather", "2", "kB", "500", "B", "0.25"],
        ["of", "it", "weights", "2", "kB", "500", "B", "0.25"],
        ["time", "for", "compute", "20", "ms", "10", "ms", "0.50"],
        ["step,", "if", "all", "overlaps", "20", "ms", "10", "ms", "0.50"],
        ["step,", "if", "nothing", "does", "35", "ms", "20", "ms", "0.57"],
        ["tokens/s,", "all", "devices", "205", "k", "410", "k", "2.00"],
    ):
        assert row in lines, row
    assert "StableHLO for tpu, as written, loop bodies once: 3 x dot_general bf16 x bf16 -> f32" in text
    assert "note: float does not fit: 17 GB of 16 GB on each device" in text
    assert "note: int8: XLA gives every device a whole copy of 2 arrays, to cut them anew" in text
    assert "most sent in int8: 2 kB by 16 x all-gather s8[8,4] among 8" in text
    assert "note: something" in text
    assert "note: int8: a device multiplies 4.0 times its even share, so the mesh has axes along which" in text
    assert "low precision: 90.0 % of matmul FLOPs forward, 75.0 % backward" in text
    assert "note: times are estimates from published peak rates, which no real step reaches" in text


def test_render_without_times():
    look = dataclasses.replace(_LOOK, seconds=None)
    text = render([look], topology("cpu:8"))
    assert "time for" not in text
    assert "host: nothing is published that would hold for every CPU" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["model_name=llama-1b", "topology=tpu:v5e-8", "quantization=int8"],
        ["model_name=deepseek-big", "topology=cuda:b200-256", "quantization=fp8_full", "ici_expert_parallelism=8"],
    ],
)
def test_the_large_models(words, tmp_path, capfd):
    out = tmp_path / "out.json"
    small = ["max_target_length=256", "per_device_batch_size=1", "use_qwix_quantization=true"]
    assert main(["compile", *words, *small, "--json", str(out)]) == 0
    text = capfd.readouterr().out
    assert f"on {words[1].partition('=')[2]}" in text
    assert "step, if all overlaps" in text
    found = json.loads(out.read_text())
    plain, low = found["looks"]
    assert plain["dtype"] == "bfloat16"
    assert sum(low["held"].values()) == pytest.approx(12 * low["parameters"] / low["rows"], rel=0.1)
    assert any(types.startswith(("s8", "f8")) for types in low["flops"])
    assert not any(types.startswith(("s8", "f8")) for types in plain["flops"])
