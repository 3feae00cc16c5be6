"""A small layer by TPU's compiler, against bf16 and Qwix: no ratio is worse than when it was recorded.

The shapes are so small that quantization costs more than it gains: what is compared is the number of passes over the
arrays, and their bytes. `benchmarks/accelerators.py` has the layers of real models.
"""

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

import pytest

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
    monkeypatch.setitem(accelerators.LAYERS, "small", (accelerators.Layer(512), (2, 256, 256)))
    costs = {kind: accelerators.measure("small", kind, "v6e") for kind in ("bf16", "qwix-int8", "int8")}
    found = {kind: {"cycles": cost.cycles, "bytes": cost.bytes_accessed} for kind, cost in costs.items()}
    assert not worse(found, RECORDED["v6e"]), f"libtpu {version}, recorded with {RECORDED['libtpu']}: {found}"
