"""What is computed on one platform only."""

import jax
import jax.numpy as jnp
import pytest

import octavo
from octavo.qarray.platform import on_cpu


def lowered(fn, *args, platform):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("platform", "value"), [("cpu", "true"), ("tpu", "false"), ("cuda", "false")])
def test_on_cpu_is_a_constant_after_lowering(platform, value):
    assert f"dense<{value}> : tensor<i1>" in lowered(on_cpu, platform=platform)


def test_on_cpu_under_transformations():
    assert bool(on_cpu())
    assert bool(jax.jit(on_cpu)()) == (jax.default_backend() == "cpu")
    assert jax.vmap(lambda x: x + on_cpu().astype(x.dtype))(jnp.zeros(3)).tolist() == [1, 1, 1]


def test_the_gradient_of_a_weight_has_its_layout_on_tpus():
    x, w = jnp.ones((16, 32)), jnp.ones((32, 64))
    config = octavo.DotConfig.qt("int8")

    def loss(w):
        return jnp.sum(octavo.dot_general(x, w, (((1,), (0,)), ((), ())), config=config))

    assert lowered(jax.grad(loss), w, platform="tpu").count("@LayoutConstraint") == 1
    assert "@LayoutConstraint" not in lowered(jax.grad(loss), w, platform="cuda")
