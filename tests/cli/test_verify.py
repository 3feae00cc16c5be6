import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import octavo
from octavo.cli import main

HERE = Path(__file__).parent
SQUARE = ["--inputs", "f32[32,16]"]


@pytest.fixture(autouse=True)
def beside_the_toys(monkeypatch):
    monkeypatch.chdir(HERE)


def verified(capsys, *argv):
    """What a command that succeeds prints as JSON."""
    assert main(["verify", *argv, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return json.loads(shown.out)


def passes(found):
    return [product["backward"] for product in found["matmuls"]]


def test_a_function_as_it_is(capsys):
    assert main(["verify", "toy:predict"]) == 0
    *_, summary = capsys.readouterr().out.splitlines()
    assert summary == "low precision: 0.0 % of matmul FLOPs forward"


def test_a_function_with_rules(capsys):
    assert main(["verify", "toy:predict", "--rules", "int8"]) == 0
    head, up, down, summary = capsys.readouterr().out.splitlines()
    assert head.split() == ["path", "pass", "op", "operands", "out", "count", "FLOPs", "kind"]
    assert "int8[8,64] x int8[64,128]" in up
    assert "int8[8,128] x int8[128,64]" in down
    assert summary == "low precision: 100.0 % of matmul FLOPs forward (native 100.0 %)"


def test_a_function_that_is_low_precision_by_itself(capsys):
    argv = ["toy:already_low", "--inputs", "f32[8,32]", "f32[32,16]", "--grad"]
    found = verified(capsys, *argv)
    # The gradient of `weights`, the second argument, in float; none of `x`, the first.
    assert [(p["lhs"], p["rhs"], p["lhs_dtype"]) for p in found["matmuls"]] == [
        ([8, 32], [32, 16], "int8"),
        ([8, 32], [8, 16], "float32"),
    ]
    assert found["share"] == {"forward": 1.0, "backward": 0.0, "native": 0.5}


@pytest.mark.parametrize(("weights", "other"), [([], [4, 2]), (["--weights=0"], [4, 2]), (["--weights=rhs"], [8, 4])])
def test_gradients_are_those_of_the_first_argument_by_default(capsys, weights, other):
    found = verified(capsys, "toy:matmul", "--inputs", "f32[8,4]", "f32[4,2]", "--grad", *weights)
    forward, backward = found["matmuls"]
    assert (forward["backward"], backward["backward"]) == (False, True)
    # The gradient of one operand is a matmul with the other.
    assert other in (backward["lhs"], backward["rhs"])


@pytest.mark.parametrize(
    ("target", "rules"),
    [
        ("toy:predict", "te_nvfp4_no_rht"),
        ("toy_models:linen", "fp8_gpu"),
        ("toy_models:linen", "te_nvfp4_no_rht"),
        ("toy_models:nnx_model", "int8"),
        ("toy_models:nnx_model", "fp8_gpu"),
    ],
)
@pytest.mark.standard_promotion
def test_rules_with_state_and_random_rounding(capsys, target, rules):
    inputs = [] if target.startswith("toy:") else SQUARE
    found = verified(capsys, target, "--rules", rules, *inputs, "--grad")
    assert (found["share"]["forward"], found["share"]["backward"]) == (1.0, 1.0)
    assert passes(found) == [False, False, True, True, True]


@pytest.mark.parametrize("target", ["linen", "Linen", "nnx_model"])
@pytest.mark.standard_promotion
def test_a_model_as_it_is(capsys, target):
    found = verified(capsys, f"toy_models:{target}", *SQUARE, "--grad")
    assert found["share"] == {"forward": 0.0, "backward": 0.0, "native": 0.0}
    assert passes(found) == [False, False, True, True, True]


@pytest.mark.standard_promotion
def test_an_equinox_model(capsys):
    argv = ["toy_models:equinox", "--inputs", "f32[16]", "--grad"]
    assert verified(capsys, *argv)["share"]["backward"] == 0.0
    assert verified(capsys, *argv, "--rules", "int8")["share"] == {"forward": 1.0, "backward": 1.0, "native": 1.0}


@pytest.mark.standard_promotion
def test_a_linen_model_with_batch_statistics(capsys):
    found = verified(capsys, "toy_models:Normed", "--rules", "int8", *SQUARE, "--grad")
    assert found["share"]["forward"] == 1.0


def test_a_platform(capsys):
    found = verified(capsys, "toy:predict", "--rules", "int8", "--platform", "tpu")
    assert found["platform"] == "tpu"
    assert [(row["lhs"], row["rhs"]) for row in found["lowered"]] == [
        ("8x64xi8", "64x128xi8"),
        ("8x128xi8", "128x64xi8"),
    ]


def test_the_share_that_is_asked_for(capsys):
    qat = ["verify", "toy:predict", "--rules", "qat_int8"]
    assert main([*qat, "--at-least", "1"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*qat, "--grad", "--at-least", "0.95"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "backward: 0.00% of matmul FLOPs in low precision, below --at-least 0.95\n"
    assert shown.out.endswith("low precision: 100.0 % of matmul FLOPs forward, 0.0 % backward (native 100.0 %)\n")
    assert main(["verify", "toy:predict", "--at-least", "0.5", "--json"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "forward: 0.00% of matmul FLOPs in low precision, below --at-least 0.5\n"
    assert json.loads(shown.out)["share"]["forward"] == 0.0


@pytest.mark.parametrize("share", ["95", "-0.1", "nan", "most"])
def test_no_share(capsys, share):
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "toy:predict", f"--at-least={share}"])
    assert f"{share!r} is no share: a number from 0 to 1, such as 0.95" in capsys.readouterr().err


def test_rules_that_match_nothing_are_warned_of(capsys, tmp_path):
    path = tmp_path / "rules.json"
    path.write_text('[{"module_path": "nowhere", "weight_qtype": "int8"}]')
    assert main(["verify", "toy:predict", "--rules", str(path), "--at-least", "0.5"]) == 1
    warning, below = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: quantizing predict would change nothing")
    assert below.startswith("forward: 0.00%")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["predict"], "TARGET is module:function, got 'predict'"),
        (
            ["toy:counts", "--inputs", "f32[8,16]", "f32[4,8]", "--grad"],
            "--grad: there are no float outputs to take a gradient of",
        ),
        (
            ["toy:matmul", "--inputs", "i32[8,16]", "i32[16,8]", "--grad"],
            "--grad: the weights hold no float arrays to differentiate with respect to",
        ),
        (["toy:matmul", "--inputs", "toy:nothing"], "toy:nothing gives ArrayImpl, not the tuple of arguments"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(capsys, argv, text):
    assert main(["verify", *argv]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", text + "\n")


def test_an_error_of_the_function_says_where(capsys):
    assert main(["verify", "toy:matmul", "--inputs", "f32[8,7]", "f32[6,8]"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("TypeError: dot_general requires")
    assert text.endswith(f" ({HERE}/toy.py, line 23)\n")


def test_help_says_how_it_ends(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["verify", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("--rules list", "--inputs", "--grad", "--platform", "--at-least", "Example:", "Exit status 0"):
        assert part in shown


def test_python_m_octavo_verify():
    command = [sys.executable, "-m", "octavo", "verify", "toy:predict", "--rules", "int8", "--at-least", "0.95"]
    env = {**os.environ, "PYTHONPATH": str(Path(octavo.__file__).parents[1])}
    shown = subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=env, check=True)
    assert shown.stdout.endswith("\nlow precision: 100.0 % of matmul FLOPs forward (native 100.0 %)\n")
    assert shown.stderr == ""
