"""The completion scripts know every command, option and key; bash, zsh and fish are asked what they complete."""

import contextlib
import os
import re
import select
import shutil
import struct
import subprocess
import time

import pytest

import octavo
from octavo.cli import main
from octavo.train.config import keys


@pytest.fixture(scope="module")
def scripts():
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
    assert all(name in script for name in octavo.recipes(aliases=True))


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_offers_nothing_where_there_is_nothing(scripts):
    assert bash(scripts["bash"], "octavo", "doctor", "--nothing") == []


CODES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>]|\][^\x07]*\x07)")
# To be told the line as it is after completion, and to see all there is to choose from at once.
STARTS = {
    "bash": (
        ["--norc", "--noprofile", "-i"],
        "bind 'set show-all-if-ambiguous on'; bind 'set page-completions off'; bind 'set completion-query-items 0'; "
        "bind 'set enable-bracketed-paste off'; source {script}; told() {{ echo \"<<$READLINE_LINE>>\"; }}; "
        "bind -x '\"\\C-x\\C-x\": told'",
    ),
    "zsh": (
        ["-f", "-i"],
        "LISTMAX=9999; autoload -U compinit && compinit -D -u && source {script}; "
        'told() {{ print -r -- "<<$BUFFER>>"; }}; zle -N told; bindkey "^X^X" told',
    ),
}


class Typist:
    """A shell at a terminal: `complete` types a line and a tab, and gives the words it then shows and the line."""

    def __init__(self, shell, script):
        import fcntl
        import pty
        import termios

        options, setup = STARTS[shell]
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 400, 400, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "PS1": "% ", "ZDOTDIR": str(script.parent)}
        self.process = subprocess.Popen(
            [shutil.which(shell), *options], stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.terminal, self.lines = ours, 0
        self.settle(setup.format(script=script))

    def type(self, keys, mark):
        """Everything shown after the keys, up to a mark."""
        os.write(self.terminal, keys.encode())
        text, end = "", time.monotonic() + 60
        while mark not in text:
            assert time.monotonic() < end, f"no {mark!r} in {text!r}"
            if select.select([self.terminal], [], [], 1)[0]:
                text += os.read(self.terminal, 1 << 16).decode(errors="replace")
        return CODES.sub("", text)

    def settle(self, command=":"):
        """Run a command and see its end, so that nothing which is still being drawn is taken for a later answer."""
        self.lines += 1
        self.type(f"\x15{command}; echo set''tled {self.lines}.\n", f"settled {self.lines}.")

    def complete(self, line):
        shown = self.type(f"{line}\t\x18\x18", ">>")
        self.settle()
        before, after = shown.rsplit("<<", 1)
        return before.split(), after.split(">>")[0].rstrip()

    def close(self):
        with contextlib.suppress(OSError):
            os.write(self.terminal, b"\x15exit\n")
        self.process.terminate()
        self.process.wait(30)
        os.close(self.terminal)


@pytest.fixture(scope="module")
def typist(scripts, tmp_path_factory):
    """A shell by name, started once."""
    pytest.importorskip("pty", reason="no terminals to type at")
    started = {}

    def start(shell):
        if not shutil.which(shell):
            pytest.skip(f"no {shell}")
        if shell not in started:
            script = tmp_path_factory.mktemp(shell) / "octavo"
            script.write_text(scripts[shell])
            started[shell] = Typist(shell, script)
        return started[shell]

    yield start
    for shell in started.values():
        shell.close()


LINES = [
    ("octavo tr", "octavo train"),
    ("octavo doc", "octavo doctor"),
    ("octavo verify --at", "octavo verify --at-least"),
    ("octavo completion f", "octavo completion fish"),
    ("octavo train quantization=te_fp8_d", "octavo train quantization=te_fp8_delayedscaling"),
    ("octavo train use_qwix_q", "octavo train use_qwix_quantization="),
    ("octavo compare use_qwix_quantization=t", "octavo compare use_qwix_quantization=true"),
]
LISTS = [
    ("octavo train quantization=", set(octavo.recipes(aliases=True))),
    ("octavo train quantization_st", {"quantization_start_step=", "quantization_stop_step="}),
    ("octavo compare use_qwix_quantization=", {"true", "false"}),
    ("octavo completion ", {"bash", "zsh", "fish"}),
]


@pytest.mark.parametrize("shell", STARTS)
@pytest.mark.parametrize(("line", "completed"), LINES)
def test_a_tab_completes(typist, shell, line, completed):
    assert typist(shell).complete(line)[1] == completed


@pytest.mark.parametrize("shell", STARTS)
@pytest.mark.parametrize(("line", "offered"), LISTS)
def test_a_tab_shows_what_there_is(typist, shell, line, offered):
    shown, _ = typist(shell).complete(line)
    others = {word for word in shown if word.rstrip("=") in keys()} | {"README.md", "src", "src/"} & set(shown)
    assert offered <= set(shown)
    assert others - offered - set(line.split()) == set(), "what cannot be typed here"


def fish(script, line):
    """What fish offers for the last word of a line."""
    program = shutil.which("fish")
    if not program:
        pytest.skip("no fish")
    words = [program, "--no-config", "-c", 'source (cat | psub); complete -C "$argv[1]"', line]
    done = subprocess.run(words, input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [offered.split("\t")[0] for offered in done.stdout.splitlines()]


@pytest.mark.parametrize(("line", "completed"), LINES)
def test_fish_completes(scripts, line, completed):
    assert fish(scripts["fish"], line) == [completed.split()[-1]]


@pytest.mark.parametrize(("line", "offered"), LISTS)
def test_fish_offers(scripts, line, offered):
    key = line.split()[-1] if line.endswith("=") else ""
    assert set(fish(scripts["fish"], line)) == {f"{key}{word}" for word in offered}


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
