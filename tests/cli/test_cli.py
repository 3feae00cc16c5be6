import os
import subprocess
import sys
from importlib.metadata import version

import pytest

import octavo
from octavo.cli import main, make_parser

COMMANDS = (
    "doctor",
    "plan",
    "verify",
    "compile",
    "quantize",
    "eval",
    "serve",
    "generate",
    "embed",
    "report",
    "completion",
)


def test_help_names_the_commands_and_what_to_type_next(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(command in shown for command in (*COMMANDS, "train", "compare"))
    assert "Next: octavo doctor" in shown


def test_no_command_prints_the_help(capsys):
    assert main([]) == 0
    assert "usage: octavo" in capsys.readouterr().out


def test_a_reader_that_closes_the_pipe_is_no_error(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["train", "--help"]) == 0


def test_an_unknown_command_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["docter"])
    assert "docter" in capsys.readouterr().err


def test_python_m_octavo():
    shown = subprocess.run([sys.executable, "-m", "octavo", "--version"], capture_output=True, text=True)
    assert shown.stdout == f"octavo {version('octavo')}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "xample" in capsys.readouterr().out or command == "doctor"


def test_the_parser_of_all_commands_imports_neither_jax_nor_numpy():
    script = "import sys, octavo.cli; octavo.cli.make_parser(); assert not {'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert make_parser().prog == "octavo"


def test_the_help_of_train_does_not_import_jax():
    script = "import sys, octavo.cli; octavo.cli.main(['train', '--help']); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_public_names_are_imported_when_they_are_used():
    assert all(getattr(octavo, name) is not None for name in octavo.__all__)
    assert set(octavo.__all__) <= set(dir(octavo))
    assert octavo.kernels.status()
    with pytest.raises(AttributeError, match="module 'octavo' has no attribute 'quantise'"):
        _ = octavo.quantise


def test_a_misspelt_command_is_suggested(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["trian"])
    assert stop.value.code == 2
    assert "there is no command 'trian'; did you mean 'train'" in capsys.readouterr().err
