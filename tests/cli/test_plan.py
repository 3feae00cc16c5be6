import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import octavo
from octavo.cli import main
from octavo.cli.target import UsageError, read_shape

HERE = Path(__file__).parent
MISSPELT = [{"module_path": "up", "weight_qtype": "int8"}, {"module_path": "dwn", "weight_qtype": "int8"}]
UNMATCHED = "rule 1 matches nothing: module_path='dwn'; the nearest paths are 'down', 'down/w'\n"


@pytest.fixture(autouse=True)
def beside_the_toys(monkeypatch):
    monkeypatch.chdir(HERE)


@pytest.fixture
def misspelt(tmp_path):
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(MISSPELT))
    return str(path)


def usage_error(capsys, *argv):
    """The message of a command that fails: one text on stderr, and nothing else."""
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.endswith("\n")
    return shown.err[:-1]


def test_the_table_of_a_function_and_what_to_type_next(capsys):
    assert main(["plan", "toy:predict", "--rules", "int8"]) == 0
    shown = capsys.readouterr()
    head, _, up, down, summary, following = shown.out.splitlines()
    assert head.split()[:4] == ["path", "op", "shapes", "rule"]
    assert up.startswith(
        "up    dot_general  (8,64) x (64,128)   1     int8 x int8  int8 x int8  int8 x int8  (8,1) (1,128)"
    )
    assert down.startswith("down  dot_general  (8,128) x (128,64)  1 ")
    assert summary.startswith("2 of 2 matmuls quantized, 100.0 % of forward FLOPs")
    assert following == "Next: octavo verify toy:predict --rules int8"
    assert shown.err == ""


def test_shapes_and_weights_are_passed_on_to_what_is_typed_next(capsys):
    argv = ["toy:matmul", "--rules", "int8", "--inputs", "bf16[8,16] bf16[16,4]", "--weights", "rhs"]
    assert main(["plan", *argv]) == 0
    *_, row, _, following = capsys.readouterr().out.splitlines()
    assert row.startswith("rhs   dot_general  (8,16) x (16,4)  1 ")
    assert following == ("Next: octavo verify toy:matmul --rules int8 --inputs 'bf16[8,16] bf16[16,4]' --weights rhs")


def test_json(capsys):
    assert main(["plan", "toy:predict", "--rules", "qat_int4", "--inputs", "toy:example_inputs", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["share"] == 1.0
    assert [(row["path"], row["fwd"], row["drhs"]) for row in plan["rows"]] == [
        ("up", "int8 x int4", "float"),
        ("down", "int8 x int4", "float"),
    ]


COLLECTIVES = ("plan", "toy:predict", "--rules", "int8", "--inputs", "toy:on_devices", "--collectives")


def test_what_devices_send(capsys):
    assert main(COLLECTIVES) == 0
    head, _, up, down, _, sums, following = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == ["collective", "bytes", "note"]
    assert up.split()[-2:] == down.split()[-2:] == ["7.17", "kB"]
    assert sums.startswith("a device sends 17 kB: all-gather 14.3 kB (s8), all-reduce 2.69 kB (f32); weights 14.3 kB")
    assert following == "Next: octavo verify toy:predict --rules int8 --inputs toy:on_devices"


def test_what_devices_send_with_rules_that_keep_state(capsys, tmp_path):
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": True}]))
    assert main([*COLLECTIVES, "--rules", str(rules), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (
        plan["communication"]["weights"]
        == sum(row["collective_bytes"] for row in plan["rows"])
        == 2 * 64 * 128 * 7 // 8
    )


def test_inputs_without_shardings_send_nothing(capsys):
    assert usage_error(capsys, "plan", "toy:predict", "--rules", "int8", "--collectives") == (
        "--collectives: no input of toy:predict is sharded over several devices: give --inputs as module:callable that "
        "returns arrays, or jax.ShapeDtypeStructs with sharding=, that are"
    )


@pytest.mark.standard_promotion
def test_a_models_weights_have_no_shardings(capsys):
    text = usage_error(capsys, "plan", "toy_models:linen", "--rules", "int8", "--inputs", "f32[8,16]", "--collectives")
    assert text == (
        "--collectives is for functions: the shapes of the model toy_models:linen have no shardings of its weights"
    )


def test_html(capsys, tmp_path):
    page = tmp_path / "plan.html"
    assert main(["plan", "toy:predict", "--rules", "int8", "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"{page} written\nNext: octavo verify toy:predict --rules int8\n"
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "<td>int8 x int8</td>" in text
    assert "2 of 2 matmuls quantized" in text


def test_html_into_a_missing_directory(capsys):
    text = usage_error(capsys, "plan", "toy:predict", "--rules", "int8", "--html", "missing/plan.html")
    assert text == "--html: missing/plan.html: No such file or directory"


def test_a_terminal_gets_the_table_from_rich(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["plan", "toy:predict", "--rules", "int8"]) == 0
    *_, summary, following = capsys.readouterr().out.splitlines()
    assert summary.startswith("\x1b[1m2 of 2 matmuls quantized, 100.0 % of forward FLOPs; operands")
    assert following.startswith("Next: ")


def test_a_rule_that_matches_nothing_is_an_error(capsys, misspelt):
    assert usage_error(capsys, "plan", "toy:predict", "--rules", misspelt) + "\n" == UNMATCHED


def test_a_rule_that_matches_nothing_can_be_a_warning(capsys, misspelt):
    assert main(["plan", "toy:predict", "--rules", misspelt, "--allow-unmatched"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "warning: " + UNMATCHED
    assert "matches nothing" not in shown.out
    assert "1 of 2 matmuls quantized" in shown.out


@pytest.mark.parametrize("name", ["linen", "Linen", "linen_model", "nnx_model"])
@pytest.mark.standard_promotion
def test_models_and_what_makes_them(capsys, name):
    assert main(["plan", f"toy_models:{name}", "--rules", "int8", "--inputs", "f32[8,16]", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    width = 48 if name == "linen_model" else 32
    assert [(row["path"], row["shapes"], row["dlhs"]) for row in rows] == [
        ("up", f"(8,16) x (16,{width})", "int8 x int8"),
        ("down", f"(8,{width}) x ({width},16)", "int8 x int8"),
    ]


@pytest.mark.standard_promotion
def test_an_equinox_model(capsys):
    assert main(["plan", "toy_models:equinox", "--rules", "int8", "--inputs", "f32[16]", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["path"], row["fwd"]) for row in rows] == [("layers/0", "int8 x int8"), ("layers/1", "int8 x int8")]


def test_the_recipes_are_listed(capsys):
    assert main(["plan", "--rules", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(octavo.recipes(aliases=True))
    assert any(line.split("  ", 1)[1].strip().startswith("Int8 in all three matmuls") for line in lines)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "TARGET is missing: module:function, or module:attribute for a model"),
        (["toy"], "TARGET is module:function, got 'toy'"),
        (["toyy:f"], f"there is no module 'toyy' in {HERE} or among the installed packages"),
        (
            ["toy.py:predict"],
            f"there is no module 'toy.py' in {HERE} or among the installed packages; did you mean 'toy:predict'?",
        ),
        (["toy:NUMBER"], "toy:NUMBER is neither a function nor a model of Flax or Equinox but of type int"),
        (
            ["toy_models:NeedsWidth"],
            "toy_models:NeedsWidth is a class that needs arguments: name a function without any that makes the model",
        ),
        (["toy:predict"], "--rules is missing: a recipe's name or a file; octavo plan --rules list prints the recipes"),
        (["toy:predict", "--rules", "no.yml"], "--rules: no.yml: No such file or directory"),
        (["toy:predict", "--rules", "toy.py"], "--rules: toy.py: rules are read from .json, .yml, .yaml files"),
        (
            ["toy_models:linen", "--rules", "int8"],
            "the inputs of toy_models:linen are unknown: give --inputs, as shapes "
            "such as 'f32[8,128]' or as module:callable, or define example_inputs in toy_models",
        ),
        (
            ["toy:predict", "--rules", "int8", "--inputs", "f32[8"],
            "--inputs: 'f32[8' is no shape: a type and sizes such as 'f32[8,128]', or 'i32[]' for a scalar",
        ),
        (
            ["toy:predict", "--rules", "int8", "--inputs", "q7[8]"],
            "--inputs: 'q7[8]' has the unknown type 'q7': f32, bf16, i32, u8, bool and so on",
        ),
        (
            ["toy:predict", "--rules", "int8", "--inputs", "toy:not_a_tuple"],
            "toy:not_a_tuple gives dict, not the tuple of arguments",
        ),
        (
            ["toy:matmul", "--rules", "int8", "--inputs", "f32[8]", "f32[8]", "--weights", "rsh"],
            "--weights: toy:matmul has no argument 'rsh'; it has lhs, rhs",
        ),
        (
            ["toy_models:linen", "--rules", "int8", "--weights", "x"],
            "--weights is for functions: the weights of the model toy_models:linen are its parameters",
        ),
        (["toy:broken", "--rules", "int8"], f"KeyError: 'wrong' ({HERE}/toy.py, line 39)"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(capsys, argv, text):
    assert usage_error(capsys, "plan", *argv) == text


def test_a_module_that_fails(capsys, tmp_path, monkeypatch):
    (tmp_path / "toy_that_fails.py").write_text("import math\n\nmath.sqrt(-1)\n")
    monkeypatch.chdir(tmp_path)
    text = usage_error(capsys, "plan", "toy_that_fails:f", "--rules", "int8")
    assert text.startswith("toy_that_fails cannot be imported: ValueError: ")
    assert text.endswith(f" ({tmp_path}/toy_that_fails.py, line 3)")


def test_the_nearest_names(capsys):
    text = usage_error(capsys, "plan", "toy:predct", "--rules", "int8")
    assert text.startswith("toy has no attribute 'predct': did you mean 'predict'? ")
    text = usage_error(capsys, "plan", "toy:predict", "--rules", "int9")
    assert text.startswith("--rules: unknown recipe 'int9': did you mean 'int8', ")


def test_a_rules_file_with_an_error_is_named(capsys, tmp_path):
    path = tmp_path / "rules.json"
    path.write_text("[{]")
    text = usage_error(capsys, "plan", "toy:predict", "--rules", str(path))
    assert text.startswith(f"--rules: {path}: Expecting property name")


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("f32[8,128]", (8, 128), "float32"),
        ("bf16[3]", (3,), "bfloat16"),
        ("i32[]", (), "int32"),
        ("s8[2]", (2,), "int8"),
        ("u8[2]", (2,), "uint8"),
        ("bool[1,2,3]", (1, 2, 3), "bool"),
        ("float8_e4m3fn[4]", (4,), "float8_e4m3fn"),
    ],
)
def test_shapes(text, shape, dtype):
    read = read_shape(text)
    assert (read.shape, read.dtype) == (shape, dtype)


@pytest.mark.parametrize("text", ["f32", "[8]", "f32[8,]", "f32[-1]", "f32[8 ,1]", "f32[8]x", "x[8]"])
def test_no_shapes(text):
    with pytest.raises(UsageError, match="--inputs: "):
        read_shape(text)


def test_help_says_how_it_ends(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("--rules list", "--inputs", "--allow-unmatched", "--html", "--weights", "Example:", "Exit status 0"):
        assert part in shown


def test_python_m_octavo_plan():
    command = [sys.executable, "-m", "octavo", "plan", "toy:predict", "--rules", "int8"]
    env = {**os.environ, "PYTHONPATH": str(Path(octavo.__file__).parents[1])}
    shown = subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=env, check=True)
    assert shown.stdout.endswith("\nNext: octavo verify toy:predict --rules int8\n")
    assert shown.stderr == ""
