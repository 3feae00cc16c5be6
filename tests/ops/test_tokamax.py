"""tokamax's ragged dot as a lowering: where it applies, with a stand-in for the library, which needs an accelerator."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo import DotConfig
from octavo.ops.lowerings import tokamax

X, W = jnp.ones((6, 8), jnp.int8), jnp.ones((2, 8, 4), jnp.int8)
SIZES = jnp.asarray([2, 3], jnp.int32)
NUMBERS = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


@pytest.fixture
def standin(monkeypatch):
    """A module `tokamax` that computes as JAX does and notes its calls, in a process that computes on a TPU."""
    calls = []

    def ragged_dot_general(lhs, rhs, group_sizes, numbers, *, precision, preferred_element_type, implementation):
        calls.append((lhs.dtype, rhs.dtype, preferred_element_type, implementation))
        options = {"precision": precision, "preferred_element_type": preferred_element_type}
        return jax.lax.ragged_dot_general(lhs, rhs, group_sizes, numbers, **options)

    module = types.ModuleType("tokamax")
    module.ragged_dot_general = ragged_dot_general
    module.__spec__ = types.SimpleNamespace(name="tokamax")
    monkeypatch.setitem(sys.modules, "tokamax", module)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    return calls


def test_it_gives_the_bits_of_jax(standin):
    got = tokamax.ragged_dot(X, W, SIZES, numbers=NUMBERS, precision=None, dtype=jnp.int32)
    np.testing.assert_array_equal(got[:5], 8)
    assert standin == [(jnp.int8, jnp.int8, jnp.int32, "mosaic")]


def test_auto_takes_it_for_all_three_products(standin):
    assert tokamax.unsupported(X, W) is None

    def loss(x, w):
        return octavo.ragged_dot(x, w, SIZES, config=DotConfig.qt("int8")).sum()

    jax.make_jaxpr(jax.grad(loss, (0, 1)))(X.astype(jnp.float32), W.astype(jnp.float32))
    assert {call[:3] for call in standin} == {(jnp.dtype("int8"), jnp.dtype("int8"), jnp.int32)}
    assert len(standin) >= 3


def test_it_says_why_not(standin, monkeypatch):
    assert "of one dtype, not int8 with bfloat16" in tokamax.unsupported(X, W.astype(jnp.bfloat16))
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert "XLA cannot partition the kernel: use jax.shard_map" in tokamax.unsupported(X, W)
    monkeypatch.setitem(sys.modules, "tokamax", None)
    assert tokamax.unsupported(X, W) == "tokamax is not installed: pip install tokamax"
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert "run on TPUs and GPUs, and this process computes on cpu" in tokamax.unsupported(X, W)


def test_forced_where_it_does_not_apply_is_an_error():
    config = DotConfig.qt("int8").replace(lowering="tokamax")
    with pytest.raises(ValueError, match="lowering='tokamax': tokamax's kernels run on TPUs and GPUs, and this"):
        octavo.ragged_dot(X.astype(jnp.float32), W.astype(jnp.float32), SIZES, config=config)
    with pytest.raises(ValueError, match="lowering='tokamax': it is for ragged dots; lowering='auto' takes"):
        octavo.dot(jnp.ones((4, 8)), jnp.ones((8, 4)), config=config)
