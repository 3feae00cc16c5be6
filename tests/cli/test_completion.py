"""The completion scripts know every command, option and key; bash is asked what it completes."""

import shutil
import subprocess
import sys

import pytest

import octavo
from octavo.cli import main
from octavo.cli.completion import SHELLS
from octavo.train.config import keys


@pytest.fixture
def script(capsys):
    def complete(shell):
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return complete


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_option_and_key_is_there(script, shell):
    text = script(shell)
    for word in (
        "doctor",
        "plan",
        "verify",
        "quantize",
        "eval",
        "serve",
        "generate",
        "embed",
        "report",
        "train",
        "compare",
    ):
        assert word in text
    assert "at-least" in text
    assert "kv-axis" in text
    assert all(f"{key}=" in text for key in keys())
    assert all(f"quantization={name}" in text for name in octavo.recipes(aliases=True))


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_scripts_have_no_syntax_errors(script, shell):
    done = subprocess.run([shell, "-n"], input=script(shell), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bash_completes(script):
    lines = {
        "tr": ["train"],
        "verify --at": ["--at-least"],
        "completion ": list(SHELLS),
        "train steps=9 quantization_st": ["quantization_start_step=", "quantization_stop_step="],
        "compare quantization=te_fp8_d": ["quantization=te_fp8_delayedscaling"],
        "doctor --nothing": [],
    }
    program = script("bash")
    for line in lines:
        words = " ".join(f"'{word}'" for word in ("octavo", *line.split(" ")))
        program += f"\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=(); "
        program += '_shtab_octavo octavo "${COMP_WORDS[COMP_CWORD]}"; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert [line.split() for line in done.stdout.splitlines()] == list(lines.values()), done.stderr


def test_shells_that_shtab_does_not_support(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "fish"])
    assert "fish" in capsys.readouterr().err


def test_a_missing_shtab_is_named_with_its_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'octavo[completion]'" in capsys.readouterr().err
