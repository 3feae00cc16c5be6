"""The completion scripts know every command, option and key; bash is asked what it completes."""

import shutil
import subprocess

import pytest

import octavo
from octavo.cli import main
from octavo.train.config import keys


@pytest.fixture(scope="module")
def scripts():
    import contextlib
    import io

    found = {}
    for shell in ("bash", "zsh", "fish"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["completion", shell]) == 0
        found[shell] = printed.getvalue()
    return found


def bash(script, *words):
    """What bash offers for the last of the words."""
    typed = " ".join(f"'{word}'" for word in words)
    program = f'{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _octavo; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run([shutil.which("bash") or "bash", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_option_and_key_is_there(scripts, shell):
    script = scripts[shell]
    for command in ("doctor", "plan", "verify", "quantize", "eval", "serve", "generate", "report", "train", "compare"):
        assert command in script
    for word in ("--at-least" if shell != "fish" else "-l at-least", "--kv-axis" if shell != "fish" else "-l kv-axis"):
        assert word in script
    assert all(f"{key}=" in script for key in keys())
    assert all(name in script for name in octavo.recipes())


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("octavo", "doc"), ["doctor"]),
        (("octavo", "verify", "--at"), ["--at-least"]),
        (("octavo", "train", "quantization_st"), ["quantization_start_step=", "quantization_stop_step="]),
        (("octavo", "train", "quantization", "=", "te_fp8_d"), ["te_fp8_delayedscaling"]),
        (("octavo", "compare", "use_qwix_quantization", "="), ["true", "false"]),
        (("octavo", "completion", "f"), ["fish"]),
        (("octavo", "doctor", "--nothing"), []),
    ],
)
def test_bash_completes(scripts, words, offered):
    assert bash(scripts["bash"], *words) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_have_no_syntax_errors(scripts, shell):
    program = shutil.which(shell)
    if not program:
        pytest.skip(f"no {shell}")
    done = subprocess.run([program, "-n"], input=scripts[shell], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "tcsh"])
    assert "tcsh" in capsys.readouterr().err
