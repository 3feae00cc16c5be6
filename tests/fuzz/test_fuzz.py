"""Each fuzzer for about a minute, and the fuzzers themselves: they find a planted defect, shrink it and repeat it."""

import json

import numpy as np
import pytest

import octavo
from tests.fuzz import FUZZERS
from tests.fuzz.runner import DefectError, Fuzzer, fuzz

# As many as most machines check in a minute, so that they check the same ones; `make fuzz` goes on.
MOST = {"quantizers": 100, "products": 60, "programs": 60, "configs": 5000, "checkpoints": 400, "requests": 3000}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FUZZERS if name != "kills"])  # tests/train/test_resume.py has these
def test_no_defect_is_found(name):
    counts, found = fuzz(FUZZERS[name], 60, seed=0, most=MOST[name])
    assert found is None, str(found)
    assert counts.total() > 0


def draw(rng):
    return {"n": int(rng.integers(0, 1000))}


def check(case):
    if case["n"] > 40:
        raise DefectError(f"{case['n']} is too large")
    return "small"


def shrink(case):
    yield {"n": case["n"] // 2}
    yield {"n": case["n"] - 1}


def test_a_planted_defect_is_found_and_shrunk():
    counts, found = fuzz(Fuzzer("planted", draw, check, shrink), 10, seed=1)
    assert found is not None
    assert found.case == {"n": 41}
    assert f"--case '{json.dumps(found.case)}'" in str(found)
    assert set(counts) <= {"small"}


def test_the_same_seed_draws_the_same_cases():
    drawn = []

    def record(case):
        drawn.append(case["n"])
        if len(drawn) % 5 == 0:
            raise DefectError("enough")
        return "drawn"

    for _ in range(2):
        fuzz(Fuzzer("recorded", draw, record), 10, seed=3)
    assert drawn[:5] == drawn[5:]


def test_every_format_is_drawn():
    rng = np.random.default_rng(0)
    drawn = {FUZZERS["quantizers"].draw(rng)["format"] for _ in range(1500)}
    assert drawn == set(octavo.formats())
