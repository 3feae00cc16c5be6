"""Training runs that are killed at random, mostly during saves, and resumed: in the end they are the uninterrupted run.

No committed checkpoint is lost, and the last checkpoint, the metrics and the telemetry are those of a run that nothing
interrupted, bit for bit. A case is one run and its kills: `python -m tests.fuzz kills --cases 20` kills 200 times.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np

from octavo.train.metrics import TELEMETRY
from tests.fuzz.runner import Case, DefectError, Fuzzer

# Integers with stochastic rounding, float8 with histories, blocks with rotations: each keeps state of another kind.
RECIPES = ("int8", "fp8_gpu", "te_nvfp4")
KILLS = 10


def draw(rng: np.random.Generator) -> Case:
    return {"recipe": str(rng.choice(RECIPES)), "kills": KILLS, "seed": int(rng.integers(2**31))}


@functools.cache
def uninterrupted(recipe: str) -> Path:
    """The directory of a run that nothing interrupts."""
    from tests.train.interrupted import finish, lines, start

    directory = Path(tempfile.mkdtemp(prefix=f"fuzz-kills-{recipe}-"))
    finish(start(directory, run_name="whole", **settings(recipe)))
    if not lines(directory, "whole", TELEMETRY):
        raise DefectError("the run measured no telemetry")
    return directory


def settings(recipe: str) -> Case:
    return {"quantization": recipe, "quantization_metrics_interval": 7}


def check(case: Case) -> str:
    from tests.train.interrupted import kill_at_random

    recipe, kills = case["recipe"], case["kills"]
    kill_at_random(uninterrupted(recipe), kills, case["seed"], name=f"killed-{case['seed']}", **settings(recipe))
    return f"{recipe}, {kills} kills each"


KILLED = Fuzzer("kills", draw, check)
