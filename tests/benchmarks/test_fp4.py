"""The ablations of `benchmarks/fp4.py` quantize what their names say."""

from pathlib import Path

import jax
import numpy as np
import pytest

import octavo
from octavo.rules import dot_config, recipe
from tests.arrays import normal

FOLDER = Path(__file__).parents[2] / "benchmarks"
ROWS = [f"{part}_{rounding}" for part in ("weights", "activations", "gradients") for rounding in ("eden", "sr")]
ROWS += ["forward", "forward_four_over_six", "forward_square", "forward_hadamard"]


@pytest.fixture
def fp4(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import fp4

    known = dict(octavo.rules.registry._recipes)
    yield fp4
    octavo.rules.registry._recipes.clear()
    octavo.rules.registry._recipes.update(known)


@pytest.mark.parametrize("name", [ROWS[0], *(pytest.param(row, marks=pytest.mark.slow) for row in ROWS[1:])])
def test_only_the_named_part_is_quantized(fp4, name):
    assert sorted(fp4.register()) == sorted(ROWS)
    config = dot_config(recipe(name, exclude=None)[-1], lhs_weight=False, rhs_weight=True)
    x, w, g = (normal(i, 64, 64) for i in range(3))

    @jax.jit
    def run(x, w, g, key):
        out, back = jax.vjp(lambda x, w: octavo.dot(x, w, config=config, key=key), x, w)
        return out, *back(g)

    found = run(x, w, g, jax.random.key(3))
    wanted = jax.jit(lambda: (x @ w, g @ w.T, x.T @ g))()
    errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, wanted, strict=True)]
    low = [error > 0.02 for error in errors]
    both = name.startswith("gradients")
    assert low == [
        name.startswith("forward"),
        both or name.startswith("activations"),
        both or name.startswith("weights"),
    ]
    assert max(errors) < 0.4
