"""The package: what an import brings along, and that a wheel works where the repository is not."""

import os
import re
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
START = (ROOT / "docs" / "start.md").read_text()
# These are for the layers that need them; `import octavo` stays as quick as jax allows.
HEAVY = ("equinox", "flax", "optax", "orbax", "rich", "safetensors", "scipy", "sklearn", "tokenizers", "yaml")


def run(*command, cwd=None, timeout=600, **environment):
    """What a command prints; its errors are the failure's message."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))} | environment
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_importing_brings_nothing_that_only_some_need():
    names = [name for name in octavo.__all__ if name != "QuantStat"]  # which is Flax's
    program = f"import sys; from octavo import {', '.join(names)}; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    assert run(sys.executable, "-c", program) == "[]\n"


def test_the_versions_agree():
    assert PROJECT["version"] == octavo.__version__


def test_the_package_is_typed():
    assert (Path(octavo.__file__).parent / "py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The source distribution, unpacked: what is built from it is built from nothing else."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        assert not [name for name in tar.getnames() if name.endswith((".so", ".pyc"))]
        tar.extractall(folder, filter="data")
    return folder / f"octavo-{octavo.__version__}"


def wheel(source, folder, **environment):
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source, **environment)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def built(unpacked, tmp_path_factory):
    return wheel(unpacked, tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_for_every_platform(unpacked, tmp_path):
    for library in unpacked.rglob("*.so"):
        library.unlink()
    made = wheel(unpacked, tmp_path, CXX="no-such-compiler")
    assert made.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(made).namelist() if name.endswith(".so")]


@pytest.mark.slow
def test_the_wheel_has_what_the_program_reads(built):
    names = zipfile.ZipFile(built).namelist()
    for name in (
        "py.typed",
        "train/configs/base.yml",
        "report/templates/style.css",
        "report/templates/run.html",
        "kernels/cpu/matvec.cc",
    ):
        assert f"octavo/{name}" in names
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """An empty environment with the wheel and what it needs, in the versions of the lock."""
    folder = tmp_path_factory.mktemp("environment")
    pins = folder / "pins.txt"
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins.write_text("\n".join(line.removesuffix(" \\") for line in lines if re.match(r"[a-z0-9-]+==", line)))
    run(sys.executable, "-m", "uv", "venv", "--python", sys.executable, folder / "venv")
    python = folder / "venv" / "bin" / "python"
    wanted = f"{built}[training,models]"
    run(sys.executable, "-m", "uv", "pip", "install", "--python", python, "-c", pins, wanted, UV_LINK_MODE="copy")
    return python


@pytest.fixture
def elsewhere(environment, tmp_path):
    """Runs a program of the environment in an empty directory."""

    def call(name, *words):
        flags = "--xla_backend_optimization_level=1"
        return run(environment.with_name(name), *words, cwd=tmp_path, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)

    return call


@pytest.mark.slow
def test_the_environment_has_the_wheel_and_not_the_repository(elsewhere, environment):
    where = elsewhere("python", "-c", "import octavo; print(octavo.__file__)").strip()
    assert Path(where).is_relative_to(environment.parents[1])
    assert elsewhere("octavo", "--version") == f"octavo {octavo.__version__}\n"
    assert "commands:" in elsewhere("octavo", "--help")


@pytest.mark.slow
def test_the_code_of_the_quick_start_runs_from_the_wheel(elsewhere, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", START, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 3
    (tmp_path / "start.txt").write_text("\n".join(blocks))
    program = """
        import doctest
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        found = doctest.testfile("start.txt", module_relative=False, optionflags=flags)
        assert found.attempted > 10 and not found.failed, found
    """
    elsewhere("python", "-c", textwrap.dedent(program))


@pytest.mark.slow
def test_the_commands_of_the_quick_start_run_from_the_wheel(elsewhere, tmp_path):
    lines = re.findall(r"^octavo (.*)$", START, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["doctor", "compare", "train", "quantize", "generate"]
    for line in lines[1:]:
        # A tenth of the steps: that they run is the question, and not what comes of it.
        words = re.findall(r'"[^"]*"|\S+', line.replace("steps=40", "steps=4"))
        elsewhere("octavo", *(word.strip('"') for word in words))
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    assert (tmp_path / "served" / "octavo.json").exists()
