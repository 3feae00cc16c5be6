"""LoRA and QLoRA with the names, shapes and numerics of Qwix, for Flax Linen and NNX."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

import octavo
from tests.arrays import normal
from tests.cases import slow_except

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Qwix asks Flax for old names
KEY = jax.random.key(0)
X = normal(10, 2, 6, 8)
NORMAL = jax.nn.initializers.normal(0.3)
ONE = {"rank": 2, "alpha": 6.0, "lora_b_initializer": NORMAL}


def provider(library, weight_qtype, **ours):
    """LoRA on all modules, QLoRA except for the convolution: Qwix has none with weights only in low precision."""
    conv = library.LoraRule(module_path="conv", **ONE, **ours)
    return library.LoraProvider([conv, library.LoraRule(weight_qtype=weight_qtype, **ONE, **ours)])


class Linen(nn.Module):
    """Dense layers with two output and two input axes, and a convolution. Qwix raises for an einsum in Linen."""

    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((2, 4), name="up")(x)
        x = nn.DenseGeneral(8, axis=(-2, -1), name="down")(x)
        return nn.Conv(4, (3,), name="conv")(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.LinearGeneral(8, (2, 4), rngs=rngs)
        self.down = nnx.Einsum("btnh,nhd->btd", (2, 4, 8), rngs=rngs)
        self.conv = nnx.Conv(8, 4, (3,), rngs=rngs)

    def __call__(self, x):
        return self.conv(self.down(self.up(x)))


def shapes(tree):
    return {octavo._tree.path_str(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("qtype", slow_except(("int8",), (None, "int8")))
def test_linen_has_qwixs_parameters_and_results(qtype):
    ours = octavo.apply_lora_to_model(Linen(), provider(octavo, qtype, arithmetic="qwix"))
    theirs = qwix.apply_lora_to_model(Linen(), provider(qwix, qtype))
    variables, expected = ours.init(KEY, X), theirs.init(KEY, X)  # not compiled: the same weights, bit for bit
    adapters = {k: v for k, v in shapes(variables).items() if "_lora_" in k}
    assert adapters == {k: v for k, v in shapes(expected).items() if "_lora_" in k}
    assert adapters["params/down/kernel_lora_a"] == (8, 2)
    assert adapters["params/conv/kernel_lora_a"] == (3, 8, 2)
    # Our adapters in their model, whose weights are the same.
    _, own = octavo.lora.split_adapters(variables["params"])
    given = {name: {**tree, **own[name]} for name, tree in expected["params"].items()}
    np.testing.assert_allclose(
        jax.jit(ours.apply)(variables, X), theirs.apply({"params": given}, X), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("qtype", slow_except((None,), (None, "int8")))
def test_nnx_has_qwixs_parameters_and_results(qtype):
    model = Nnx(nnx.Rngs(0))
    ours = octavo.apply_lora_to_model(model, provider(octavo, qtype, arithmetic="qwix"), X, rngs=nnx.Rngs(1))
    theirs = qwix.apply_lora_to_model(model, provider(qwix, qtype), X, rngs=nnx.Rngs(1))
    own, expected = nnx.state(ours, nnx.LoRAParam), nnx.state(theirs, nnx.LoRAParam)
    assert shapes(own) == shapes(expected)
    nnx.update(theirs, own)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(ours, X), theirs(X), rtol=2e-5, atol=2e-5)

    def loss(m):
        return (m(X) ** 2).mean()

    # The gradients of the adapters only: the base weights may be integers.
    grads = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))
    for a, b in zip(jax.tree.leaves(grads(ours)), jax.tree.leaves(grads(theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_rules_and_provider_take_qwixs_arguments():
    rule = octavo.LoraRule(module_path=".*", rank=4, alpha=8.0, dropout=0.1, weight_qtype="nf4", tile_size=32)
    theirs = qwix.LoraRule(module_path=".*", rank=4, alpha=8.0, dropout=0.1, weight_qtype="nf4", tile_size=32)
    for name in ("rank", "alpha", "dropout", "weight_qtype", "tile_size", "module_path"):
        assert getattr(rule, name) == getattr(theirs, name)
    assert octavo.LoraProvider([rule]).rules == (rule,)
    with pytest.raises(ValueError, match="either rules or the fields"):
        octavo.LoraProvider([rule], rank=4)
    with pytest.warns(UserWarning, match="pass rngs="):
        octavo.apply_lora_to_model(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), octavo.LoraProvider(rank=1, alpha=1.0), X)
    with pytest.raises(TypeError, match=r"octavo\.lora\.adapted"):
        octavo.apply_lora_to_model(jnp.sin, octavo.LoraProvider(rank=1, alpha=1.0), X)
