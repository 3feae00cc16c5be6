import subprocess
import sys
from importlib.metadata import version

import pytest

import octavo.cli
from octavo.cli import main


def test_help_names_the_commands_and_what_to_type_next(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "doctor" in shown
    assert "Next: octavo doctor" in shown


def test_no_command_prints_the_help(capsys):
    assert main([]) == 0
    assert "usage: octavo" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"octavo {version('octavo')}\n"


def test_an_unknown_command_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["docter"])
    assert "docter" in capsys.readouterr().err


def test_python_m_octavo():
    shown = subprocess.run([sys.executable, "-m", "octavo", "--version"], capture_output=True, text=True)
    assert shown.stdout == f"octavo {version('octavo')}\n"


def test_help_imports_neither_jax_nor_numpy():
    script = f"""
import sys, types
package = types.ModuleType("octavo")
package.__path__ = [{octavo.__path__[0]!r}]
sys.modules["octavo"] = package
import octavo.cli
octavo.cli.main([])
assert not {{"jax", "numpy", "octavo.cli.doctor"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
