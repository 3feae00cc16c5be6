import json
from pathlib import Path

import pytest

from octavo.cli import main

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def beside_the_toys(monkeypatch):
    monkeypatch.chdir(HERE)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v6", "unknown accelerator 'v6': did you mean 'v6e'"),
        ("v5e", "compiling for v5e needs libtpu: pip install 'octavo[tpu]'"),
        ("h100", "compiling for h100 needs jax's CUDA plugin: pip install 'octavo[cuda]'"),
    ],
)
def test_what_cannot_be_compiled_is_one_line(capsys, monkeypatch, name, message):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr("octavo.hlo.accelerators.importlib.util.find_spec", lambda _: None)
    assert main(["compile", "toy:predict", "--accelerator", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.slow
@pytest.mark.compiler("tpu")
def test_int8_beside_float_on_a_tpu(capsys):
    argv = ["compile", "toy:predict", "--rules", "int8", "--accelerator", "v6e", "--grad"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["v6e:2x2", "       cycles  time      accessed  temporary  sent"]
    assert "s8 x s8 -> s32  5" in lines
    assert "5 of 5 quantized matmuls have operands of 8 bits or fewer on the device" in lines
    assert any("dot_general" in line for line in lines)


@pytest.mark.slow
@pytest.mark.compiler("tpu")
def test_json(capsys):
    assert main(["compile", "toy:predict", "--accelerator", "v5e", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["float"]
    assert found["accelerator"] == "v5e:2x2"
    assert found["seconds"] == pytest.approx(found["cycles"] / 1.5e9)
    assert sum(matmul["count"] for matmul in found["matmuls"]) == 2
    assert sum(op["cycles"] * op["count"] for op in found["ops"]) == found["cycles"]


def test_verify_needs_the_compiler_too(capsys, monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr("octavo.hlo.accelerators.importlib.util.find_spec", lambda _: None)
    assert main(["verify", "toy:predict", "--accelerator", "v6e"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "compiling for v6e needs libtpu: pip install 'octavo[tpu]'" in line


@pytest.mark.slow
@pytest.mark.compiler("tpu")
def test_verify_on_a_tpu(capsys):
    argv = ["verify", "toy:predict", "--rules", "int8", "--accelerator", "v6e", "--grad", "--at-least", "1"]
    assert main(argv) == 0
    assert "5 of 5 quantized matmuls have operands of 8 bits or fewer on the device" in capsys.readouterr().out
