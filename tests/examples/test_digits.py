"""The digits example trains for real, and its products are the int8 ones it says they are."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.examples import digits
from tests.ops.walk import dot_types


@pytest.mark.slow
def test_int8_learns_as_well_as_float(capsys):
    pytest.importorskip("sklearn")
    found = digits.main(["--epochs", "8"])
    assert min(found.values()) > 93
    assert abs(found["int8"] - found["float32"]) < 1.5
    printed = capsys.readouterr().out
    for name, percent in found.items():
        assert f"{name:8} {percent:.2f} %" in printed
    assert f"{found['int8'] - found['float32']:+.2f} points" in printed
    assert "Next: python -m octavo.examples.digits" in printed


def test_the_gradient_has_three_int8_products_per_layer():
    batch = (jnp.ones((digits.BATCH, digits.SIZES[0])), jnp.zeros(digits.BATCH, jnp.int32))
    params = digits.init(jax.random.key(0))
    types = dot_types(jax.grad(digits.loss), params, batch, digits.int8_matmul, static_argnums=2)
    # The gradient of the weights is there twice: as CPUs run it, and as other platforms do.
    assert len(types) == (1 + 1 + 2) * len(params)
    assert set(types) == {("int8", "int8", "int32")}


def test_product_and_gradients_are_near_the_float_ones():
    x, w, g = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(16, 64), (64, 24), (16, 24)]))
    want, float_pull = jax.vjp(jnp.matmul, x, w)
    got, pull = jax.vjp(digits.int8_matmul, x, w)
    for a, b in zip((got, *pull(g)), (want, *float_pull(g)), strict=True):
        assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)


def test_missing_scikit_learn_is_named(monkeypatch):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=r"pip install 'octavo\[examples\]'"):
        digits.digits()
