"""Progress is a line in a terminal, a log anywhere else."""

import io
import os
import subprocess
import sys
import textwrap

import pytest

from octavo.train.progress import Progress, eval_line, log_line

METRICS = {
    "perf/step_time_seconds": 5.4019,
    "perf/per_device_tflops_per_sec": 141.5,
    "perf/per_device_tokens_per_sec": 9098.2,
    "learning/total_weights": 196608.0,
    "learning/loss": 11.3794,
    "learning/lm_loss": 11.3,
    "learning/perplexity": 80821.5,
    "learning/grad_norm": 1.0,
}


def test_log_line():
    assert log_line(3, METRICS) == (
        "completed step: 3, seconds: 5.402, TFLOP/s/device: 141.500, Tokens/s/device: 9098.200, total_weights: 196608, "
        "loss: 11.379, lm_loss: 11.300, perplexity: 80821.500"
    )
    assert log_line(0, {"learning/loss": float("nan")}) == "completed step: 0, loss: nan"
    assert log_line(0, {"learning/moe_lb_loss": 0.25}) == "completed step: 0, moe_lb_loss: 0.250"


def test_eval_line():
    assert eval_line(9, {"eval/avg_loss": 2.0, "eval/avg_perplexity": 7.389, "eval/total_weights": 512.0}) == (
        "Completed eval after train step 9, loss=2.000, perplexity=7.389, total_weights=512"
    )


def test_log(capsys):
    with Progress(8, log_period=3) as progress:
        for step in range(8):
            progress.update(step, {"learning/loss": 1.0})
            if step == 4:
                progress.log("saved")
    shown = [line.removeprefix("completed step: ")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["0", "3", "s", "6", "7"]


def test_lines_go_where_they_are_wanted(capsys):
    heard = []
    with Progress(1, log=heard.append) as progress:
        progress.update(0, {"learning/loss": 1.0})
        progress.log("done")
    assert heard == ["completed step: 0, loss: 1.000", "done"]
    assert capsys.readouterr().out == ""


def test_print_is_no_other_place(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setitem(sys.modules, "rich.progress", None)  # as if it were not installed
    with Progress(1, log=print) as progress:
        progress.update(0, {"learning/loss": 1.0})
    assert sys.stdout.getvalue() == "completed step: 0, loss: 1.000\n"


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")
def test_live_line_in_a_terminal():
    pytest.importorskip("rich")
    code = """
        from octavo.train.progress import Progress
        with Progress(40) as progress:
            for step in range(40):
                progress.update(step, {"learning/loss": 4.0, "perf/step_time_seconds": 2.0,
                                       "perf/per_device_tokens_per_sec": 12345.0})
                if step == 9:
                    progress.log("saved [bold] 10")
                    progress._bar.refresh()
    """
    master, slave = os.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=slave, stderr=slave, env=env)
    os.close(slave)
    text = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        text += part
    os.close(master)
    assert child.wait() == 0, text
    shown = text.decode()
    assert "completed step" not in shown
    assert "saved [bold] 10\r\n" in shown, "a message has a line of its own, and is not taken for markup"
    assert "10/40" in shown
    assert "loss 4.000  2 s/step  12,345 tokens/s " in shown
    assert " left" in shown
    assert "40/40" in shown
    assert "\x1b[2K" in shown, "the bar is drawn over itself"
