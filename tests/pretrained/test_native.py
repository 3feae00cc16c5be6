"""What is written is what is read: converted models, and the runs of the trainer."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo import QArray, quantized
from octavo._tree import flatten_paths, unflatten_paths
from octavo.checkpoint import CheckpointError, load
from octavo.cli import main
from octavo.models import apply, unstack_layers
from octavo.pretrained import convert_model, open_model, weight_rules
from octavo.pretrained.native import write_model
from tests.cases import slow_except

pytestmark = pytest.mark.standard_promotion


def same(a, b):
    assert type(a) is type(b) or not isinstance(a, QArray)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("asked", slow_except(["int4"], ["int8", "int4", "nvfp4"]))
def test_a_converted_model_comes_back_bit_for_bit(small, tmp_path, asked):
    params, _ = convert_model(small, weight_rules(asked, small.config))
    write_model(small, params, tmp_path / "m", facts={"bits_per_weight": 1.0})
    found = open_model(tmp_path / "m")
    assert found.config == small.config
    assert found.name == "small"
    assert set(found.leaves) == set(params)
    for path, leaf in found.leaves.items():
        assert leaf.shape == small.leaves[path].shape
        same(leaf.load(), params[path])
    assert found.tokenizer.encode("né") == small.tokenizer.encode("né")
    tokens = jnp.arange(10)[None]
    wanted = jax.jit(small.function())(unflatten_paths(params), tokens)[0]
    np.testing.assert_array_equal(jax.jit(found.function())(found.params(), tokens)[0], wanted)


def test_a_damaged_model_is_named(small, tmp_path):
    params, _ = convert_model(small, weight_rules("int8", small.config))
    write_model(small, params, tmp_path, facts={})
    file = max((tmp_path / "params").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises((CheckpointError, ValueError), match=file.name):
        open_model(tmp_path).params()
    (tmp_path / "octavo.json").write_text("{}")
    with pytest.raises(ValueError, match=r"octavo.json is damaged"):
        open_model(tmp_path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run in float and one in int8, a few steps each."""
    directory = tmp_path_factory.mktemp("runs")
    words = ["model_name=1m", "steps=2", "dataset_type=synthetic", "max_target_length=32", "per_device_batch_size=2"]
    words += ["num_devices=1"]
    words += [f"base_output_directory={directory}", "quantization_metrics_interval=0", "enable_tensorboard=false"]
    for name in ("", "int8", "qat_int4", "fp8_gpu"):
        low = f"save_quantized_params_path={directory / f'low-{name}'}" if name else "eval_steps=1"
        run = ["train", f"run_name=run-{name}", f"quantization={name}", "use_qwix_quantization=true", low, *words]
        # In a process of its own: a fixture of the module has no markers, and Optax needs JAX's own promotion.
        done = subprocess.run([sys.executable, "-m", "octavo", *run], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "qat_int4", "fp8_gpu"])
def test_what_was_trained_is_served_bit_for_bit(runs, tmp_path, name):
    source = open_model(runs / f"run-{name}")
    assert any(rule.weight_qtype is not None for rule in source.rules)
    out = tmp_path / "served"
    assert main(["quantize", str(runs / f"run-{name}"), "trained", str(out), "--quiet"]) == 0
    served = open_model(out)
    # The trainer's own conversion of the same parameters, layers stacked.
    trained = open_model(runs / f"low-{name}")
    for path, leaf in served.leaves.items():
        ours, theirs = leaf.load(), trained.leaves[path].load()
        assert isinstance(ours, QArray) == isinstance(theirs, QArray)
        same(ours.unpack(), theirs.unpack()) if isinstance(ours, QArray) else same(ours, theirs)
    tokens = jnp.asarray([[1, 5, 9, 2, 7, 3]])
    # As in training: float parameters, rounded by the rules in every product.
    low = quantized(functools.partial(apply, source.config), source.rules, weights="params")
    wanted = jax.jit(low.stateful(source.state, update=False))(source.params(), tokens)[0][0]
    histories = flatten_paths(source.state)
    assert bool(histories) == (name == "fp8_gpu")
    assert all(np.any(history) for history in histories.values())
    np.testing.assert_array_equal(jax.jit(served.function())(served.params(), tokens)[0], wanted)


@pytest.mark.slow
def test_a_run_in_float_is_opened_with_its_layers_apart(runs):
    source = open_model(runs / "run-")
    found = load(runs / "run-" / "checkpoints", subtree="params").state
    wanted = flatten_paths(unstack_layers(found))
    assert set(wanted) == set(source.leaves)
    for path, leaf in source.leaves.items():
        np.testing.assert_array_equal(leaf.load(), wanted[path])
    assert source.rules == ()
    assert open_model(runs / "run-" / "checkpoints").config == source.config
    with pytest.raises(ValueError, match="was trained in float"):
        weight_rules("trained", source.config, trained=source.rules)


def test_what_is_no_model_says_what_one_is(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*missing: give the path of a model"):
        open_model(tmp_path / "missing")
    with pytest.raises(ValueError, match="is not a model that Octavo can open"):
        open_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="a pickle, which may run code when it is loaded: save the model as"):
        open_model(tmp_path)


def test_a_source_that_is_not_what_it_says_raises(small):
    leaves = dict(small.leaves)
    del leaves["decoder/decoder_norm/scale"]
    with pytest.raises(ValueError, match=r"small: .*: there is no 'decoder/decoder_norm/scale'"):
        type(small)(small.config, leaves, origin=small.origin)
    with pytest.raises(ValueError, match="but the config makes it"):
        type(small)(small.config.replace(mlp_dim=64), small.leaves, origin=small.origin)


def test_commands_write_a_card_and_say_what_to_do_next(small, tmp_path, capsys):
    params, _ = convert_model(small, weight_rules("int8", small.config))
    write_model(small, params, tmp_path / "first", facts={})
    assert main(["quantize", str(tmp_path / "first"), "int4", str(tmp_path / "second")]) == 0
    out = capsys.readouterr().out
    assert "int8 -> int4 g32" in out
    assert "bits per weight" in out
    assert "next: octavo generate" in out
    card = (tmp_path / "second" / "README.md").read_text()
    assert "octavo quantize first int4 second" in card
    assert "| stored as int4 g32 |" in card
    assert json.loads((tmp_path / "second" / "octavo.json").read_text())["rules"] == []
    assert main(["quantize", str(tmp_path / "first"), "int4", str(tmp_path / "second")]) == 2
    assert "is there already: choose another place, or pass --force" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "first"), "int5x", str(tmp_path / "third")]) == 2
    assert "is not a number format" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()
    assert main(["quantize", str(tmp_path / "first"), "int8", str(tmp_path / "x"), "--format", "onnx"]) == 2
    assert "--format onnx: one of awq, compressed-tensors, gguf, gptq, octavo, safetensors" in capsys.readouterr().err


@pytest.mark.slow
def test_eval_prints_what_it_found(small, tmp_path, capsys):
    params, _ = convert_model(small, weight_rules("int4", small.config))
    write_model(small, params, tmp_path / "low", facts={})
    write_model(small, {p: leaf.load() for p, leaf in small.leaves.items()}, tmp_path / "float", facts={})
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    words = ["eval", str(tmp_path / "low"), "--text", str(tmp_path / "text.txt"), "--length", "64"]
    words += ["--out", str(tmp_path / "evaluation")]
    assert main([*words, "--against", str(tmp_path / "float")]) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out
    assert "same top token" in out
    assert "peak memory" in out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 180
    assert main(["eval", str(tmp_path / "low"), "--text", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err
