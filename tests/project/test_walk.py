"""The path from a function to its quantized jaxpr stays short."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp

import octavo

WALK = Path(__file__).parents[2] / "scripts" / "walk.py"


def test_one_matmul_passes_few_functions_and_files():
    walk = runpy.run_path(str(WALK))["Walk"]()
    low = octavo.quantized(lambda params, x: x @ params["w"], "int8")
    walk.run(lambda: jax.make_jaxpr(low)({"w": jnp.ones((64, 32))}, jnp.ones((16, 64))))
    assert 40 < len(walk.calls) < 80
    assert len({file for file, _, _ in walk.calls}) <= 20
