"""The runner of the benchmarks: tables, sections of the page, skipped peers, failing scripts."""

import argparse
import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
# `accelerators` needs the compilers of TPUs and GPUs, others tests, or a model and texts: they are run by hand.
BY_HAND = {"accelerators", "architectures", "finetune", "fp4", "ptq", "qat", "rollout", "speculative"}
HELPERS = {"__main__", *BY_HAND, "peers", "timing", "torch_peer", "torch_step", "tpu_layers"}


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("timing", "peers", "runner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("runner", FOLDER / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "runner", module)
    spec.loader.exec_module(module)
    return module


def test_every_script_is_run_and_has_its_own_heading(runner):
    names = [script.name for script in runner.SCRIPTS]
    assert sorted(names) == sorted({path.stem for path in FOLDER.glob("*.py")} - HELPERS)
    assert len({script.title for script in runner.SCRIPTS}) == len(names)


def test_a_script_is_described_without_its_command_line(runner):
    about = runner.description("startup")
    assert about.startswith("Import time")
    assert "python benchmarks" not in about


def test_tables(runner):
    table = runner.Table("Title", ("", "ms", "f32 / octavo"), (("a", "1.0", "2.00"), ("bcd", "10.0", "0.50")), "Note.")
    assert table.text() == "Title\n       ms  f32 / octavo\na     1.0          2.00\nbcd  10.0          0.50\nNote."
    lines = table.markdown().splitlines()
    assert lines[0] == "**Title**"
    assert lines[2:6] == ["|  | ms | f32 / octavo |", "|---|--:|--:|", "| a | 1.0 | 2.00 |", "| bcd | 10.0 | 0.50 |"]
    assert lines[-1] == "Note."


def test_slower_cells_are_listed(runner):
    ratios = ("f32 / octavo",)
    table = runner.Table("", ("", "ms", "f32 / octavo"), (("a", "1.0", "2.00"), ("b", "9.0", "0.50")), ratios=ratios)
    assert table.slower() == ["b: f32 / octavo 0.50"]
    # Rows are contenders here: a slow peer is no news about octavo.
    table = runner.Table("", ("", "f32 / octavo"), (("qwix", "0.5"), ("octavo", "1.2")), ratios=ratios)
    assert table.slower() == []


def test_a_page_keeps_the_sections_that_are_not_made_again(runner, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("# Benchmarks\n\nold words\n\n## Memory\n\nkept\n\n## Importing\n\nold\n")
    monkeypatch.setattr(runner, "section", lambda script, options, folder: f"## {script.title}\n\nnew")
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", "startup", "--out", str(page)])
    assert runner.main() == 0
    text = page.read_text()
    assert text.startswith(runner.INTRO.strip())
    assert text.endswith("## Memory\n\nkept\n\n## Importing\n\nnew\n")


def test_a_busy_machine_is_reported(runner):
    made = functools.partial(runner.provenance, quick=True)
    quiet = made(runner.CpuUsage(wall=60.0, own=90.0, total=93.0), 0.3)
    assert "(quick, 60 s, 90 s of CPU time; load average 0.3 at the start, other processes on 0.1 cores" in quiet
    assert runner.BUSY not in quiet
    assert runner.BUSY not in made(runner.CpuUsage(wall=60.0, own=90.0, total=93.0), 1.5), "it was loaded before"
    assert runner.BUSY in made(runner.CpuUsage(wall=60.0, own=90.0, total=110.0), 0.3), "it was loaded meanwhile"
    unknown = made(runner.CpuUsage(wall=60.0, own=90.0, total=None), 0.3)
    assert "other processes" not in unknown
    assert runner.BUSY not in unknown
    assert runner.BUSY in made(runner.CpuUsage(wall=60.0, own=90.0, total=None), 1.5)


def test_the_page_begins_with_the_unreliable_sections(runner):
    page = runner.render_page({"Memory": "## Memory\n\nfine", "Importing": f"## Importing\n\n{runner.BUSY}"})
    head, body = page.split("## Memory")
    assert head.endswith("**Measured on a busy machine**: Importing.\n\n")
    assert runner.BUSY in body
    assert "busy" not in runner.render_page({"Memory": "## Memory\n\nfine"})


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat")
def test_cpu_time_of_other_processes(runner):
    before = runner.CpuUsage.now()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    use = runner.CpuUsage.now().since(before)
    assert 0 < use.own < use.total + 0.1, "what children did is part of it"
    assert 0 <= use.others <= os.cpu_count() + 0.5


SECTION = """
import json, sys
from timing import Results
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
results = Results(method="by hand", file=given["--json"])
results.skip("torch and torchao", "no interpreter")
results.skip("torch and torchao", "no interpreter")
results.add_versions("peer 1.0")
results.add("Title", ["", "f32 / octavo"], [["a", "0.50"]], ratios=["f32 / octavo"])
"""


def test_a_section_names_what_was_skipped_and_what_is_slower(runner, tmp_path, monkeypatch):
    (tmp_path / "startup.py").write_text(f'"""What it does."""{SECTION}')
    monkeypatch.setattr(runner, "HERE", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    script = next(script for script in runner.SCRIPTS if script.name == "startup")
    options = argparse.Namespace(quick=False, torch=None, llama=None, load=0.0)
    text = runner.section(script, options, tmp_path)
    assert text.startswith("## Importing\n\n`benchmarks/startup.py`. What it does.\n\nMeasured on 20")
    assert "; by hand; peer 1.0." in text
    assert text.count("Skipped: torch and torchao (no interpreter).") == 1
    assert text.endswith("| a | 0.50 |\n\nSlower here: a: f32 / octavo 0.50.")


@pytest.mark.parametrize(
    ("python", "why"),
    [
        (None, "no interpreter was given: --torch PYTHON"),
        ("nowhere/python", "nowhere/python does not start: No such file or directory"),
        (sys.executable, f"{sys.executable} has no torch"),
    ],
    ids=["none given", "none there", "no torch in it"],
)
def test_torch_is_optional(runner, python, why):
    if python == sys.executable and importlib.util.find_spec("torch"):
        pytest.skip("torch is installed here")
    import peers

    skipped = []
    results = argparse.Namespace(skip=lambda what, reason: skipped.append((what, reason)))
    with peers.torch_process(results, python) as torch:
        assert torch is None
    assert skipped == [("torch and torchao", why)]


def test_a_script_that_fails_is_named_and_the_rest_is_written(runner, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    made = {"memory": None, "startup": "## Importing\n\nnew"}
    monkeypatch.setattr(runner, "section", lambda script, options, folder: made[script.name])
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", "memory,startup", "--out", str(page)])
    assert runner.main() == 1
    assert "failed: memory" in capsys.readouterr().out
    assert "## Importing" in page.read_text()


def test_an_unknown_name_is_an_error(runner, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", "matmull"])
    with pytest.raises(SystemExit, match="2"):
        runner.main()
    assert "no such benchmark: matmull" in capsys.readouterr().err


@pytest.mark.slow
def test_a_section_has_the_tables_the_versions_and_the_date(runner, tmp_path):
    pytest.importorskip("qwix")
    script = next(script for script in runner.SCRIPTS if script.name == "memory")
    text = runner.section(script, argparse.Namespace(quick=True, torch=None, llama=None, load=0.0), tmp_path)
    assert text.startswith("## Memory\n\n`benchmarks/memory.py`.")
    assert "jax 0." in text
    assert "Measured on 20" in text
    assert "| int8 | 1.00 | 3.98 |" in text
    assert len(json.loads((tmp_path / "memory.json").read_text())["tables"]) == 2
