"""Whether the library is there, how it is built, and what is said when it is not."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import jax.numpy as jnp
import pytest

from octavo import kernels
from octavo.kernels import build, compiling, library

ROOT = Path(__file__).parents[2]


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A library that is not built yet."""
    path = tmp_path / "_cpu.so"
    monkeypatch.setattr(compiling, "library", lambda: path)
    return path


def test_without_a_library_the_status_says_what_to_run(nowhere, monkeypatch):
    found = library.load.__wrapped__()
    assert found.versions == ()
    assert found.problem == "not built: run `python -m octavo.kernels.build`"
    monkeypatch.setattr(library, "load", lambda: found)
    assert not kernels.available()
    assert kernels.status() == "CPU kernels are not built: run `python -m octavo.kernels.build`"
    assert kernels.versions() == ()
    with pytest.raises(RuntimeError, match="CPU kernels are not built: run `python -m"):
        kernels.int_matvec(jnp.ones((1, 2), jnp.int8), jnp.ones((2, 3), jnp.int8))
    with pytest.raises(RuntimeError, match="CPU kernels are not built: run `python -m"):
        kernels.matvec(jnp.ones((1, 2)), jnp.ones((2, 3), jnp.int8), jnp.ones((1, 3)))


def test_a_file_that_is_no_library_is_no_crash(nowhere):
    nowhere.write_text("not a library")
    found = library.load.__wrapped__()
    assert found.versions == ()
    assert found.problem.startswith("built but not usable (")


@pytest.mark.skipif(not kernels.available(), reason=kernels.status())
def test_the_status_names_the_fastest_instructions():
    assert kernels.status() == f"CPU kernels in {kernels.versions()[-1].upper().replace('_', '-')}"
    assert kernels.versions()[0] == "portable"
    with kernels.disabled():
        assert kernels.status() == "CPU kernels are switched off here by octavo.kernels.disabled()"
    assert kernels.available()


def test_no_compiler_is_one_line(nowhere, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    said = []
    assert compiling.build_if_needed(said.append) is None
    assert said == ["octavo: CPU kernels are not built, XLA's own code runs instead: no C++ compiler was found"]


def test_a_build_that_fails_is_one_line_and_leaves_no_old_library(nowhere, monkeypatch):
    nowhere.write_text("old")
    os.utime(nowhere, (0, 0))
    monkeypatch.setenv("CXX", "false")
    said = []
    assert compiling.build_if_needed(said.append) is None
    assert said == ["octavo: CPU kernels are not built, XLA's own code runs instead: false failed: exit status 1"]
    assert not nowhere.exists()


def test_a_compiler_that_is_not_there_is_one_line(nowhere, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(compiling.BuildError, match="no-such-compiler cannot be run: No such file or directory"):
        compiling.build()


def test_missing_headers_are_reported(nowhere, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.ffi", None)
    with pytest.raises(compiling.BuildError, match="jax, whose headers are needed, is not installed"):
        compiling.build()


def test_a_library_is_current_until_a_source_is_edited(nowhere):
    assert not compiling.is_current()
    nowhere.write_text("")
    assert compiling.is_current()
    os.utime(nowhere, (0, 0))
    assert not compiling.is_current()


def test_by_hand(nowhere, monkeypatch, capsys):
    monkeypatch.setattr(build, "build", lambda: nowhere)
    assert build.main() == 0
    assert capsys.readouterr().out == f"{nowhere}\n"

    def fail():
        raise compiling.BuildError("no C++ compiler was found")

    monkeypatch.setattr(build, "build", fail)
    assert build.main() == 1
    assert capsys.readouterr().err == "octavo: no C++ compiler was found\n"


@pytest.mark.slow
@pytest.mark.skipif(not kernels.available(), reason=kernels.status())
def test_a_wheel_has_the_library_and_says_for_which_platform(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-any" not in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert f"octavo/kernels/{compiling.library().name}" in names
    assert "octavo/kernels/cpu/matvec.cc" in names


@pytest.mark.slow
@pytest.mark.skipif(not kernels.available(), reason=kernels.status())
def test_the_sources_compile(nowhere):
    assert compiling.build() == nowhere
    assert compiling.is_current()
    assert library.ctypes.CDLL(str(nowhere)).octavo_versions
