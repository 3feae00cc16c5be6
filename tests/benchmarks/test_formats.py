"""The benchmark of formats runs and prints a full table."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "formats.py"


@pytest.mark.slow
def test_the_table_has_a_row_per_format_and_a_group_per_library():
    pytest.importorskip("qwix")
    command = [sys.executable, SCRIPT, "--formats", "int8,int4,mxint8,nvfp4", "--shape", "64,128", "--repeats", "2"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    table = {tuple(line.split()[:2]): line.split("|")[1:] for line in printed.splitlines() if line.count("|") == 3}
    assert list(table)[2:] == [("int8", "-"), ("int4", "-"), ("int4", "32"), ("mxint8", "32"), ("nvfp4", "16")]
    for (name, _), groups in list(table.items())[2:]:
        octavo, qwix, aqt = (group.split() for group in groups)
        assert len(octavo) == len(qwix) == len(aqt) == 6
        assert "-" not in octavo
        assert (qwix == ["-"] * 6) == (name == "mxint8")
        assert (aqt == ["-"] * 6) == (name not in ("int8", "int4"))
    assert "jax " in printed.splitlines()[0]
