"""Where Transformer Engine is installed and the devices are NVIDIA's, the recipes named after it are its own.

It needs a GPU to be imported, so a stand-in with its public interface takes its place here: what is tested is which
recipe it is asked for, and which products it is given.
"""

import importlib.machinery
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from octavo.compat import transformer_engine
from octavo.compat.maxtext import Quantization, configure_quantization
from octavo.rules import recipes

pytestmark = pytest.mark.standard_promotion
X = jnp.ones((4, 8))


@pytest.fixture
def engine(monkeypatch):
    """The stand-in: what it was asked for, by name."""
    asked = []

    class Recipe:
        def __init__(self, **arguments):
            asked.append((type(self).__name__, arguments))

    class Product(nn.Module):
        @nn.compact
        def __call__(self, lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None):
            self.variable("_overwrite_with_gradient", "scale", jnp.ones, ())
            return 7 + jax.lax.dot_general(lhs, rhs, dimension_numbers)

    for name in ("", ".common", ".common.recipe", ".jax", ".jax.flax"):
        module = types.ModuleType("transformer_engine" + name)
        module.__spec__ = importlib.machinery.ModuleSpec("transformer_engine" + name, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for kind, _ in transformer_engine.RECIPES.values():
        setattr(sys.modules["transformer_engine.common.recipe"], kind, type(kind, (Recipe,), {}))
    sys.modules["transformer_engine.jax.flax"].make_dot_general_cls = lambda recipe: Product
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return asked


def configured(name):
    return configure_quantization(types.SimpleNamespace(quantization=name))


def test_each_recipe_asks_for_its_own(engine):
    for name in transformer_engine.RECIPES:
        configured(name).dot_general_cls()
    assert engine == [
        ("DelayedScaling", {}),
        ("Float8CurrentScaling", {}),
        ("MXFP8BlockScaling", {}),
        ("NVFP4BlockScaling", {}),
        ("NVFP4BlockScaling", {"disable_rht": True}),
    ]


def test_the_recipes_are_those_of_the_registry():
    assert set(transformer_engine.RECIPES) == {name for name in recipes(aliases=True) if name.startswith("te_")}


@pytest.mark.usefixtures("engine")
def test_it_takes_the_products_of_layers():
    layer = nn.Dense(4, dot_general_cls=configured("te_mxfp8").dot_general_cls(), use_bias=False)
    y, variables = layer.init_with_output(jax.random.key(0), X)
    assert jnp.array_equal(y, 7 + X @ variables["params"]["kernel"])
    assert jax.tree.leaves(variables["_overwrite_with_gradient"]) == [1]


@pytest.mark.usefixtures("engine")
def test_products_with_batch_axes_are_ours():
    quantization = configured("te_fp8_currentscaling")
    numbers = (((2,), (1,)), ((0,), (0,)))
    lhs, rhs = jnp.ones((2, 3, 16)), jnp.ones((2, 16, 5))
    y, _ = quantization.dot_general_cls()().init_with_output(jax.random.key(0), lhs, rhs, numbers)
    assert jnp.allclose(y, 16)
    y, _ = quantization.einsum().init_with_output(jax.random.key(0), "bik,bkj->bij", lhs, rhs)
    assert jnp.allclose(y, 16)


def test_elsewhere_they_are_ours(engine, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert type(configured("te_mxfp8")) is Quantization
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delitem(sys.modules, "transformer_engine.jax")
    sys.modules["transformer_engine"].__path__ = []
    assert type(configured("te_mxfp8")) is Quantization
    assert engine == []
