"""The commands of MaxText's guides, with another module's name and small sizes."""

import importlib.metadata
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from octavo.checkpoint import load
from octavo.cli import main
from octavo.train.__main__ import main as run
from octavo.train.metrics import read_metrics
from tests.train.common import words

MODULE = (sys.executable, "-m", "octavo.train")
LINE = re.compile(
    r"completed step: (\d+), seconds: [\d.]+, TFLOP/s/device: [\d.]+, Tokens/s/device: [\d.]+, total_weights: \d+, "
    r"loss: ([\d.]+)"
)
TINY = (
    *("base_num_decoder_layers=2", "base_emb_dim=64", "base_mlp_dim=128", "max_target_length=64"),
    *("per_device_batch_size=4", "learning_rate=3e-3"),
)
SHORT = ("steps=4", "eval_interval=2", "eval_steps=1", "checkpoint_period=2", "quantization_metrics_interval=2")
FP8 = (
    "quantization=fp8_full",
    "use_qwix_quantization=True",
    "weight_quantization_calibration_method=fixed,-224,224",
    "act_quantization_calibration_method=fixed,-224,224",
)
NAMES = {
    "learning/loss",
    "learning/grad_norm",
    "learning/raw_grad_norm",
    "learning/param_norm",
    "learning/current_learning_rate",
    "learning/total_weights",
    "perf/step_time_seconds",
    "perf/per_device_tflops",
    "perf/per_device_tflops_per_sec",
    "perf/per_device_tokens",
    "perf/per_device_tokens_per_sec",
}


def call(*command, directory):
    """Run a command as a user would, with the environment of one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "M_"))}
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=1"
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600)


def check(process, directory):
    """What every quantized run leaves behind; the rows of its metrics."""
    assert process.returncode == 0, process.stdout + process.stderr
    assert "Traceback" not in process.stderr
    losses = {int(step): float(loss) for step, loss in LINE.findall(process.stdout)}
    assert list(losses) == [0, 1, 2, 3]
    assert losses[3] < losses[0]
    rows = read_metrics(directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(set(row) >= NAMES for row in rows)
    assert all(math.isfinite(row["learning/loss"]) for row in rows)
    assert [round(row["learning/loss"], 3) for row in rows] == list(losses.values())
    assert [row["step"] for row in rows if "eval/avg_loss" in row] == [1, 3]
    products = json.loads((directory / "verify.json").read_text())["matmuls"]
    for backward in (False, True):
        low = [p for p in products if p["backward"] == backward and p["kind"] in ("native", "emulated")]
        assert sum(p["flops"] for p in low) > 0
    assert json.loads((directory / "plan.json").read_text())
    assert [json.loads(line)["step"] for line in (directory / "telemetry.jsonl").read_text().splitlines()] == [1, 3]
    assert (directory / "config.yml").read_text().startswith("# Run\nrun_name: ")
    assert "<html" in (directory / "report.html").read_text()
    assert len(list((directory / "tensorboard").glob("events.out.tfevents.*"))) == 1
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == [".lock", "2", "4"]
    assert load(directory / "checkpoints").step == 4
    return rows


GUIDES = {
    "qwix": ("use_qwix_quantization=True", "quantization='int8'"),
    "aqt": ("use_qwix_quantization=false", "quantization='int8'"),
    "fp8": FP8,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_the_commands_of_the_guides(name, tmp_path):
    arguments = ("run_name=mine", f"base_output_directory={tmp_path}", "dataset_type=synthetic", *GUIDES[name])
    process = call(*MODULE, "configs/base.yml", *arguments, "model_name=1m", *TINY, *SHORT, directory=tmp_path)
    check(process, tmp_path / "mine")
    assert "low precision: " in process.stdout
    config = (tmp_path / "mine" / "config.yml").read_text()
    assert f"quantization: {'fp8_full' if name == 'fp8' else 'int8'}\n" in config
    assert f"use_qwix_quantization: {'false' if name == 'aqt' else 'true'}\n" in config


@pytest.mark.slow
def test_the_float8_recipe_of_deepseek_from_its_file(tmp_path):
    arguments = ("run_name=mine", "dataset_type=synthetic", "num_experts=4")
    process = call(*MODULE, "configs/deepseek_fp8.yml", *arguments, *TINY, *SHORT, directory=tmp_path)
    rows = check(process, tmp_path / "runs" / "mine")
    assert all(row["learning/moe_lb_loss"] > 0 for row in rows)
    config = (tmp_path / "runs" / "mine" / "config.yml").read_text()
    assert all(f"\n{key}: {value}\n".lower() in config for key, value in (word.split("=") for word in FP8))


@pytest.mark.slow
def test_the_console_command_without_a_file(tmp_path):
    octavo = shutil.which("octavo", path=os.path.dirname(sys.executable))
    assert octavo is not None
    arguments = ("train", "dataset_type=synthetic", "quantization=int8", "model_name=1m", *TINY, *SHORT)
    process = call(octavo, *arguments, directory=tmp_path)
    (directory,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"1m-int8-\d{8}-\d{6}", directory.name)
    check(process, directory)
    assert process.stdout.endswith("Next: octavo compare quantization=int8 model_name=1m dataset_type=synthetic\n")


def test_help(capsys):
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: octavo train [CONFIG.yml] [key=value ...]        (also: python -m octavo.train)")
    assert "Exit status 0: done, or saved on SIGTERM; 130: saved on Ctrl-C" in text
    assert re.search(r"\n  quantization_start_step +0 +first quantized step", text)


WRONG = {
    "stepz=50": "unknown key 'stepz' (command line): did you mean 'steps'?",
    "quantization=int9": "quantization=int9: did you mean 'int8'?",
    "steps=many": "steps=many: ",
    "weight_sparsity_n=2": "weight_sparsity_n=2 and weight_sparsity_m=null: set both",
    "load_parameters_path=nowhere": "load_parameters_path=nowhere: there is no such file or directory",
    "nowhere.yml": "there is no file nowhere.yml",
    "quantization=fp8_gpu weight_quantization_calibration_method=fixed,-1,1": "weight_calibration_method='fixed,-1,1'",
}


@pytest.mark.parametrize("word", WRONG)
def test_errors_come_before_anything_starts(word, tmp_path, capsys):
    assert run([*word.split(), f"base_output_directory={tmp_path}"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("octavo train: ")
    assert WRONG[word] in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_key_fails_in_seconds(tmp_path):
    started = time.perf_counter()
    process = call(*MODULE, "quantisation=int8", directory=tmp_path)
    # An import of JAX takes most of it; nothing is traced, let alone compiled.
    assert time.perf_counter() - started < 30
    assert process.returncode == 2
    assert "did you mean 'quantization'?" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("package", ["yaml", "flax", "optax", "orbax"])
def test_a_missing_package_is_named_with_what_installs_it(package, tmp_path):
    hidden = f"import sys; sys.modules[{package!r}] = None; from octavo.cli import main; sys.exit(main(sys.argv[1:]))"
    process = call(sys.executable, "-c", hidden, "train", *words(steps=1), directory=tmp_path)
    name = {"yaml": "pyyaml", "orbax": "orbax-checkpoint"}.get(package, package)
    assert process.returncode == 1
    assert process.stderr == f"octavo train: the package {name} is missing: pip install 'octavo[training]'\n"
    required = importlib.metadata.requires("octavo")
    assert any(re.match(rf"{name}\b.*extra == ['\"]training['\"]", requirement) for requirement in required)
    assert list(tmp_path.iterdir()) == []


def test_a_package_of_some_datasets_is_named_as_well(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    arguments = words(base_output_directory=tmp_path, dataset_type="tfds", dataset_name="c4/en:3.0.1")
    assert run(arguments) == 1
    assert "needs the package 'tensorflow_datasets'; install it with: pip install " in capsys.readouterr().err


def test_an_error_of_the_program_is_not_hidden(tmp_path, monkeypatch):
    def fail(config, mesh, schedule):
        import no_such_module  # noqa: F401

    monkeypatch.setattr("octavo.train.run.train", fail)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        run(words(base_output_directory=tmp_path))


def test_a_comparison_prints_the_notes_of_its_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("octavo.cli.compare._compare", lambda *_: 0)
    assert main(["compare", "quantization=int8,fp8_full", "hardware=cpu", f"base_output_directory={tmp_path}"]) == 0
    assert capsys.readouterr().out.count("note: hardware has no effect: ") == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs Linux")
def test_a_disk_that_is_full(tmp_path):
    (tmp_path / "small").mkdir()
    mount = f"mount -t tmpfs -o size=2m none {tmp_path / 'small'}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("may not mount a small disk")
    arguments = words(base_output_directory="small", checkpoint_period=1, max_num_checkpoints_to_keep=8)
    # What is on the disk is gone with the process that mounted it, so it looks for itself.
    after = f"{sys.executable} -c \"from octavo.checkpoint import load; print(load('small/test/checkpoints').step)\""
    script = f'{mount} && "$@"; echo status $?; {after}'
    process = call("unshare", "-rm", "sh", "-c", script, "sh", *MODULE, *arguments, directory=tmp_path)
    saved = re.search(
        r"octavo train: the checkpoint of step (\d+) in \S+ was not saved: .*bytes are needed", process.stderr
    )
    assert saved, process.stdout + process.stderr
    last = int(saved[1]) - 1
    assert f"The last checkpoint is of step {last}" in process.stderr
    assert "Traceback" not in process.stderr
    assert process.stdout.splitlines()[-2:] == ["status 1", str(last)]
