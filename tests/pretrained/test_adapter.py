"""LoRA adapters in PEFT's files."""

import functools
import json
import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from octavo.cli import main
from octavo.files.safetensors import SafeTensors
from octavo.lora import LoraRule, adapted
from octavo.models import apply
from octavo.pretrained import open_model, read_adapter, with_adapter, write_adapter
from octavo.pretrained.calibrated import float_params
from tests.pretrained.conftest import SMALL

TOKENS = np.arange(24).reshape(2, 12)
RULE = LoraRule(module_path=".*(query|wo).*", rank=4, alpha=6.0, lora_b_initializer=jax.nn.initializers.normal(0.1))


@pytest.fixture(scope="module")
def tuned():
    return adapted(functools.partial(apply, SMALL), RULE)


@pytest.fixture
def written(tmp_path, small, tuned):
    adapters = tuned.init(jax.random.key(1), small.params(), TOKENS)
    write_adapter(tmp_path, SMALL, adapters, rank=4, alpha=6.0, base="small")
    return tmp_path, adapters


@pytest.mark.slow
def test_an_adapter_is_written_as_peft_does_and_gives_the_same_logits(written, small, tuned):
    directory, adapters = written
    with SafeTensors(directory / "adapter_model.safetensors") as file:
        name = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
        a = adapters["decoder"]["layers_1"]["self_attention"]["query"]["kernel_lora_a"]
        np.testing.assert_array_equal(file.read(name.format("A")), a.T)
        assert file.read(name.format("B")).shape == (64, 4)
        assert len(file.names()) == 2 * 2 * 2
    settings = json.loads((directory / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (4, 6.0, ["down_proj", "q_proj"])
    merged = with_adapter(small, read_adapter(directory, SMALL))
    logits = jax.jit(tuned)(adapters, small.params(), TOKENS)[0]
    np.testing.assert_allclose(apply(SMALL, merged.params(), TOKENS)[0], logits, rtol=1e-4, atol=1e-4)


def test_adapters_of_stacked_layers_are_written_layer_by_layer(written, tmp_path):
    directory, adapters = written
    layers = [adapters["decoder"][f"layers_{i}"] for i in range(2)]
    stacked = {"decoder": {"layers": jax.tree.map(lambda *xs: np.stack(xs), *layers)}}
    write_adapter(tmp_path / "stacked", SMALL.replace(scan_layers=True), stacked, rank=4, alpha=6.0)
    for name, value in read_adapter(directory, SMALL).params.items():
        np.testing.assert_array_equal(read_adapter(tmp_path / "stacked", SMALL).params[name], value)


def test_rslora_divides_by_the_root_of_the_rank(written):
    directory, _ = written
    settings = json.loads((directory / "adapter_config.json").read_text())
    path = "decoder/layers_0/mlp/wo/kernel"
    plain = read_adapter(directory, SMALL).delta(path)
    (directory / "adapter_config.json").write_text(json.dumps({**settings, "use_rslora": True}))
    np.testing.assert_allclose(read_adapter(directory, SMALL).delta(path), 2 * plain, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "an adapter of the type IA3: only LORA is supported"),
        ({"use_dora": True}, "use_dora=True is not supported; train the adapter with use_dora=False"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
    ],
)
def test_other_kinds_of_adapters(changes, message, written):
    directory, _ = written
    settings = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**settings, **changes}))
    with pytest.raises(ValueError, match=message):
        read_adapter(directory, SMALL)


def test_an_adapter_of_another_model(written, small, tmp_path):
    directory, _ = written
    adapter = read_adapter(directory, SMALL)
    with pytest.raises(ValueError, match=r"is not an adapter of this model: it has 'base_model\.model\.model\.layers"):
        read_adapter(directory, SMALL.replace(num_layers=1))
    wrong = {
        path: value[:, :2] if "wo" in path and path.endswith("b") else value for path, value in adapter.params.items()
    }
    with pytest.raises(ValueError, match=r"is not an adapter of small: .*the model has one of the shape \(128, 64\)"):
        with_adapter(small, type(adapter)(wrong, 4, 6.0))
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path / "nowhere", SMALL)


PEFT = Path(__file__).parent / "golden" / "peft"


def peft_logits():
    return np.asarray(json.loads((PEFT / "logits.json").read_text()))


def logits_of(model):
    tokens = np.arange(12)[None] * 5 % 32
    return apply(model.config, float_params(model), tokens)[0]


def test_an_adapter_of_peft_gives_its_logits():
    """Written by PEFT itself, see golden/make_peft.py: rsLoRA, with another rank for one module."""
    base = open_model(PEFT / "base")
    merged = with_adapter(base, read_adapter(PEFT / "adapter", base.config))
    np.testing.assert_allclose(logits_of(merged), peft_logits(), atol=2e-5)
    assert np.abs(logits_of(base) - peft_logits()).max() > 0.05


def test_commands_merge_an_adapter(tmp_path, capsys):
    base, out = str(PEFT / "base"), tmp_path / "low"
    assert main(["quantize", base, "int8", str(out), "--adapter", str(PEFT / "adapter")]) == 0
    assert np.abs(logits_of(open_model(out)) - peft_logits()).max() < 0.02
    for command in (["serve", "--port", "0"], ["generate", "--prompt", "a"], ["quantize", "int8", "other"]):
        assert main([command[0], base, *command[1:], "--adapter", str(tmp_path / "none")]) == 2
        assert "has no adapter_config.json" in capsys.readouterr().err


@pytest.mark.slow
def test_peft_reads_what_is_written(tmp_path):
    """With OCTAVO_PEFT_PYTHON, an interpreter that has torch, transformers and peft."""
    python = os.environ.get("OCTAVO_PEFT_PYTHON")
    if not python:
        pytest.skip("OCTAVO_PEFT_PYTHON is not set: PEFT and torch are not dependencies of the tests")
    base = open_model(PEFT / "base")
    tuned = adapted(functools.partial(apply, base.config), RULE)
    adapters = tuned.init(jax.random.key(1), base.params(), TOKENS)
    write_adapter(tmp_path, base.config, adapters, rank=RULE.rank, alpha=RULE.alpha)
    done = subprocess.run(
        [python, PEFT.with_name("make_peft.py"), tmp_path], capture_output=True, text=True, check=True
    )
    merged = with_adapter(base, read_adapter(tmp_path, base.config))
    np.testing.assert_allclose(logits_of(merged), json.loads(done.stdout.splitlines()[-1]), atol=2e-5)
