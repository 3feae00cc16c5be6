import json
import subprocess
import sys

import pytest

from octavo.cli import doctor, machine
from octavo.cli.doctor import Requirement, at_least, missing, read_requirements, show
from octavo.cli.machine import Accelerator
from octavo.cli.probe import DTYPES

KERNELS = {"ready": True, "status": "CPU kernels in AVX2"}
PROBED = {"error": None, "platform": "cpu", "devices": ["cpu", "cpu"], "kernels": KERNELS, "dots": {}}


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch):
    monkeypatch.setattr(machine, "compiler", lambda: "/usr/bin/c++")
    monkeypatch.setattr(machine, "accelerators", list)


@pytest.mark.parametrize(
    ("version", "bound", "enough"),
    [
        ("0.12.0.1", ">=0.12", True),
        ("0.12", ">=0.12", True),
        ("0.9.2", ">=0.12", False),
        ("0.12.0rc1", ">=0.12", True),
        ("1.0", "", True),
        ("2.0", "<3,>=2.1", False),
    ],
)
def test_at_least(version, bound, enough):
    assert at_least(version, bound) is enough


def test_requirements_are_read_from_metadata():
    lines = ["jax>=0.12", "no-such-thing>=1; extra == 'flax'", "mkdocs-material>=9; extra == 'docs'"]
    core, extra = read_requirements(lines)
    assert (core.name, core.bound, core.extra) == ("jax", ">=0.12", None)
    assert core.is_met
    assert extra == Requirement("no-such-thing", ">=1", "flax", None)


def test_nothing_is_missing_where_all_is_met():
    assert missing([Requirement("jax", ">=0.12", None, "0.12.0")], PROBED) == []


def test_an_old_jax_is_essential():
    (item,) = missing([Requirement("jax", ">=0.12", None, "0.9.2")], PROBED)
    assert item["problem"] == "required: jax 0.9.2 (needs >=0.12)"
    assert item["fix"] == "python -m pip install 'jax>=0.12'"
    assert item["essential"]


def test_an_absent_extra_is_named_with_its_packages():
    requirements = [Requirement(name, "", "training", None) for name in ("optax", "rich")]
    (item,) = missing(requirements, PROBED)
    assert item == {
        "problem": "extra 'training': optax, rich",
        "fix": "python -m pip install optax rich",
        "essential": False,
    }


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(machine, "compiler", lambda: None)
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    (item,) = missing([], PROBED)
    assert "no C++ compiler" in item["problem"]
    assert item["fix"] == "apt install g++"


def test_kernels_that_are_not_built():
    (item,) = missing([], {**PROBED, "kernels": {"ready": False, "status": "CPU kernels are not built: run this"}})
    assert item == {
        "problem": "CPU kernels are not built",
        "fix": "python -m octavo.kernels.build",
        "essential": False,
    }
    assert missing([], {**PROBED, "kernels": None}) == []


def test_an_accelerator_that_jax_does_not_use(monkeypatch):
    monkeypatch.setattr(machine, "accelerators", lambda: [Accelerator("TPU", "tpu", "jax[tpu]")])
    (item,) = missing([], PROBED)
    assert item["problem"] == "TPU present, but JAX runs on cpu"
    assert item["fix"] == "python -m pip install --upgrade 'jax[tpu]'"
    assert missing([], {**PROBED, "platform": "tpu"}) == []


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.11.9")
    (item,) = missing([], PROBED)
    assert item["problem"] == "Python 3.11.9 is too old"
    assert item["fix"] == "uv python install 3.12"


def test_a_jax_that_does_not_start():
    (item,) = missing([], {**PROBED, "error": "no backend"})
    assert item["problem"] == "JAX does not run: no backend"
    assert item["essential"]


def test_the_text_shows_speeds_reasons_and_fixes():
    text = show(
        {
            "octavo": "0.1.0",
            "python": "3.12.1",
            "versions": {"jax": "0.12.0", "flax": None},
            "cpu": {"model": "Some CPU", "cores": 2, "has": ["avx2"], "lacks": ["amx_int8"]},
            "compiler": None,
            **PROBED,
            "dots": {
                "float32": {"runs": True, "speed": 1.0, "verdict": "reference"},
                "int8": {"runs": True, "speed": 3.5, "verdict": "native"},
                "int4": {"runs": False, "reason": "not supported", "verdict": "unsupported"},
            },
            "missing": [{"problem": "extra 'flax': flax", "fix": "python -m pip install flax", "essential": False}],
        }
    )
    assert "int8            runs   3.50x  native" in text
    assert "int4            unsupported   not supported" in text
    assert "2 x cpu (backend cpu)" in text
    assert "  kernels   CPU kernels in AVX2\n" in text
    assert "    python -m pip install flax" in text


@pytest.mark.slow
def test_the_command_tries_every_type_and_keeps_stderr_clean():
    done = subprocess.run([sys.executable, "-m", "octavo", "doctor", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert list(report["dots"]) == list(DTYPES)
    assert report["dots"]["float32"]["verdict"] == "reference"
    assert report["dots"]["int8"]["runs"]


def test_a_busy_machine_is_not_a_broken_jax():
    probed = {"error": "no answer in 15 s", "platform": None, "devices": [], "kernels": None, "dots": {}}
    busy = [item for item in doctor.missing([], probed) if "JAX" in item["problem"]]
    assert [item["essential"] for item in busy] == [False]
    assert busy[0]["problem"] == "JAX gave no answer in 15 s: the machine or its device is busy"
    broken = doctor.missing([], probed | {"error": "the process ended: exit status 1"})
    assert any(item["essential"] and item["problem"].startswith("JAX does not run") for item in broken)
