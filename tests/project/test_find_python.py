import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "find-python"
SHELL = shutil.which("sh") or "/bin/sh"

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a POSIX shell script")


def fake_python(path: Path, minor: int) -> Path:
    """An executable that answers the script's question as Python 3.`minor` would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answer = f"echo '{minor} {path}'" if minor >= 12 else ":"
    path.write_text(f"#!{SHELL}\n{answer}\n")
    path.chmod(0o755)
    return path


def find(home: Path, path: Path, **environment: str) -> subprocess.CompletedProcess:
    env = {"HOME": str(home), "PATH": str(path), **environment}
    return subprocess.run([SHELL, str(SCRIPT)], env=env, capture_output=True, text=True)


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bin"


def test_nothing_but_an_old_python_gets_one_line_that_says_what_to_do(home, path):
    fake_python(path / "python3", 11)
    found = find(home, path)
    assert found.returncode == 1
    assert found.stdout == ""
    assert len(found.stderr.splitlines()) == 1
    assert "needs Python 3.12 or newer" in found.stderr
    for command in ("uv python install 3.12", "pyenv install 3.12", "apt install python3.12"):
        assert command in found.stderr


def test_a_python_on_path_is_found(home, path):
    python = fake_python(path / "python3", 13)
    assert find(home, path).stdout == f"{python}\n"


def test_a_shim_that_fails_is_passed_over(home, path):
    shim = fake_python(path / "python3.12", 12)
    shim.write_text(f"#!{SHELL}\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    python = fake_python(path / "python3", 12)
    found = find(home, path)
    assert found.stdout == f"{python}\n"
    assert found.stderr == ""


def test_pyenv_is_searched(home, path):
    fake_python(path / "python3", 11)
    python = fake_python(home / ".pyenv/versions/3.13.0/bin/python", 13)
    assert find(home, path).stdout == f"{python}\n"


def test_pyenv_root_is_respected(home, path, tmp_path):
    python = fake_python(tmp_path / "elsewhere/versions/3.12.1/bin/python", 12)
    assert find(home, path, PYENV_ROOT=str(tmp_path / "elsewhere")).stdout == f"{python}\n"


def test_uv_data_is_searched(home, path):
    python = fake_python(home / ".local/share/uv/python/cpython-3.12.9-linux/bin/python3", 12)
    assert find(home, path).stdout == f"{python}\n"


def test_uv_is_asked(home, path, tmp_path):
    python = fake_python(tmp_path / "uv-managed/python3.14", 14)
    uv = path / "uv"
    uv.parent.mkdir()
    uv.write_text(f'#!{SHELL}\n[ "$4" = ">=3.14" ] && echo {python}\n')
    uv.chmod(0o755)
    assert find(home, path).stdout == f"{python}\n"


@pytest.mark.parametrize(("minors", "chosen"), [((14, 13, 12), 12), ((14, 13), 13), ((14, 11), 14)])
def test_twelve_is_preferred_then_thirteen_then_newer(home, path, minors, chosen):
    pythons = {minor: fake_python(home / f".pyenv/versions/3.{minor}.0/bin/python", minor) for minor in minors}
    assert find(home, path).stdout == f"{pythons[chosen]}\n"


def test_a_real_python_answers_the_question(home):
    base = Path(sys._base_executable)
    found = find(home, base.parent)
    check = "import sys; print(sys.version_info >= (3, 12))"
    answer = subprocess.run([found.stdout.strip(), "-c", check], capture_output=True, text=True)
    assert answer.stdout == "True\n"
