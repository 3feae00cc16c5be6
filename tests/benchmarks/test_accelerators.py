"""A small layer by TPU's compiler, against bf16 and Qwix: no ratio is worse than when it was recorded.

The shapes are so small that quantization costs more than it gains: what is compared is the number of passes over the
arrays, and their bytes. `benchmarks/accelerators.py` has the layers of real models.
"""

import importlib.metadata
import importlib.util
import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from octavo.hlo.cost import KernelCall, ProgramCost
from octavo.hlo.text import Shape

FOLDER = Path(__file__).parents[2] / "benchmarks"
RECORDED = json.loads(Path(__file__).with_name("accelerators.json").read_text())
SLACK = 1.03


def worse(found, recorded):
    """The ratios of int8 to a peer that are more than 3 % above the recorded ones."""
    ratio = lambda costs, peer, name: costs["int8"][name] / costs[peer][name]  # noqa: E731
    pairs = [(peer, name) for peer in ("bf16", "qwix-int8") for name in ("cycles", "bytes")]
    return [pair for pair in pairs if ratio(found, *pair) > SLACK * ratio(recorded, *pair)]


def test_a_slower_program_is_found():
    recorded = RECORDED["v6e"]
    assert not worse(recorded, recorded)
    slower = recorded | {"int8": {"cycles": 1.04 * recorded["int8"]["cycles"], "bytes": recorded["int8"]["bytes"]}}
    assert worse(slower, recorded) == [("bf16", "cycles"), ("qwix-int8", "cycles")]


@pytest.fixture
def accelerators(monkeypatch):
    pytest.importorskip("qwix")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "timing", raising=False)
    spec = importlib.util.spec_from_file_location("accelerators", FOLDER / "accelerators.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "accelerators", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax, by Qwix
@pytest.mark.compiler("tpu")
def test_ratios_of_a_layer_are_those_recorded(accelerators, monkeypatch):
    version = importlib.metadata.version("libtpu")
    monkeypatch.setitem(
        accelerators.LAYERS, "small", (accelerators.LAYERS["layer-8b"][0].clone(hidden=512), (2, 256, 256))
    )
    costs = {kind: accelerators.measure("small", kind, "v6e") for kind in ("bf16", "qwix-int8", "int8")}
    found = {kind: {"cycles": cost.cycles, "bytes": cost.bytes_accessed} for kind, cost in costs.items()}
    assert not worse(found, RECORDED["v6e"]), f"libtpu {version}, recorded with {RECORDED['libtpu']}: {found}"


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax, by Qwix
@pytest.mark.parametrize("layer", ["linear", "mlp", "scores", "flash-scores", "attention", "moe", "layer-1b"])
def test_layers_can_be_traced(accelerators, layer):
    gradient, shapes = accelerators.program(layer, "bf16")
    assert jax.tree.map(jnp.shape, jax.eval_shape(gradient, *shapes)) == jax.tree.map(jnp.shape, shapes)


def test_a_kernel_takes_the_larger_of_two_times(accelerators, monkeypatch):
    chip = types.SimpleNamespace(int8_ops_per_second=2e12, bf16_ops_per_second=1e12, mem_bw_bytes_per_second=1e12)
    monkeypatch.setattr(accelerators.pltpu, "get_tpu_info", lambda: chip)
    monkeypatch.setattr(accelerators, "devices", lambda _: jax.devices())
    monkeypatch.setitem(accelerators.LAYERS, "tiny", (None, (1, 1024, 3 * 128)))
    queries = Shape("bf16", (1, 1024, 128))
    flops = 3 * 512 * 512 * 2 * 128  # of one matmul: three of four blocks

    def cycles(name, *arrays):
        return accelerators.kernel_cycles(ProgramCost((), kernels=(KernelCall(name, "", arrays),)), "v6e", "tiny")

    assert cycles("jvp_int8_flash_backward_.1", queries) == round((4 * flops / 2e12 + flops / 1e12) * 1.75e9)
    assert cycles("splash_mha_dq_no_residuals", queries) == round(3 * flops / 1e12 * 1.75e9)
    large = Shape("f32", (10**9,))
    assert cycles("int8_flash_forward", queries, large) == round((4e9 + queries.bytes) / 1e12 * 1.75e9)
